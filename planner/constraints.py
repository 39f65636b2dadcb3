"""The sharding constraints of a solution: enough that propagation has no freedom left.

One record for each value that runs between nodes: the sharding it is made in, the sharding it is
brought to once for several readers, and what single readers demand. Both sides of every reshard
are told, since where to reshard is part of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.collectives import DimAxes
from shardwright.planner.graph import OpGraph, OpKey
from shardwright.planner.nodes import NodeGraph, Port, Use, is_trivial
from shardwright.planner.prints import PRINT
from shardwright.planner.problem import ShardingProblem, sharding_of
from shardwright.planner.rules import DimFactors


@dataclass(frozen=True)
class Site:
    """A place in a program that is found again in a new lowering of it.

    Attributes:
      kind: "argument" (of main), "result" (of an operation), "carry" (argument of a loop's body),
        "operand" (of an operation; a loop's are its initial values), "yield" (of a loop's body or
        of a branch) or "return" (of main).
      index: which argument, result, operand...
      key: the operation; None for main.
      branch: for yields, which region of the operation.
    """

    kind: str
    index: int
    key: OpKey | None = None
    branch: int = 0


@dataclass(frozen=True)
class Demand:
    """A reader of a value, and the sharding it needs where that is not the one it is given."""

    site: Site
    sharding: DimAxes | None


@dataclass(frozen=True)
class ValueConstraint:
    """The shardings of one value.

    Attributes:
      made: the sharding it is produced in.
      copy: the sharding that the readers in `demands` are given, where it differs.
    """

    site: Site
    made: DimAxes
    copy: DimAxes | None
    demands: tuple[Demand, ...]
    source: str


def value_constraints(
    problem: ShardingProblem, choices: Sequence[int]
) -> tuple[ValueConstraint, ...]:
    """The constraints that say a solution, in program order."""
    nodes, graph = problem.node_graph, problem.node_graph.graph
    names = tuple(problem.mesh.shape)
    copies = {copy.value: copy for copy in problem.copies}
    sites, use_sites = _ValueSites(graph), _UseSites(nodes)

    known: dict[tuple[int, int, DimFactors], DimAxes] = {}
    same: dict[DimAxes, DimAxes] = {}

    def sharding(node: int, port: Port) -> DimAxes:
        rows, choice = problem.strategies[node], choices[node]
        key = id(rows), choice, port.dims
        if key not in known:
            found = sharding_of(rows[choice].tolist(), port.dims, names)
            known[key] = same.setdefault(found, found)
        return known[key]

    found = []
    for value, port in sorted(nodes.producers.items()):
        if is_trivial(graph.values[value]):
            continue
        site = sites(value)
        if site is None:
            continue
        made = given = sharding(port.node, port)
        copy = copies.get(value)
        if copy is not None:
            dims = tuple((d,) for d in range(len(graph.values[value].shape)))
            given = sharding(copy.node, Port(copy.node, value, dims))
        demands = []
        for use in nodes.uses.get(value, ()):
            if use.op >= 0 and graph.ops[use.op].name == PRINT:
                continue  # what is printed is gathered, wherever it runs
            wanted = sharding(use.port.node, use.port)
            # Reads inside the value's own group keep the sharding that it was made in.
            demands.append(Demand(use_sites(use), wanted if wanted != given else None))
        if not demands and site.kind == "result":
            continue
        producer = graph.values[value].producer
        found.append(
            ValueConstraint(
                site=site,
                made=made,
                copy=given if given != made else None,
                demands=tuple(demands),
                source=graph.ops[producer].source if producer >= 0 else "",
            )
        )
    return tuple(found)


class _ValueSites:
    """Where values are made."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._arguments = {value: number for number, value in enumerate(graph.arguments)}
        self._carries = {
            carry.argument: Site("carry", k, loop.key)
            for loop in graph.loops
            for k, carry in enumerate(loop.carries)
        }

    def __call__(self, value: int) -> Site | None:
        producer = self._graph.values[value].producer
        if producer >= 0:
            op = self._graph.ops[producer]
            return Site("result", op.results.index(value), op.key)
        if value in self._arguments:
            return Site("argument", self._arguments[value])
        return self._carries.get(value)


class _UseSites:
    """Where values are demanded; loops and joins are known by their nodes."""

    def __init__(self, nodes: NodeGraph) -> None:
        graph, made = nodes.graph, nodes.producers
        self._graph = graph
        self._joins = {made[j.result].node: j for j in graph.joins if j.result in made}
        self._carries = {
            made[carry.argument].node: (loop, k)
            for loop in graph.loops
            for k, carry in enumerate(loop.carries)
            if carry.argument in made
        }

    def __call__(self, use: Use) -> Site:
        ops, node = self._graph.ops, use.port.node
        if use.op >= 0:
            return Site("operand", use.operand, ops[use.op].key)
        if node in self._joins:
            op = ops[self._joins[node].op]
            index = op.results.index(self._joins[node].result)
            return Site("yield", index, op.key, branch=use.operand)
        if node in self._carries:
            loop, k = self._carries[node]
            if use.time == loop.first_op - 1 and use.port.value == loop.carries[k].init:
                return Site("operand", k, loop.key)
            return Site("yield", k, loop.key, branch=1)
        return Site("return", use.operand)
