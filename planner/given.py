"""Shardings that the program itself gives: constraints and `shard_map` regions, as written.

They name mesh axes, so such a program is planned on a mesh with those axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from shardwright.errors import InputError
from shardwright.hardware_profiles.slices import Slice
from shardwright.planner.collectives import DimAxes, parse_axes
from shardwright.planner.mlir import ir, sdy
from shardwright.planner.rules import DimFactors, Rule
from shardwright.planner.spec_patterns import OPEN

CONSTRAINT = "sdy.sharding_constraint"
MANUAL = "sdy.manual_computation"


def program_mesh(module: Any) -> dict[str, int] | None:
    """The mesh that the shardings inside a module name, or None where there are none.

    Raises:
      InputError: they name several meshes.
    """
    meshes = []
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            axes = sdy.MeshAttr(op.operation.attributes["mesh"]).axes
            shape = {a.name: a.size for a in map(sdy.MeshAxisAttr, axes)}
            if shape and shape not in meshes:
                meshes.append(shape)
    if len(meshes) > 1:
        raise InputError(
            f"the program names {len(meshes)} meshes: {' and '.join(map(str, meshes[:3]))}",
            where="program",
            do="Write its constraints and shard_maps for one mesh",
        )
    return meshes[0] if meshes else None


def check_mesh(given: Mapping[str, int] | None, mesh: Mapping[str, int] | None, on: Slice) -> None:
    """Refuses a program whose own shardings name a mesh that it cannot be planned on.

    Raises:
      InputError: it is not the mesh asked for, or has another number of devices than the slice.
    """
    if given and prod(given.values()) != on.devices:
        raise InputError(
            f"the program's own shardings are for the mesh {dict(given)} of "
            f"{prod(given.values())} devices, and {on.name} has {on.devices}",
            where="program",
            do="Plan it for a slice of as many devices, or write its constraints and shard_maps "
            "for a mesh of the whole slice",
        )
    if given and mesh and dict(given) != dict(mesh):
        raise InputError(
            f"the program's own shardings are for the mesh {dict(given)} and the plan is asked "
            f"for {dict(mesh)}",
            where="mesh",
            do="Ask for the program's mesh, or leave mesh= out",
        )


def constraint_detail(op: Any) -> dict[str, Any]:
    """What a sharding constraint gives: a partial spec, and axes that must not be used at all."""
    text = str(op.attributes["sharding"])
    _, _, after = text.partition("]")
    dims = tuple(
        tuple(axis.name for axis in parse_axes(dim)) + ((OPEN,) if "?" in dim else ())
        for dim in _dimensions(text)
    )
    return {"given": dims, "replicated": tuple(axis.name for axis in parse_axes(after))}


def manual_rule(op: Any, mesh: Mapping[str, int]) -> tuple[Rule, dict[str, Any]]:
    """A `shard_map` region seen from outside: its shardings as a rule, and which axis is what.

    Every set of axes that shards a dimension together is one factor.
    """
    factors: dict[tuple[str, ...], int] = {}
    mappings: list[DimFactors] = []
    for name in ("in_shardings", "out_shardings"):
        for text in str(op.attributes[name]).split("@")[1:]:
            dims = []
            for axes in dimension_axes(text):
                names = tuple(axis.name for axis in axes)
                dims.append((factors.setdefault(names, len(factors)),) if names else ())
            mappings.append(tuple(dims))
    sizes = tuple(prod(mesh[name] for name in names) for names in factors)
    split = len(op.operands)
    rule = Rule(sizes, tuple(mappings[:split]), tuple(mappings[split:]))
    axis_factor = {name: f for names, f in factors.items() for name in names}
    return rule, {"axis_factor": axis_factor}


def dimension_axes(text: str) -> DimAxes:
    """The axes on each dimension of a sharding that may be open or have priorities."""
    return tuple(parse_axes(dim) for dim in _dimensions(text))


def _dimensions(text: str) -> list[str]:
    inside = text[text.index("[") + 1 :]
    return inside[: inside.index("]")].split("}")[:-1]


def replica_groups(op: Any) -> dict[str, Any]:
    """The replica groups of a collective in StableHLO (pairs, for a permute)."""
    for name in ("replica_groups", "source_target_pairs"):
        if name in op.attributes:
            groups = np.array(ir.DenseElementsAttr(op.attributes[name]))
            return {"groups": tuple(map(tuple, groups.tolist()))}
    return {}
