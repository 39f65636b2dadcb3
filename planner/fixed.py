"""Strategies that are not for the planner to choose: pins and the program's own shardings."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.collectives import DimAxes
from shardwright.planner.nodes import NodeGraph
from shardwright.planner.program import Program

FixedStrategies = dict[int, tuple[int | None, ...]]
"""Node id -> for each mesh axis the factor it must have (-1: none), or None where it is free."""


def fixed_strategies(
    program: Program, nodes: NodeGraph, pins: Mapping[str, DimAxes], mesh: LogicalMesh
) -> FixedStrategies:
    """Everything that is given on a mesh; pins of arguments win over the program's own."""
    return fixed_by_program(nodes, mesh) | argument_pins(program, nodes, pins, mesh)


def argument_pins(
    program: Program, nodes: NodeGraph, pins: Mapping[str, DimAxes], mesh: LogicalMesh
) -> FixedStrategies:
    """Pins of arguments as fixed strategies of their nodes: a factor (or -1) for each axis."""
    fixed: FixedStrategies = {}
    for tensor, value, node in zip(
        program.inputs, nodes.graph.arguments, nodes.argument_nodes, strict=True
    ):
        if tensor.path in pins:
            factors = dict.fromkeys(mesh.shape, -1)
            dims = nodes.whole_dims(value)
            for factor, axes in zip(dims, pins[tensor.path], strict=True):
                for axis in axes:
                    factors[axis.name] = factor[0] if factor else -1
            fixed[node] = tuple(factors.values())
    return fixed


def fixed_by_program(nodes: NodeGraph, mesh: LogicalMesh) -> FixedStrategies:
    """Strategies of the program's sharding constraints and `shard_map` regions."""
    fixed: FixedStrategies = {}
    for op in nodes.graph.ops:
        node = nodes.node_of_op[op.id]
        if node < 0 or op.rule is None or "open" not in op.detail:
            continue
        free = None if op.detail["open"] else -1
        factors: dict[str, int | None] = dict.fromkeys(mesh.shape, free)
        mapping = nodes.nodes[node].ops[op.id]
        for name, factor in op.detail.get("axis_factor", {}).items():
            factors[name] = mapping[factor]
        for dim, axes in zip(op.rule.results[0], op.detail.get("given", ()), strict=False):
            for axis in axes:
                factors[axis.name] = mapping[dim[0]] if dim else -1
        fixed[node] = tuple(factors[name] for name in mesh.shape)
    return fixed
