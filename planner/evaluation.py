"""Step 6b: the seconds and bytes of a partitioned program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.cost_models.memory import Buffer, PeakMemory, dtype_bytes, peak_memory
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.collectives import DimAxes, Step, compiled_step
from shardwright.planner.fusion import FusionPlan
from shardwright.planner.graph import OpGraph
from shardwright.planner.halo import exchanges
from shardwright.planner.liveness import Lifetime
from shardwright.planner.manual import manual_collectives
from shardwright.planner.op_costs import kernel_seconds
from shardwright.planner.partial_sums import sums_of_products
from shardwright.planner.partitioned import Communication, Partitioned
from shardwright.planner.step_buffers import local_shape, step_buffers
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
    shifts, halos = _exchanges(graph, shapes, partitioned, mesh)
    collectives = (*(_price(c, mesh) for c in communications), *shifts)
    total = sum(c.seconds * c.communication.trips for c in collectives) + halos
    hidden = _hidden_seconds(collectives, compute_by_loop)
    held = step_buffers(graph, fusions, buffers, partitioned, mesh)
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


def _exchanges(
    graph: OpGraph, shapes: _LocalShapes, partitioned: Partitioned, mesh: LogicalMesh
) -> tuple[list[PricedCollective], float]:
    """The collective-permutes that shifts are, and the seconds of all other exchanges."""
    names = tuple(mesh.shape)
    shifts, halos = [], 0.0
    for op in graph.ops:
        if op.rule is None or not op.rule.permutation or op.id not in partitioned.operands:
            continue
        row = np.full((1, len(names)), -1, dtype=np.int64)
        for mapping, sharding in zip(op.rule.operands, partitioned.operands[op.id], strict=True):
            for factors, axes in zip(mapping, sharding, strict=True):
                for axis in axes:
                    if factors:
                        row[0, names.index(axis.name)] = factors[0]
        for exchange in exchanges(op, graph, row, shapes, mesh):
            seconds, nbytes = float(exchange.seconds[0]), float(exchange.nbytes[0])
            if "shift" not in op.detail:
                halos += op.trips * seconds
                continue
            value = graph.values[op.results[0]]
            sharding = partitioned.results[op.id][0]
            permute = Communication(
                step=Step("collective_permute", exchange.axes, value.nbytes / nbytes),
                shape=value.shape,
                dtype=value.dtype,
                before=sharding,
                after=sharding,
                near=op.id,
                trips=op.trips,
                loop=op.loop,
                prefetchable=False,
                read_by=(),
                from_value=-1,
            )
            shifts.append(PricedCollective(permute, "collective_permute", nbytes, seconds, False))
    return shifts, halos


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
