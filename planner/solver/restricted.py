"""A problem in which nodes may take only some of their strategies.

Where these are what a few known choices took, and those mostly agree, little is left to decide,
however large the problem is: the best of all their mixtures is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.planner.solver.network import IntArray
from shardwright.planner.solver.problem import CostArray, Edge, MemoryTerm, Problem


@dataclass(frozen=True)
class Restricted:
    """A problem with some of the strategies of another.

    Attributes:
      problem: the small problem; arrays that were shared are shared again.
      kept: for each node its strategies in the whole problem.
    """

    problem: Problem
    kept: tuple[IntArray, ...]

    def lift(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the whole problem from choices of the small one."""
        return tuple(int(kept[c]) for kept, c in zip(self.kept, choices, strict=True))

    def project(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the small problem from choices of the whole one that it was made of."""
        return tuple(
            int(np.searchsorted(kept, c)) for kept, c in zip(self.kept, choices, strict=True)
        )


def restrict(problem: Problem, known: Sequence[Sequence[int]]) -> Restricted:
    """Keeps of each node the strategies that it has in any of the known choices."""
    shared: dict[tuple[int, ...], IntArray] = {}
    kept = []
    for choices in zip(*known, strict=True):
        key = tuple(sorted(set(choices)))
        kept.append(shared.setdefault(key, np.array(key)))
    return _restricted(problem, kept)


def restrict_rows(problem: Problem, rows: Mapping[int, IntArray]) -> Restricted:
    """Keeps of some nodes some strategies, in order, and of all others all."""
    whole: dict[int, IntArray] = {}
    kept = [
        rows.get(node, whole.setdefault(len(costs), np.arange(len(costs))))
        for node, costs in enumerate(problem.costs)
    ]
    return _restricted(problem, kept)


def _restricted(problem: Problem, kept: Sequence[IntArray]) -> Restricted:
    made: dict[tuple[int, ...], CostArray] = {}

    def part(array: CostArray, *of: int) -> CostArray:
        if all(len(kept[node]) == size for node, size in zip(of, array.shape, strict=True)):
            return array
        key = (id(array), *(id(kept[node]) for node in of))
        if key not in made:
            made[key] = array[np.ix_(*(kept[node] for node in of))]
        return made[key]

    terms = [MemoryTerm(m.node, m.start, m.end, part(m.usage, m.node)) for m in problem.memory]
    small = Problem(
        costs=tuple(part(costs, node) for node, costs in enumerate(problem.costs)),
        edges=tuple(Edge(e.a, e.b, part(e.cost, e.a, e.b)) for e in problem.edges),
        memory=tuple(terms),
        memory_limit=problem.memory_limit,
        base_memory=problem.base_memory,
        names=problem.names,
    )
    return Restricted(small, tuple(kept))


@dataclass(frozen=True)
class Open:
    """What is left of a problem without the nodes that have one strategy.

    Attributes:
      problem: the nodes that are left; what the others cost is added to the first of them.
      nodes: their numbers in the whole problem.
      count: of the nodes of the whole problem.
    """

    problem: Problem
    nodes: tuple[int, ...]
    count: int

    def lift(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the whole problem from choices of the small one."""
        whole = [0] * self.count
        for node, choice in zip(self.nodes, choices, strict=True):
            whole[node] = choice
        return tuple(whole)

    def project(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the small problem from choices of the whole one."""
        return tuple(choices[node] for node in self.nodes)


def open_nodes(problem: Problem) -> Open | None:
    """The part of a problem in which there is a choice; None where there is none."""
    nodes = [node for node, costs in enumerate(problem.costs) if len(costs) > 1]
    if not nodes:
        return None
    place = {node: number for number, node in enumerate(nodes)}
    costs: list[CostArray] = [problem.costs[node] for node in nodes]
    edges = []
    decided = sum(float(c[0]) for c in problem.costs if len(c) == 1)
    for edge in problem.edges:
        a, b = place.get(edge.a), place.get(edge.b)
        if a is not None and b is not None:
            edges.append(Edge(a, b, edge.cost))
        elif a is not None:
            costs[a] = costs[a] + edge.cost[:, 0]
        elif b is not None:
            costs[b] = costs[b] + edge.cost[0]
        else:
            decided += float(edge.cost[0, 0])
    costs[0] = np.asarray(costs[0] + decided, dtype=np.float64)
    small = replace(
        problem,
        costs=tuple(costs),
        edges=tuple(edges),
        names=None if problem.names is None else tuple(problem.names[node] for node in nodes),
        **_open_memory(problem, place),
    )
    return Open(small, tuple(nodes), len(problem.costs))


def _open_memory(problem: Problem, place: Mapping[int, int]) -> dict[str, Any]:
    """Memory terms of the nodes that are left, and the most that all else holds meanwhile."""
    if problem.memory_limit is None:
        return {"memory": (), "base_memory": None}
    held = np.zeros(problem.horizon + 1)
    if problem.base_memory is not None:
        held[: len(problem.base_memory)] += problem.base_memory
    steps = np.zeros(problem.horizon + 1)
    terms: list[MemoryTerm] = []
    for term in problem.memory:
        if term.start >= term.end:
            continue
        if term.node in place:
            terms.append(term)
        else:
            steps[term.start] += term.usage[0]
            steps[term.end] -= term.usage[0]
    held = (held + np.cumsum(steps))[:-1]
    # Time runs from one beginning or end of what is left to the next.
    bounds = np.unique([0, problem.horizon, *(t.start for t in terms), *(t.end for t in terms)])
    base = np.maximum.reduceat(held, bounds[:-1]) if len(bounds) > 1 else held[:0]
    at = {int(time): number for number, time in enumerate(bounds)}
    memory = tuple(
        MemoryTerm(place[term.node], at[term.start], at[term.end], term.usage) for term in terms
    )
    return {"memory": memory, "base_memory": base}
