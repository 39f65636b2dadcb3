"""Seconds that an operation spends exchanging with neighbours when its shards overlap."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models.collectives import collective_seconds
from shardwright.cost_models.memory import dtype_bytes
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.op_costs import LocalDims
from shardwright.planner.strategies import IntArray

FloatArray = NDArray[np.float64]


def halo_seconds(
    op: Op, graph: OpGraph, rows: IntArray, local: LocalDims, mesh: LogicalMesh
) -> FloatArray:
    """Seconds of neighbour exchange in one run of an operation, shape (strategies,).

    A convolution or a reduction over windows sends the rows that its window reaches over;
    whatever else permutes along a sharded dimension (slices, pads, concatenations) is priced as
    moving its local operand to a neighbour, which is the most it can need.
    """
    assert op.rule is not None
    total = np.zeros(len(rows))
    names = tuple(mesh.shape)
    operand = max(range(len(op.operands)), key=lambda k: _elements(graph, op.operands[k]))
    dims = local(op.id, operand)
    value = graph.values[op.operands[operand]]
    size = dims.prod(axis=1) * dtype_bytes(value.dtype)
    for dim, factors in enumerate(op.rule.operands[operand]):
        moving = [f for f in factors if f in op.rule.permutation]
        if not moving:
            continue
        reach = _reach(op, dim)
        share = np.ones(len(rows)) if reach is None else np.minimum(1.0, reach / dims[:, dim])
        for axis, name in enumerate(names):
            on = np.isin(rows[:, axis], moving)
            if on.any():
                seconds = collective_seconds("halo_exchange", size * share, (AxisRef(name),), mesh)
                total += np.where(on, seconds, 0.0)
    return total


def _reach(op: Op, dim: int) -> float | None:
    """Elements along a dimension that a shard needs from each neighbour, where known."""
    window = op.detail.get("reach")
    return None if window is None else float(window.get(dim, 0))


def _elements(graph: OpGraph, value: int) -> int:
    return int(np.prod(graph.values[value].shape, dtype=np.int64))
