"""The collectives that a program writes itself, inside `shard_map` regions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

import numpy as np

from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.collectives import Step, StepKind
from shardwright.planner.graph import Op, OpGraph, Value

_KINDS: dict[str, StepKind] = {
    "stablehlo.all_gather": "all_gather",
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_permute": "collective_permute",
}


def manual_collectives(graph: OpGraph, mesh: LogicalMesh) -> list[tuple[Op, Value, Step]]:
    """Every collective written in the program, with the array that its cost is told in."""
    found = []
    for op in graph.ops:
        if op.name in _KINDS and op.operands:
            kind = _KINDS[op.name]
            told = op.results[0] if kind == "all_gather" else op.operands[0]
            step = Step(kind, axes_of_groups(op.detail.get("groups", ()), mesh), 1)
            found.append((op, graph.values[told], step))
    return found


def axes_of_groups(groups: Sequence[Sequence[int]], mesh: LogicalMesh) -> tuple[AxisRef, ...]:
    """The mesh axes whose devices form these groups; all axes where none match."""
    names, sizes = tuple(mesh.shape), tuple(mesh.shape.values())
    ids = np.arange(prod(sizes)).reshape(sizes)
    members = {frozenset(group) for group in groups}
    for count in range(1, len(names) + 1):
        for axes in combinations(range(len(names)), count):
            rest = [a for a in range(len(names)) if a not in axes]
            rows = ids.transpose([*rest, *axes]).reshape(-1, prod(sizes[a] for a in axes))
            cells = [frozenset(row) for row in rows.tolist()]
            inside = all(any(group <= cell for cell in cells) for group in members)
            if inside:
                return tuple(AxisRef(names[a]) for a in axes)
    return tuple(AxisRef(name) for name in names)
