"""How a solution shards the calls of kernels: what their `shard_map`s are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.collectives import DimAxes
from shardwright.planner.graph import OpKey
from shardwright.planner.nodes import value_dims
from shardwright.planner.problem import ShardingProblem, sharding_of


@dataclass(frozen=True)
class KernelShardings:
    """How one call of a kernel is sharded.

    Attributes:
      operands, results: the mesh axes on each dimension of every array.
      summed: mesh axes over which the results are partial sums.
    """

    name: str
    key: OpKey
    operands: tuple[DimAxes, ...]
    results: tuple[DimAxes, ...]
    summed: tuple[str, ...]
    source: str


def kernel_shardings(
    problem: ShardingProblem, choices: Sequence[int]
) -> tuple[KernelShardings, ...]:
    """The shardings of every kernel call outside the program's own `shard_map` regions."""
    nodes, names = problem.node_graph, tuple(problem.mesh.shape)
    found = []
    for op in nodes.graph.ops:
        if "kernel" not in op.detail or op.manual or op.rule is None:
            continue
        node = nodes.node_of_op[op.id]
        # A call of single elements has no node: there is nothing to choose.
        row = [-1] * len(names) if node < 0 else problem.strategies[node][choices[node]]
        factors = (-1,) * len(op.rule.sizes) if node < 0 else nodes.nodes[node].ops[op.id]
        operands, results = (
            tuple(sharding_of(row, value_dims(dims, factors), names) for dims in mappings)
            for mappings in (op.rule.operands, op.rule.results)
        )
        added = {factors[f] for f in op.rule.reduction}
        found.append(
            KernelShardings(
                name=op.detail["kernel"].name,
                key=op.key,
                operands=operands,
                results=results,
                summed=tuple(n for n, f in zip(names, row, strict=True) if f >= 0 and f in added),
                source=op.source,
            )
        )
    return tuple(found)
