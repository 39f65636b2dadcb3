"""Strategies that are not for the planner to choose: pins and the program's own shardings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.errors import InputError
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.graph import Op
from shardwright.planner.nodes import Node, NodeGraph
from shardwright.planner.pins import Pin
from shardwright.planner.rules import DimFactors
from shardwright.planner.spec_patterns import OPEN, PartialSpec, spec_text
from shardwright.planner.strategies import REPLICATED, Allowed, assignments

FixedStrategies = dict[int, Allowed]
"""Node id -> what its strategies may be."""


@dataclass(frozen=True)
class _Given:
    """What one pin, constraint or region says of a node, and how it is called."""

    name: str
    node: int
    allowed: Allowed


def fixed_strategies(nodes: NodeGraph, pins: Sequence[Pin], mesh: LogicalMesh) -> FixedStrategies:
    """Everything that is given on a mesh, by the program itself and by pins.

    Raises:
      InputError: two of them contradict each other, or a tensor cannot be sharded as it is pinned.
    """
    fixed: FixedStrategies = {}
    names: dict[int, list[str]] = {}
    pinned: dict[int, str] = {}
    for given in (*_by_program(nodes, mesh), *_by_pins(nodes, pins, mesh)):
        before = fixed.get(given.node)
        both = given.allowed if before is None else _both(before, given.allowed)
        if frozenset() in both:
            raise InputError(
                f"{given.name} and {' and '.join(names[given.node])} contradict each other: they "
                "are of one tensor, or of tensors that are computed together element by element",
                where="pinned",
                do="Keep one of them, or leave dimensions open with ?",
            )
        fixed[given.node] = both
        names.setdefault(given.node, []).append(given.name)
    for pin in pins:
        pinned.update((port.node, pin.name) for port in pin.ports)
    sizes = tuple(mesh.shape.values())
    for number, name in pinned.items():
        node = nodes.nodes[number]
        if not len(
            assignments(node.sizes, node.shardable, node.exact, frozenset(), sizes, fixed[number])
        ):
            raise InputError(
                f"what is pinned cannot be cut so on the mesh {dict(mesh.shape)}",
                where=f"pinned {name}",
                do="Pin it to axes that are no larger than its dimensions and divide those of "
                "arguments, or leave dimensions open with ?",
            )
    return fixed


def allowed_strategies(
    spec: PartialSpec, dims: DimFactors, node: Node, axes: Sequence[str]
) -> Allowed:
    """What the strategies of a node may be where a value of it has a sharding.

    Axes that the sharding names lie on their dimension. Others may lie on open dimensions, behind
    the axes that are named there, and on what the node works on besides the value.

    Args:
      dims: the node's factors that each dimension of the value consists of.
      axes: those of the mesh, in order.
    """
    place = {name: dim for dim, names in enumerate(spec) for name in names if name != OPEN}
    found: list[frozenset[int] | None] = []
    for order, axis in enumerate(axes):
        if axis in place:
            found.append(frozenset(dims[place[axis]]) or frozenset({REPLICATED}))
            continue
        barred: set[int] = set()
        for names, factors in zip(spec, dims, strict=True):
            behind = all(axes.index(name) < order for name in names if name != OPEN)
            if OPEN not in names or not behind:
                barred.update(factors)
        found.append(frozenset({REPLICATED, *node.shardable} - barred) if barred else None)
    return tuple(found)


def _both(one: Allowed, other: Allowed) -> Allowed:
    return tuple(
        b if a is None else a if b is None else a & b for a, b in zip(one, other, strict=True)
    )


def _by_pins(nodes: NodeGraph, pins: Sequence[Pin], mesh: LogicalMesh) -> Iterable[_Given]:
    axes = tuple(mesh.shape)
    for pin in pins:
        for port in pin.ports:
            node = nodes.nodes[port.node]
            _check_shardable(pin, port.dims, nodes.graph.values[port.value].shape, node, mesh)
            allowed = allowed_strategies(pin.spec, port.dims, node, axes)
            yield _Given(f"the pin of {pin.name}", port.node, allowed)


def _check_shardable(
    pin: Pin, dims: DimFactors, shape: Sequence[int], node: Node, mesh: LogicalMesh
) -> None:
    """Refuses axes on a dimension that the operation cannot shard, or that are too many for it."""
    sizes = mesh.shape
    for dim, names in enumerate(pin.spec):
        named = [name for name in names if name != OPEN and sizes[name] > 1]
        if not named:
            continue
        parts = 1
        for name in named:
            parts *= sizes[name]
        if parts > shape[dim]:
            raise InputError(
                f"{spec_text(pin.spec)} cuts a dimension of {shape[dim]} in {parts} parts",
                where=f"pinned {pin.name}",
                do="Pin it to fewer axes, or to a larger dimension",
            )
        if not set(dims[dim]) & node.shardable:
            raise InputError(
                f"dimension {dim} of {list(shape)} cannot be sharded by what makes it, "
                f"{node.label}",
                where=f"pinned {pin.name}",
                do="Pin another dimension, or a tensor before or after it",
            )


def _by_program(nodes: NodeGraph, mesh: LogicalMesh) -> Iterable[_Given]:
    """Sharding constraints and `shard_map` regions in the program."""
    for op in nodes.graph.ops:
        node = nodes.node_of_op[op.id]
        if node < 0 or op.rule is None:
            continue
        if "given" in op.detail:
            yield _constraint(op, nodes.nodes[node], mesh)
        elif "axis_factor" in op.detail:
            mapping = nodes.nodes[node].ops[op.id]
            factors: dict[str, int] = op.detail["axis_factor"]
            allowed = tuple(
                frozenset({mapping[factors[name]]}) if name in factors else None
                for name in mesh.shape
            )
            yield _Given(f"the shard_map at {op.source}", node, allowed)


def _constraint(op: Op, node: Node, mesh: LogicalMesh) -> _Given:
    assert op.rule is not None
    mapping = node.ops[op.id]
    dims = tuple(tuple(mapping[f] for f in dim if mapping[f] >= 0) for dim in op.rule.results[0])
    allowed = list(allowed_strategies(op.detail["given"], dims, node, tuple(mesh.shape)))
    for place, axis in enumerate(mesh.shape):
        if axis in op.detail["replicated"]:
            allowed[place] = frozenset({REPLICATED})
    return _Given(f"the constraint at {op.source}", node.id, tuple(allowed))
