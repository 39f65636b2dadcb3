"""The buffers of a partitioned program and when they are alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardwright.cost_models.memory import Buffer
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.collectives import DimAxes, axis_size, shards
from shardwright.planner.fusion import FusionPlan
from shardwright.planner.graph import OpGraph
from shardwright.planner.kernel_costs import evaluate_cost
from shardwright.planner.kernel_ops import local_sizes
from shardwright.planner.liveness import Lifetime
from shardwright.planner.nodes import is_trivial
from shardwright.planner.op_costs import local_bytes
from shardwright.planner.partitioned import Communication, Partitioned
from shardwright.planner.product_order import in_order
from shardwright.planner.strategies import IntArray

_VMEM_SHARE = 0.75
"""Part of a core's VMEM that arrays take; the rest is for the blocks that kernels work on.

Source: peaks of compiled programs whose activations are small (benchmarks/fidelity.py).
"""
_BRIEF = 4
"""Kernels that may run while a temporary lies in VMEM; source as of `_VMEM_SHARE`."""
_SHRINKS = ("reduce_scatter", "all_slice")


def local_shape(shape: Sequence[int], sharding: DimAxes, sizes: dict[str, int]) -> IntArray:
    """The largest shard of an array, shape (rank,)."""
    local = []
    for size, axes in zip(shape, sharding, strict=True):
        parts = 1
        for axis in axes:
            parts *= axis_size(axis, sizes)
        local.append(-(-size // parts))
    return np.array(local, dtype=np.int64)


def step_buffers(
    graph: OpGraph,
    fusions: FusionPlan,
    lifetimes: Sequence[Lifetime],
    partitioned: Partitioned,
    mesh: LogicalMesh,
) -> list[Buffer]:
    """Buffers in HBM of the program's values and of what collectives make of them."""
    step = _StepBuffers(graph, fusions, lifetimes, partitioned, mesh)
    # What kernels of `sw.kernel` allocate is told as bytes of HBM.
    kernels = np.sort([fusion.time for fusion in fusions.fusions])
    chip = mesh.slice.chip
    inside = without_vmem(step.find(), _vmem(chip), kernels)
    if chip.cmem_bytes is not None:
        inside = without_vmem(inside, float(chip.cmem_bytes.value), kernels, cmem=True)
    return [*inside, *step.kernel_temporaries()]


def _vmem(chip: ChipProfile) -> float:
    """Bytes of VMEM for arrays; where two cores are one device half, as peaks on v5p show."""
    return _VMEM_SHARE * chip.vmem_bytes_per_tensorcore.value / chip.device_tensorcores


def without_vmem(
    buffers: Sequence[Buffer], capacity: float, kernels: IntArray, *, cmem: bool = False
) -> list[Buffer]:
    """The buffers that do not lie in VMEM, or in CMEM.

    The compiler puts temporaries there that are not needed for long, as far as it has room:
    here the shortest-lived first, and of those the largest. What more than a few kernels lie
    between is moved out, as kernels in between have their operands brought in. CMEM, in which no
    kernel works, takes the largest first, up to all of it.

    Args:
      capacity: bytes of it for temporaries.
      kernels: the program points at which kernels run, in order.
    """
    fits = [
        b
        for b in buffers
        if b.kind == "temporary"
        and b.nbytes <= (capacity if cmem else capacity / 2)
        and np.searchsorted(kernels, b.end) - np.searchsorted(kernels, b.start) <= _BRIEF
    ]
    fits.sort(key=lambda b: (-b.nbytes if cmem else b.end - b.start, -b.nbytes))
    held = np.zeros(max((b.end for b in buffers), default=0) + 1)
    inside = set()
    for buffer in fits:
        span = held[buffer.start : buffer.end]
        if span.max(initial=0.0) + buffer.nbytes <= capacity:
            span += buffer.nbytes
            inside.add(id(buffer))
    return [buffer for buffer in buffers if id(buffer) not in inside]


class _StepBuffers:
    def __init__(
        self,
        graph: OpGraph,
        fusions: FusionPlan,
        lifetimes: Sequence[Lifetime],
        partitioned: Partitioned,
        mesh: LogicalMesh,
    ) -> None:
        self._graph = graph
        self._fusions = fusions
        self._lifetimes = lifetimes
        self._partitioned = partitioned
        self._sizes = mesh.shape
        self._readers = graph.uses()
        self._times = _ReadTimes(graph, fusions, lifetimes)
        self._kinds = buffer_kinds(graph)
        self._starts: dict[int, int] = {}
        self._sizes_of: dict[tuple[tuple[int, ...], str, DimAxes], float] = {}
        self._names = _BufferNames(graph)
        self._arguments = frozenset(graph.arguments)
        self._chains: dict[int, list[Communication]] = {}
        for c in partitioned.communications:
            if c.from_value >= 0:
                self._chains.setdefault(c.from_value, []).append(c)

    def find(self) -> list[Buffer]:
        self._starts = {life.value: life.start for life in self._lifetimes}
        buffers = [self._value_buffer(life) for life in self._lifetimes]
        for origin, chain in self._chains.items():
            if not is_trivial(self._graph.values[origin]):
                for c in chain:
                    buffers += self._collective_buffer(origin, c)
        return in_order(self._graph, buffers, lambda op: self._times.of(op)[0])

    def kernel_temporaries(self) -> Iterator[Buffer]:
        """What kernels say that they allocate while they run."""
        for op in self._graph.ops:
            info = op.detail.get("kernel")
            if info is None or info.temp_bytes is None or op.id not in self._partitioned.operands:
                continue
            sides = (
                (op.operands, self._partitioned.operands[op.id]),
                (op.results, self._partitioned.results[op.id]),
            )
            operands, results = (
                [
                    local_shape(self._graph.values[v].shape, sharding, self._sizes)[None, :]
                    for v, sharding in zip(values, shardings, strict=True)
                ]
                for values, shardings in sides
            )
            sizes = local_sizes(info, operands, results)
            nbytes = float(np.max(evaluate_cost(info.temp_bytes, sizes)))
            name = f"temporaries of {info.name} at {op.source or op.key.location}"
            yield Buffer(name, op.id, op.id + 1, nbytes, "temporary")

    def _nbytes(self, shape: tuple[int, ...], dtype: str, sharding: DimAxes) -> float:
        key = shape, dtype, sharding
        if key not in self._sizes_of:
            local = local_shape(shape, sharding, self._sizes)[None, :]
            self._sizes_of[key] = float(local_bytes(local, dtype)[0])
        return self._sizes_of[key]

    def _value_buffer(self, life: Lifetime) -> Buffer:
        value = self._graph.values[life.value]
        sharding = self._partitioned.values.get(life.value, ((),) * len(value.shape))
        end = life.end
        chain = self._chains.get(life.value, [])
        moved = {r for c in chain for r in c.read_by}
        if chain and value.producer >= 0 and moved >= set(self._readers.get(life.value, ())):
            # Nobody reads it as it was made: it dies where the first collective takes it.
            shrinks = chain[0].step.kind in _SHRINKS
            end = life.start + 1 if shrinks else self._times.first(chain[0].read_by, life) + 1
        nbytes = self._nbytes(value.shape, life.dtype or value.dtype, sharding)
        name = self._names(life.value)
        if life.dtype is not None:
            name = f"{life.dtype} cast of {name}"
        kind = self._kinds.get(life.value, "temporary")
        return Buffer(name, life.start, max(end, life.start + 1), nbytes, kind)

    def _collective_buffer(self, origin: int, c: Communication) -> Iterator[Buffer]:
        """The buffer of a collective's result, or of what it slices, where there is one."""
        if c.step.kind == "all_reduce":
            return  # in place
        if self._times.cast_by_loops(c, origin):
            return  # what the loops carry is the gathered buffer
        first, last = self._times.span(c.read_by, origin)
        start, sharding = first, c.after
        if c.step.kind == "all_slice" and origin not in self._fusions.materialized:
            if c.from_value in self._arguments or self._even(c):
                return  # readers slice what they read, or compute no more than their part
            # Padded before it is cut, it is made whole, and no later than what it is added to.
            start, sharding = self._company(c, first), c.before
        elif c.step.kind in _SHRINKS and c.near >= 0:
            start = self._starts.get(origin, first)
        if c.on_the_way:
            last = max(start, first)
        name = f"{c.step.kind} of {self._names(origin)}"
        nbytes = self._nbytes(c.shape, c.dtype, sharding)
        yield Buffer(name, min(start, last), last + 1, nbytes, "collective")

    def _even(self, c: Communication) -> bool:
        return all(
            size % shards((axes,), self._sizes) == 0
            for size, axes in zip(c.shape, c.after, strict=True)
        )

    def _company(self, c: Communication, first: int) -> int:
        """When the first of the other tensors was made that the readers of a value read."""
        fusions = self._fusions
        found = [first]
        for reader in c.read_by:
            kernel = fusions.fusion_of_op.get(reader)
            for read in fusions.fusions[kernel].reads if kernel is not None else ():
                value = self._graph.ops[read.op].operands[read.operand]
                if value in self._starts and self._graph.values[value].producer >= 0:
                    found.append(self._starts[value])
        return min(found)


def buffer_kinds(graph: OpGraph) -> dict[int, str]:
    """Value -> kind of its buffer as `MemoryModel` names them; temporaries are left out."""
    kinds = dict.fromkeys(graph.results, "result")
    for loop in graph.loops:
        for carry in loop.carries:
            kinds |= dict.fromkeys((carry.argument, carry.result, carry.yielded), "loop")
    updated = set(graph.aliases.values())
    for number, value in enumerate(graph.arguments):
        kinds[value] = "state" if number in updated else "input"
    return kinds


class _BufferNames:
    """What a person would call a buffer: an argument's path, or the operation that makes it."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._arguments = dict(zip(graph.arguments, graph.argument_names, strict=True))
        self._carried: dict[int, str] = {}
        for loop in graph.loops:
            source = graph.ops[loop.first_op - 1].source
            for carry in loop.carries:
                for value in (carry.argument, carry.result):
                    self._carried.setdefault(value, source)

    def __call__(self, value: int) -> str:
        if value in self._arguments:
            return self._arguments[value]
        tensor = self._graph.values[value]
        kind = f"{tensor.dtype}{list(tensor.shape)}"
        if value in self._carried:
            return f"{kind} carried by the loop at {self._carried[value]}"
        op = self._graph.ops[tensor.producer]
        return f"{kind} of {op.name.removeprefix('stablehlo.')} at {op.source or op.key.location}"


class _ReadTimes:
    """When operations really read their operands: when the kernel that holds them runs."""

    def __init__(self, graph: OpGraph, fusions: FusionPlan, lifetimes: Sequence[Lifetime]) -> None:
        self._graph = graph
        self._fusions = fusions
        self._readers = graph.uses()
        self._known: dict[int, tuple[int, int]] = {}
        self._loop_ends = {loop.first_op - 1: loop.last_op - 1 for loop in graph.loops}
        carries = [carry for loop in graph.loops for carry in loop.carries]
        cast = {life.value for life in lifetimes if life.dtype is not None}
        self._cast_inits = {carry.init for carry in carries if carry.argument in cast}

    def of(self, op_id: int) -> tuple[int, int]:
        """First and last time at which an operation reads, or others for which it does.

        A weight that is cast for both passes is read in both.
        """
        if op_id < 0:
            return (len(self._graph.ops),) * 2
        if op_id in self._loop_ends:
            return op_id, self._loop_ends[op_id]
        if op_id not in self._known:
            fusion = self._fusions.fusion_of_op.get(op_id)
            if fusion is not None:
                self._known[op_id] = (self._fusions.fusions[fusion].time,) * 2
            else:
                op = self._graph.ops[op_id]
                later = [self.of(r) for v in op.results for r in self._readers.get(v, ())]
                firsts, lasts = zip(*later or [(op_id, op_id)], strict=True)
                self._known[op_id] = min(firsts), max(lasts)
        return self._known[op_id]

    def span(self, readers: Sequence[int], origin: int = -1) -> tuple[int, int]:
        """First and last time that operations read a value.

        A loop keeps its initial values to its end, but for those that are cast before it.
        """
        cast = origin in self._cast_inits
        spans = [(r, r) if cast and r in self._loop_ends else self.of(r) for r in readers]
        firsts, lasts = zip(*spans or [self.of(-1)], strict=True)
        return min(firsts), max(lasts)

    def cast_by_loops(self, c: Communication, origin: int) -> bool:
        """Whether only loops read a gathered stack, which is cast before it is gathered."""
        loops = all(reader in self._loop_ends for reader in c.read_by)
        return origin in self._cast_inits and loops and not c.on_the_way

    def first(self, readers: Sequence[int], life: Lifetime) -> int:
        """The first time that operations read, not before the value is made."""
        return max(self.span(readers)[0], life.start)
