"""Shardings that the user has fixed: of arguments and results by path, of all else by source line.

A pin may leave dimensions open: the planner then chooses what more shards them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod

from jax.sharding import PartitionSpec

from shardwright.errors import InputError
from shardwright.hardware_profiles.mesh import AxisRef
from shardwright.planner.collectives import DimAxes
from shardwright.planner.nodes import NodeGraph, Port
from shardwright.planner.pin_lines import ports_at_line
from shardwright.planner.program import Program, Tensor
from shardwright.planner.spec_patterns import (
    OPEN,
    PartialSpec,
    is_source_line,
    partial_spec,
    path_pattern,
    spec_text,
)

RESULT = "result"
"""What the name of a result begins with: `result[0]['w']`."""


@dataclass(frozen=True)
class Pin:
    """A pin with the tensors that it is for.

    Attributes:
      name: what it was asked for by, a path or a source line.
      spec: axes by dimension.
      ports: the tensors, as the nodes that make them see them.
    """

    name: str
    spec: PartialSpec
    ports: tuple[Port, ...] = field(repr=False)


def checked_pins(
    program: Program, pinned: Mapping[str, PartialSpec], mesh: Mapping[str, int] | None
) -> dict[str, PartialSpec]:
    """The pins of a plan by path, patterns written out, and by source line as they are.

    Lines are looked up by `resolved_pins`, which needs the program's operations.

    Raises:
      InputError: a path or an axis does not exist, an axis is used twice, the axes of a dimension
        are not in the order of the mesh, a dimension does not divide, two pins of one tensor
        differ, or axes are named and no mesh is given.
    """
    if mesh is None and any(set(dim) - {OPEN} for spec in pinned.values() for dim in spec):
        raise InputError(
            "pinned shardings name mesh axes, and no mesh is given",
            where="pinned",
            do='Pass mesh={"data": 16, "model": 16} with the axes that the pins name',
        )
    tensors = {t.path: t for t in program.inputs}
    tensors |= {result_name(t.path): t for t in program.outputs}
    found: dict[str, PartialSpec] = {}
    given_by: dict[str, str] = {}
    for name, spec in pinned.items():
        where = f"pinned {name}"
        if is_source_line(name) and name not in tensors:
            check_axes(spec, mesh, where)
            found[name] = spec
            continue
        for path in _matching(name, tensors):
            tensor = tensors[path]
            whole = _padded(spec, tensor, where)
            check_axes(whole, mesh, where)
            _check_even(whole, tensor.shape, mesh, where)
            if found.setdefault(path, whole) != whole:
                raise InputError(
                    f"{path} is pinned to {spec_text(found[path])} by {given_by[path]} and to "
                    f"{spec_text(whole)} by {name}",
                    where="pinned",
                    do="Give each tensor one pin",
                )
            given_by[path] = name
    return found


def resolved_pins(
    program: Program, nodes: NodeGraph, pinned: Mapping[str, PartialSpec]
) -> tuple[Pin, ...]:
    """Checked pins with the tensors that they are for.

    Raises:
      InputError: nothing is made at a source line, or nothing that the pin fits.
    """
    graph = nodes.graph
    ports: dict[str, Port] = {}
    for tensor, value, node in zip(program.outputs, graph.results, nodes.result_nodes, strict=True):
        ports[result_name(tensor.path)] = Port(node, value, nodes.whole_dims(value))
    for tensor, value, node in zip(
        program.inputs, graph.arguments, nodes.argument_nodes, strict=True
    ):
        ports[tensor.path] = Port(node, value, nodes.whole_dims(value))
    found = []
    for name, spec in pinned.items():
        if name in ports:
            found.append(Pin(name, spec, (ports[name],)))
        else:
            at_line = ports_at_line(name, len(spec), nodes)
            rank = len(at_line[0].dims)
            found.append(Pin(name, spec + ((),) * (rank - len(spec)), at_line))
    return tuple(found)


def result_name(path: str) -> str:
    """What a result is called where arguments are named too: `result[0]['w']`."""
    return path if path.startswith(RESULT) else RESULT + path


def check_axes(spec: PartialSpec, mesh: Mapping[str, int] | None, where: str) -> None:
    """Refuses a pin that names axes wrongly.

    Raises:
      InputError: an axis is not in the mesh, is used twice, or the axes of one dimension are in
        another order than in the mesh.
    """
    sizes = mesh or {}
    order = list(sizes)
    seen: set[str] = set()
    for dim in spec:
        names = [name for name in dim if name != OPEN]
        _take_axes(names, seen, sizes, spec_text(spec), where)
        if names != sorted(names, key=order.index):
            raise InputError(
                f"{spec_text(spec)} has axes of one dimension in another order than the mesh",
                where=where,
                do=f"Name them as in the mesh, {', '.join(order)}, or order the mesh otherwise",
            )


def _take_axes(
    names: Sequence[str], seen: set[str], mesh: Mapping[str, int], shown: str, where: str
) -> None:
    """Adds the axes of one dimension to those seen; each is of the mesh and comes once."""
    for name in names:
        if name not in mesh or name in seen:
            problem = "is used twice" if name in seen else "is not in the mesh"
            raise InputError(
                f"axis {name!r} of {shown} {problem}",
                where=where,
                do=f"Use each of {', '.join(mesh)} once at most",
            )
        seen.add(name)


def dim_axes_of(
    spec: PartitionSpec, tensor: Tensor, mesh: Mapping[str, int], where: str
) -> DimAxes:
    """A PartitionSpec of a tensor as mesh axes for each dimension.

    Raises:
      InputError: it has too many entries, names an unknown axis or one twice, leaves a dimension
        open, or does not divide.
    """
    whole = _padded(partial_spec(spec, where), tensor, where)
    if any(OPEN in dim for dim in whole):
        raise InputError(
            f"{spec} leaves a dimension open, and nothing is chosen here",
            where=where,
            do="Say None, or the axes that shard it",
        )
    seen: set[str] = set()
    for dim in whole:
        _take_axes(dim, seen, mesh, str(spec), where)
    _check_even(whole, tensor.shape, mesh, where)
    return tuple(tuple(AxisRef(name) for name in dim) for dim in whole)


def _matching(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """The paths that a name means: itself, or where it has "*" all that it matches."""
    if name in tensors:
        return [name]
    found: list[str] = []
    if "*" in name:
        pattern = path_pattern(name)
        found = [path for path in tensors if pattern.fullmatch(path)]
    if not found:
        near = get_close_matches(name, tensors, n=3, cutoff=0.3) or list(tensors)[:3]
        raise InputError(
            f"the program has no argument {name}"
            if "*" not in name
            else f"no argument's path matches {name}",
            where="pinned",
            do=f"Use the path of one: {', '.join(near)}; or a source line, train.py:33",
        )
    return found


def _padded(spec: PartialSpec, tensor: Tensor, where: str) -> PartialSpec:
    """A spec with an entry for every dimension of its tensor."""
    dimensions = len(tensor.shape) - tensor.inner_dims
    if len(spec) > dimensions:
        raise InputError(
            f"{spec_text(spec)} has {len(spec)} entries and the tensor {dimensions} dimensions",
            where=where,
            do="Give at most one entry a dimension",
        )
    return spec + ((),) * (len(tensor.shape) - len(spec))


def _check_even(
    spec: PartialSpec, shape: Sequence[int], mesh: Mapping[str, int] | None, where: str
) -> None:
    for size, dim in zip(shape, spec, strict=True):
        parts = prod((mesh or {})[name] for name in dim if name != OPEN)
        if size % parts:
            raise InputError(
                f"{spec_text(spec)} cuts a dimension of {size} in {parts} parts, which does not "
                "divide",
                where=where,
                do="Pin it to axes whose sizes divide the dimension",
            )
