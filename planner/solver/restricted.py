"""A problem in which nodes may take only some of their strategies.

Where these are what a few known choices took, and those mostly agree, little is left to decide,
however large the problem is: the best of all their mixtures is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
