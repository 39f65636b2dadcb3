"""Everything that a partitioned program sends over links, with its price."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from shardwright.cost_models.collectives import (
    Collective,
    chosen_algorithm,
    collective_model,
    splits_lane_tiles,
)
from shardwright.cost_models.memory import dtype_bytes
from shardwright.cost_models.schedule import Stage, When
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.collectives import DimAxes, Step, compiled_step, shards
from shardwright.planner.graph import Op, OpGraph, Value
from shardwright.planner.halo import exchanges
from shardwright.planner.manual import manual_collectives
from shardwright.planner.offload import transfers
from shardwright.planner.op_costs import LocalDims, local_bytes, result_position
from shardwright.planner.partial_sums import sums_of_products
from shardwright.planner.partitioned import Communication, Partitioned

TO_HOST, FROM_HOST, HALO = "copy_to_host", "copy_from_host", "halo_exchange"


@dataclass(frozen=True)
class PricedCollective:
    """A collective with its price.

    Attributes:
      kind: what the TPU compiler makes of it.
      nbytes: bytes on one device, of the larger of its input and output.
      seconds: of one run.
      can_hide: it runs asynchronously and can start long before its result is needed.
      algorithm: the registered one that it runs by; "" for the built-in one.
      stages: the links that it occupies, and how long.
    """

    communication: Communication
    kind: str
    nbytes: float
    seconds: float
    can_hide: bool
    algorithm: str = ""
    stages: tuple[Stage, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class PricedMove:
    """What one operation sends besides collectives: halos, or a value to or from the host.

    Attributes:
      kind: `TO_HOST`, `FROM_HOST` or `HALO`.
      axes: the mesh axes that halos cross.
      seconds: of all runs in one step.
      stages: as of a collective, for one run.
    """

    op: int
    kind: str
    axes: tuple[str, ...]
    seconds: float
    stages: tuple[Stage, ...] = field(repr=False)
    when: When = "stops"


def priced_collectives(
    graph: OpGraph, partitioned: Partitioned, mesh: LogicalMesh
) -> tuple[PricedCollective, ...]:
    """The collectives of a partitioned program and of its `shard_map` regions."""
    communications = [*_reduced_once(graph, partitioned), *_manual(graph, mesh)]
    known: dict[Hashable, PricedCollective] = {}
    found = []
    for c in communications:
        alike = c.step, c.shape, c.dtype, c.before, c.after, c.prefetchable
        if alike not in known:
            known[alike] = _price(c, mesh)
        found.append(replace(known[alike], communication=c))
    return tuple(found)


def _price(communication: Communication, mesh: LogicalMesh) -> PricedCollective:
    step = communication.step
    elements = float(np.prod(communication.shape, dtype=np.float64))
    nbytes = elements * dtype_bytes(communication.dtype)
    splits_tiles = step.kind == "reduce_scatter" and _splits_tiles(communication, mesh)
    kind, seconds = compiled_step(step, nbytes, mesh, splits_tiles=splits_tiles)
    can_hide = communication.prefetchable and kind == "all_gather"
    size = nbytes / step.divisor
    algorithm = "" if kind == "all_slice" else chosen_algorithm(kind, size, step.axes, mesh)
    stages = _stages(kind, size, seconds, step.axes, mesh)
    return PricedCollective(communication, kind, size, seconds, can_hide, algorithm, stages)


def _splits_tiles(scatter: Communication, mesh: LogicalMesh) -> bool:
    """Whether a reduce-scatter along the last dimension has shards that it cannot halve."""
    if not scatter.shape or not set(scatter.after[-1]) - set(scatter.before[-1]):
        return False
    width = -(-scatter.shape[-1] // shards(scatter.after[-1:], mesh.shape))
    chip = mesh.slice.chip
    return bool(splits_lane_tiles(width, dtype_bytes(scatter.dtype), chip))


def _stages(
    kind: str, nbytes: float, seconds: float, axes: Sequence[AxisRef], mesh: LogicalMesh
) -> tuple[Stage, ...]:
    """A collective's stages, which take its seconds together."""
    if not seconds:
        return ()
    model = collective_model(cast(Collective, kind), tuple(axes), mesh)
    parts = [stage.line.seconds(nbytes) for stage in model.stages]
    total = sum(parts)
    return tuple(
        Stage(stage.dimensions, seconds * part / total)
        for stage, part in zip(model.stages, parts, strict=True)
    )


def host_copies(graph: OpGraph, shapes: LocalDims, mesh: LogicalMesh) -> tuple[PricedMove, ...]:
    """Values that move between HBM and the memory of the host.

    Each device has its share of its chip's PCIe link, and the two directions are independent. A
    copy to the host runs behind the kernels that follow it, one from the host ahead of its use.
    """
    bandwidth = mesh.slice.chip.device_pcie_bandwidth
    found = []
    for transfer in transfers(graph):
        op = graph.ops[transfer.op]
        dtype = graph.values[op.results[0]].dtype
        nbytes = float(local_bytes(shapes(op.id, result_position(0)), dtype)[0])
        kind, link = (
            (TO_HOST, "pcie to host") if transfer.to_host else (FROM_HOST, "pcie from host")
        )
        when: When = "behind" if transfer.to_host else "ahead"
        stages = (Stage((link,), nbytes / bandwidth),)
        found.append(PricedMove(op.id, kind, (), op.trips * nbytes / bandwidth, stages, when))
    return tuple(found)


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
    return [
        _in_place(op, value, step, ((),) * len(value.shape))
        for op, value, step in manual_collectives(graph, mesh)
    ]


def _in_place(op: Op, value: Value, step: Step, sharding: DimAxes) -> Communication:
    """What an operation sends itself: nothing is resharded for it, and nothing runs ahead."""
    return Communication(
        step=step,
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


def neighbour_exchanges(
    graph: OpGraph, shapes: LocalDims, partitioned: Partitioned, mesh: LogicalMesh
) -> tuple[tuple[PricedCollective, ...], tuple[PricedMove, ...]]:
    """The collective-permutes that shifts are, and all other exchanges with neighbours."""
    names = tuple(mesh.shape)
    shifts, halos = [], []
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
            axes = exchange.axes
            if "shift" not in op.detail:
                if seconds:
                    stages = _stages(HALO, nbytes, seconds, axes, mesh)
                    told = tuple(axis.name for axis in axes)
                    halos.append(PricedMove(op.id, HALO, told, op.trips * seconds, stages))
                continue
            value = graph.values[op.results[0]]
            step = Step("collective_permute", axes, value.nbytes / nbytes)
            permute = _in_place(op, value, step, partitioned.results[op.id][0])
            kind = "collective_permute"
            stages = _stages(kind, nbytes, seconds, axes, mesh)
            shifts.append(PricedCollective(permute, kind, nbytes, seconds, False, stages=stages))
    return tuple(shifts), tuple(halos)
