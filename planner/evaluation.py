"""Step 6b: the seconds and bytes of a partitioned program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.cost_models.memory import Buffer, PeakMemory, peak_memory
from shardwright.cost_models.schedule import Entry, simulate
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.collectives import DimAxes
from shardwright.planner.communications import (
    PricedCollective,
    host_copies,
    neighbour_exchanges,
    priced_collectives,
)
from shardwright.planner.fusion import FusionPlan
from shardwright.planner.graph import OpGraph
from shardwright.planner.kernel_times import KernelTimes, Shardings
from shardwright.planner.liveness import Lifetime
from shardwright.planner.partitioned import Partitioned
from shardwright.planner.schedule import step_entries
from shardwright.planner.step_buffers import local_shape, step_buffers
from shardwright.planner.strategies import IntArray

_CONVERT = "stablehlo.convert"


@dataclass(frozen=True)
class Evaluation:
    """What one execution of a program costs on every device.

    Attributes:
      compute_s: seconds of all kernels in program order.
      collective_s: seconds of all collectives.
      host_copy_s: seconds of all copies to and from the memory of the host.
      exposed_collective_s: seconds of the schedule in which no kernel runs.
      schedule: the step as it was simulated; labels are `shardwright.planner.schedule.Label`s.
      peak: the memory at its fullest moment and what fills it.
      buffers: what memory holds over the execution, each with its kind as in `MemoryModel`.
      compute_by_op: operation id (the last of its kernel) -> seconds of all its runs.
    """

    compute_s: float
    collective_s: float
    host_copy_s: float
    exposed_collective_s: float
    collectives: tuple[PricedCollective, ...] = field(repr=False)
    schedule: tuple[Entry, ...] = field(repr=False)
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

    The step is simulated (`shardwright.cost_models.schedule`): all-gathers that can run ahead of
    their use hide behind the kernels before it, copies to and from the host behind kernels; every
    other collective stops the kernels.
    """
    shapes = _LocalShapes(graph, partitioned, mesh)
    compute_by_op: dict[int, float] = {}
    kernel = KernelTimes(graph, shapes, shapes.shardings, mesh.slice.chip)
    for fusion in fusions.fusions:
        seconds = graph.ops[fusion.ops[0]].trips * kernel(fusion)
        last = fusion.ops[-1]
        compute_by_op[last] = compute_by_op.get(last, 0.0) + seconds
    shifts, halos = neighbour_exchanges(graph, shapes, partitioned, mesh)
    collectives = (*priced_collectives(graph, partitioned, mesh), *shifts)
    copies = host_copies(graph, shapes, mesh)
    schedule = step_entries(graph, fusions, compute_by_op, collectives, (*halos, *copies))
    held = step_buffers(graph, fusions, buffers, partitioned, mesh)
    return Evaluation(
        compute_s=sum(compute_by_op.values()),
        collective_s=sum(c.seconds * c.communication.trips for c in collectives)
        + sum(halo.seconds for halo in halos),
        host_copy_s=sum(copy.seconds for copy in copies),
        exposed_collective_s=simulate(schedule).exposed_s,
        collectives=collectives,
        schedule=schedule,
        peak=peak_memory(held),
        buffers=tuple(held),
        compute_by_op=compute_by_op,
    )


class _LocalShapes:
    """Local shapes of every operand and result as the partitioned program computes them."""

    def __init__(self, graph: OpGraph, partitioned: Partitioned, mesh: LogicalMesh) -> None:
        self._graph = graph
        self._partitioned = partitioned
        self._sizes = mesh.shape
        self._cast_in_shards: dict[int, DimAxes] = {}
        """Casts that the compiler makes of shards, before they are gathered."""
        for c in partitioned.communications:
            if c.step.kind == "all_gather" and c.from_value in graph.arguments:
                narrowed = c.dtype != graph.values[c.from_value].dtype
                for reader in c.read_by if narrowed else ():
                    if reader >= 0 and graph.ops[reader].name == _CONVERT:
                        self._cast_in_shards.setdefault(reader, c.before)

    def __call__(self, op_id: int, position: int) -> IntArray:
        op = self._graph.ops[op_id]
        if op_id in self._cast_in_shards:
            shape, sharding = self._graph.values[op.results[0]].shape, self._cast_in_shards[op_id]
            return local_shape(shape, sharding, self._sizes)[None, :]
        if position >= 0:
            value, shardings = op.operands[position], self._partitioned.operands.get(op_id)
        else:
            value, shardings = op.results[-1 - position], self._partitioned.results.get(op_id)
            position = -1 - position
        shape = self._graph.values[value].shape
        sharding = shardings[position] if shardings is not None else ((),) * len(shape)
        return local_shape(shape, sharding, self._sizes)[None, :]

    def shardings(self, op_id: int) -> tuple[Shardings, Shardings]:
        """The shardings of an operation's operands and results that its local shapes follow."""
        if op_id in self._cast_in_shards:
            cast = self._cast_in_shards[op_id]
            return (cast,), (cast,)
        return self._partitioned.operands.get(op_id), self._partitioned.results.get(op_id)
