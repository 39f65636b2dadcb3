"""Shardings that the user has fixed."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import prod

from jax.sharding import PartitionSpec

from shardwright.errors import InputError
from shardwright.hardware_profiles.mesh import AxisRef
from shardwright.planner.collectives import DimAxes
from shardwright.planner.program import Program, Tensor


def specs_by_path(
    program: Program, pinned: Mapping[str, PartitionSpec], mesh: Mapping[str, int] | None
) -> dict[str, DimAxes]:
    """Checks the pins of a plan against its program and mesh.

    Raises:
      InputError: no mesh was given, a path or an axis does not exist, an axis is used twice, the
        axes of a dimension are not in the order of the mesh, or a dimension does not divide.
    """
    if pinned and mesh is None:
        raise InputError(
            "pinned shardings name mesh axes, and no mesh is given",
            where="pinned",
            do='Pass mesh={"data": 16, "model": 16} with the axes that the pins name',
        )
    inputs = {tensor.path: tensor for tensor in program.inputs}
    found = {}
    for path, spec in pinned.items():
        if path not in inputs:
            near = get_close_matches(path, inputs, n=3, cutoff=0.3) or list(inputs)[:3]
            raise InputError(
                f"the program has no argument {path}",
                where="pinned",
                do=f"Use the path of one: {', '.join(near)}",
            )
        found[path] = dim_axes_of(spec, inputs[path], mesh or {}, where=f"pinned {path}")
        order = list(mesh or {})
        for dim in found[path]:
            names = [axis.name for axis in dim]
            if names != sorted(names, key=order.index):
                raise InputError(
                    f"{spec} has axes of one dimension in another order than the mesh",
                    where=f"pinned {path}",
                    do=f"Name them as in the mesh, {', '.join(order)}, or order the mesh otherwise",
                )
    return found


def dim_axes_of(
    spec: PartitionSpec, tensor: Tensor, mesh: Mapping[str, int], where: str
) -> DimAxes:
    """A PartitionSpec of a tensor as mesh axes for each dimension.

    Raises:
      InputError: it has too many entries, names an unknown axis or one twice, or does not divide.
    """
    entries = tuple(spec)
    dimensions = len(tensor.shape) - tensor.inner_dims
    if len(entries) > dimensions:
        raise InputError(
            f"{spec} has {len(entries)} entries and the tensor {dimensions} dimensions",
            where=where,
            do="Give at most one entry a dimension",
        )
    dims: list[tuple[AxisRef, ...]] = []
    seen: set[str] = set()
    for size, entry in zip(tensor.shape, entries + (None,) * len(tensor.shape), strict=False):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for name in names:
            if name not in mesh or name in seen:
                problem = "is used twice" if name in seen else "is not in the mesh"
                raise InputError(
                    f"axis {name!r} of {spec} {problem}",
                    where=where,
                    do=f"Use each of {', '.join(mesh)} once at most",
                )
            seen.add(name)
        parts = prod(mesh[name] for name in names)
        if size % parts:
            raise InputError(
                f"{spec} cuts a dimension of {size} in {parts} parts, which does not divide",
                where=where,
                do="Pin it to axes whose sizes divide the dimension",
            )
        dims.append(tuple(AxisRef(name) for name in names))
    return tuple(dims)
