"""Step 6b: the seconds and bytes of a partitioned program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.cost_models.memory import Buffer, PeakMemory, dtype_bytes, peak_memory
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.collectives import DimAxes, Step, axis_size, compiled_step
from shardwright.planner.fusion import FusionPlan
from shardwright.planner.graph import OpGraph
from shardwright.planner.halo import halo_seconds
from shardwright.planner.liveness import Lifetime
from shardwright.planner.manual import manual_collectives
from shardwright.planner.nodes import is_trivial
from shardwright.planner.op_costs import kernel_seconds, local_bytes
from shardwright.planner.partial_sums import sums_of_products
from shardwright.planner.partitioned import Communication, Partitioned
from shardwright.planner.strategies import IntArray


@dataclass(frozen=True)
class PricedCollective:
    """A collective with its price.

    Attributes:
      kind: what the TPU compiler makes of it.
      nbytes: bytes on one device, of the larger of its input and output.
      seconds: of one run.
      can_hide: it runs asynchronously and can start long before its result is needed.
    """

    communication: Communication
    kind: str
    nbytes: float
    seconds: float
    can_hide: bool


@dataclass(frozen=True)
class Evaluation:
    """What one execution of a program costs on every device.

    Attributes:
      compute_s: seconds of all kernels in program order.
      collective_s: seconds of all collectives.
      exposed_collective_s: of those, the seconds in which no kernel runs.
      peak: the memory at its fullest moment and what fills it.
      buffers: what memory holds over the execution, each with its kind as in `MemoryModel`.
      compute_by_op: operation id (the last of its kernel) -> seconds of all its runs.
    """

    compute_s: float
    collective_s: float
    exposed_collective_s: float
    collectives: tuple[PricedCollective, ...] = field(repr=False)
    peak: PeakMemory = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    compute_by_op: dict[int, float] = field(repr=False)

    @property
    def step_s(self) -> float:
        """Seconds of one execution."""
        return self.compute_s + self.exposed_collective_s


def evaluate_partitioned(
    graph: OpGraph,
    fusions: FusionPlan,
    buffers: Sequence[Lifetime],
    partitioned: Partitioned,
    mesh: LogicalMesh,
) -> Evaluation:
    """Prices a partitioned program by the cost models of the mesh's slice.

    All-gathers that can run ahead of their use hide behind the compute of their loop (or of the
    program outside loops), as far as it lasts; every other collective is exposed.
    """
    shapes = _LocalShapes(graph, partitioned, mesh)
    compute_by_op: dict[int, float] = {}
    compute_by_loop: dict[int, float] = {}
    for fusion in fusions.fusions:
        first = graph.ops[fusion.ops[0]]
        kernel = kernel_seconds(graph, fusion, shapes, mesh.slice.chip)
        seconds = first.trips * float(kernel.total[0])
        last = fusion.ops[-1]
        compute_by_op[last] = compute_by_op.get(last, 0.0) + seconds
        compute_by_loop[first.loop] = compute_by_loop.get(first.loop, 0.0) + seconds
    communications = [*_reduced_once(graph, partitioned), *_manual(graph, mesh)]
    collectives = tuple(_price(c, mesh) for c in communications)
    halos = _halo_seconds(graph, shapes, partitioned, mesh)
    total = sum(c.seconds * c.communication.trips for c in collectives) + halos
    hidden = _hidden_seconds(collectives, compute_by_loop)
    held = _buffers(graph, fusions, buffers, partitioned, mesh)
    return Evaluation(
        compute_s=sum(compute_by_loop.values()),
        collective_s=total,
        exposed_collective_s=total - hidden,
        collectives=collectives,
        peak=peak_memory(held),
        buffers=tuple(held),
        compute_by_op=compute_by_op,
    )


def _price(communication: Communication, mesh: LogicalMesh) -> PricedCollective:
    step = communication.step
    elements = float(np.prod(communication.shape, dtype=np.float64))
    nbytes = elements * dtype_bytes(communication.dtype)
    kind, seconds = compiled_step(step, nbytes, mesh)
    can_hide = communication.prefetchable and kind == "all_gather"
    return PricedCollective(communication, kind, nbytes / step.divisor, seconds, can_hide)


def _reduced_once(graph: OpGraph, partitioned: Partitioned) -> list[Communication]:
    """The collectives of the partitioner, with sums of products reduced once."""
    sums = sums_of_products(graph)
    seen: set[tuple[int, Step]] = set()
    found = []
    for communication in partitioned.communications:
        total = sums.get(communication.from_value)
        if total is not None and communication.step.kind in ("all_reduce", "reduce_scatter"):
            key = (total[0], communication.step)
            if key in seen:
                continue
            seen.add(key)
        found.append(communication)
    return found


def _manual(graph: OpGraph, mesh: LogicalMesh) -> list[Communication]:
    """The collectives of `shard_map` regions, which the partitioner leaves as they are."""
    found = []
    for op, value, step in manual_collectives(graph, mesh):
        whole: DimAxes = ((),) * len(value.shape)
        found.append(
            Communication(
                step=step,
                shape=value.shape,
                dtype=value.dtype,
                before=whole,
                after=whole,
                near=op.id,
                trips=op.trips,
                loop=op.loop,
                prefetchable=False,
                read_by=(),
                from_value=-1,
            )
        )
    return found


def _hidden_seconds(
    collectives: Sequence[PricedCollective], compute_by_loop: dict[int, float]
) -> float:
    gathers: dict[int, float] = {}
    for priced in collectives:
        c = priced.communication
        if priced.can_hide:
            gathers[c.loop] = gathers.get(c.loop, 0.0) + priced.seconds * c.trips
    return sum(min(s, compute_by_loop.get(loop, 0.0)) for loop, s in gathers.items())


def _halo_seconds(
    graph: OpGraph, shapes: _LocalShapes, partitioned: Partitioned, mesh: LogicalMesh
) -> float:
    names = tuple(mesh.shape)
    total = 0.0
    for op in graph.ops:
        if op.rule is None or not op.rule.permutation or op.id not in partitioned.operands:
            continue
        row = np.full((1, len(names)), -1, dtype=np.int64)
        for mapping, sharding in zip(op.rule.operands, partitioned.operands[op.id], strict=True):
            for factors, axes in zip(mapping, sharding, strict=True):
                for axis in axes:
                    if factors:
                        row[0, names.index(axis.name)] = factors[0]
        total += op.trips * float(halo_seconds(op, graph, row, shapes, mesh)[0])
    return total


class _LocalShapes:
    """Local shapes of every operand and result as the partitioned program computes them."""

    def __init__(self, graph: OpGraph, partitioned: Partitioned, mesh: LogicalMesh) -> None:
        self._graph = graph
        self._partitioned = partitioned
        self._sizes = mesh.shape

    def __call__(self, op_id: int, position: int) -> IntArray:
        op = self._graph.ops[op_id]
        if position >= 0:
            value, shardings = op.operands[position], self._partitioned.operands.get(op_id)
        else:
            value, shardings = op.results[-1 - position], self._partitioned.results.get(op_id)
            position = -1 - position
        shape = self._graph.values[value].shape
        sharding = shardings[position] if shardings is not None else ((),) * len(shape)
        return local_shape(shape, sharding, self._sizes)[None, :]


def local_shape(shape: Sequence[int], sharding: DimAxes, sizes: dict[str, int]) -> IntArray:
    """The largest shard of an array, shape (rank,)."""
    local = []
    for size, axes in zip(shape, sharding, strict=True):
        parts = 1
        for axis in axes:
            parts *= axis_size(axis, sizes)
        local.append(-(-size // parts))
    return np.array(local, dtype=np.int64)


def _buffers(
    graph: OpGraph,
    fusions: FusionPlan,
    lifetimes: Sequence[Lifetime],
    partitioned: Partitioned,
    mesh: LogicalMesh,
) -> list[Buffer]:
    """Buffers of the program's values and of what collectives make of them."""
    sizes = mesh.shape
    read_times = _ReadTimes(graph, fusions)
    communicated: dict[int, list[Communication]] = {}
    for c in partitioned.communications:
        if c.from_value >= 0:
            communicated.setdefault(c.from_value, []).append(c)
    readers = graph.uses()
    buffers = []
    kind_of = _buffer_kinds(graph)

    def nbytes(shape: Sequence[int], dtype: str, sharding: DimAxes) -> float:
        return float(local_bytes(local_shape(shape, sharding, sizes)[None, :], dtype)[0])

    starts: dict[int, int] = {}
    for life in lifetimes:
        value = graph.values[life.value]
        sharding = partitioned.values.get(life.value, ((),) * len(value.shape))
        end = life.end
        chain = communicated.get(life.value, [])
        moved = {r for c in chain for r in c.read_by}
        if chain and value.producer >= 0 and moved >= set(readers.get(life.value, ())):
            # Nobody reads it as it was made: it dies where the first collective takes it.
            shrinks = chain[0].step.kind in ("reduce_scatter", "all_slice")
            end = life.start + 1 if shrinks else read_times.first(chain[0].read_by, life) + 1
        starts[life.value] = life.start
        name = _buffer_name(graph, life.value)
        buffers.append(
            Buffer(
                name,
                life.start,
                max(end, life.start + 1),
                nbytes(value.shape, value.dtype, sharding),
                kind_of.get(life.value, "temporary"),
            )
        )
    for origin, chain in communicated.items():
        if is_trivial(graph.values[origin]):
            continue
        for c in chain:
            if c.step.kind == "all_reduce":
                continue  # in place
            first, last = read_times.span(c.read_by)
            shrinks = c.step.kind in ("reduce_scatter", "all_slice")
            start = starts.get(origin, first) if shrinks and c.near >= 0 else first
            size = nbytes(c.shape, c.dtype, c.after)
            buffers.append(
                Buffer(
                    f"{c.step.kind} of {_buffer_name(graph, origin)}",
                    min(start, last),
                    last + 1,
                    size,
                    "collective",
                )
            )
    return buffers


def _buffer_kinds(graph: OpGraph) -> dict[int, str]:
    """Value -> kind of its buffer as `MemoryModel` names them; temporaries are left out."""
    kinds = dict.fromkeys(graph.results, "result")
    for loop in graph.loops:
        for carry in loop.carries:
            kinds |= dict.fromkeys((carry.argument, carry.result, carry.yielded), "loop")
    updated = set(graph.aliases.values())
    for number, value in enumerate(graph.arguments):
        kinds[value] = "state" if number in updated else "input"
    return kinds


def _buffer_name(graph: OpGraph, value: int) -> str:
    """What a person would call a buffer: an argument's number, or the operation that makes it."""
    if value in graph.arguments:
        return graph.argument_names[graph.arguments.index(value)]
    tensor = graph.values[value]
    kind = f"{tensor.dtype}{list(tensor.shape)}"
    for loop in graph.loops:
        if any(value in (c.argument, c.result) for c in loop.carries):
            return f"{kind} carried by the loop at {graph.ops[loop.first_op - 1].source}"
    op = graph.ops[tensor.producer]
    return f"{kind} of {op.name.removeprefix('stablehlo.')} at {op.source or op.key.location}"


class _ReadTimes:
    """When operations really read their operands: when the kernel that holds them runs."""

    def __init__(self, graph: OpGraph, fusions: FusionPlan) -> None:
        self._graph = graph
        self._fusions = fusions
        self._readers = graph.uses()
        self._known: dict[int, int] = {}
        self._loop_ends = {loop.first_op - 1: loop.last_op - 1 for loop in graph.loops}

    def of(self, op_id: int) -> int:
        """The time at which an operation reads; what it reads on behalf of others, theirs."""
        if op_id not in self._known:
            fusion = self._fusions.fusion_of_op.get(op_id)
            if fusion is not None:
                self._known[op_id] = self._fusions.fusions[fusion].time
            else:
                op = self._graph.ops[op_id]
                later = [self.of(r) for v in op.results for r in self._readers.get(v, ())]
                self._known[op_id] = max(later, default=op_id)
        return self._known[op_id]

    def span(self, readers: Sequence[int]) -> tuple[int, int]:
        """First and last time that operations read; a loop keeps its initial values to its end."""
        end = len(self._graph.ops)
        firsts = [end if r < 0 else r if r in self._loop_ends else self.of(r) for r in readers]
        lasts = [end if r < 0 else self._loop_ends.get(r, self.of(r)) for r in readers]
        return min(firsts, default=end), max(lasts, default=end)

    def first(self, readers: Sequence[int], life: Lifetime) -> int:
        """The first time that operations read, not before the value is made."""
        return max(self.span(readers)[0], life.start)
