"""Seconds that an operation spends exchanging with neighbours when its shards overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models.collectives import collective_seconds
from shardwright.cost_models.memory import dtype_bytes
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.op_costs import LocalDims
from shardwright.planner.strategies import IntArray

FloatArray = NDArray[np.float64]


class Exchange(NamedTuple):
    """What shards send to their neighbours along one dimension, by strategy.

    Attributes:
      axes: the mesh axes that shard the dimension.
      nbytes: bytes that a device sends each way.
      seconds: of one run; 0 under strategies that shard the dimension otherwise.
    """

    axes: tuple[AxisRef, ...]
    nbytes: FloatArray
    seconds: FloatArray


def halo_seconds(
    op: Op, graph: OpGraph, rows: IntArray, local: LocalDims, mesh: LogicalMesh
) -> FloatArray:
    """Seconds of neighbour exchange in one run of an operation, shape (strategies,)."""
    total = np.zeros(len(rows))
    for exchange in exchanges(op, graph, rows, local, mesh):
        total += exchange.seconds
    return total


def exchanges(
    op: Op, graph: OpGraph, rows: IntArray, local: LocalDims, mesh: LogicalMesh
) -> Iterator[Exchange]:
    """What an operation exchanges along each dimension over each set of mesh axes.

    A convolution or a reduction over windows sends the rows that its window reaches over, a shift
    those that cross from shard to shard; whatever else permutes along a sharded dimension (slices,
    pads, concatenations) is priced as moving its local operand to a neighbour, which is the most
    it can need.
    """
    assert op.rule is not None
    names = tuple(mesh.shape)
    operand = max(range(len(op.operands)), key=lambda k: _elements(graph, op.operands[k]))
    dims = local(op.id, operand)
    value = graph.values[op.operands[operand]]
    size = dims.prod(axis=1) * dtype_bytes(value.dtype)
    for dim, factors in enumerate(op.rule.operands[operand]):
        moving = [f for f in factors if f in op.rule.permutation]
        reach = _reach(op, dim)
        if not moving or reach == 0:
            continue
        share = np.ones(len(rows)) if reach is None else np.minimum(1.0, reach / dims[:, dim])
        on = np.isin(rows, moving)
        for sharded in np.unique(on, axis=0):
            if sharded.any():
                axes = tuple(AxisRef(n) for n, s in zip(names, sharded, strict=True) if s)
                nbytes = size * share
                seconds = collective_seconds("halo_exchange", nbytes, axes, mesh)
                yield Exchange(axes, nbytes, np.where((on == sharded).all(axis=1), seconds, 0.0))


def _reach(op: Op, dim: int) -> float | None:
    """Elements along a dimension that a shard needs from each neighbour, where known."""
    window = op.detail.get("reach", op.detail.get("shift"))
    return None if window is None else float(window.get(dim, 0))


def _elements(graph: OpGraph, value: int) -> int:
    return int(np.prod(graph.values[value].shape, dtype=np.int64))
