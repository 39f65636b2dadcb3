"""A problem whose alike nodes are tied to one choice: as small as one of its repeated parts.

Any choices of the tied problem are choices of the whole one at the same cost and the same memory,
so that its optimum is an upper bound of the whole problem's. It is no lower bound: nodes that are
alike may do better with different choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from shardwright.planner.solver.network import IntArray
from shardwright.planner.solver.problem import CostArray, Edge, MemoryTerm, Problem

_PASSES = 4
"""Forward and backward passes repeat at distances of their own."""


@dataclass(frozen=True)
class Tied:
    """A problem with one node for each class of alike nodes.

    Attributes:
      problem: the small problem. Its time points are those of the whole one that can bind.
      classes: for every node of the whole problem its node in the small one.
      times: the time points of the small problem in the whole one.
    """

    problem: Problem
    classes: tuple[int, ...]
    times: tuple[int, ...]

    def lift(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the whole problem from choices of the small one."""
        return tuple(int(choices[c]) for c in self.classes)

    def project(self, choices: Sequence[int]) -> tuple[int, ...]:
        """For each class what the first of its nodes chose."""
        first = dict(reversed(list(zip(self.classes, choices, strict=True))))
        return tuple(int(first[c]) for c in range(len(self.problem.costs)))


def tie(problem: Problem, classes: Sequence[int]) -> Tied:
    """Ties the nodes of each class to one choice.

    Args:
      problem: arrays that several nodes or edges share are added up once.
      classes: for each node its class, numbered from 0 without gaps; nodes of a class must have
        equally many strategies.
    """
    count = max(classes) + 1
    names: list[str] = [""] * count
    if problem.names is not None:
        for name, c in zip(problem.names, classes, strict=True):
            names[c] = names[c] or name
    memory, base, times = _memory(problem, classes)
    small = Problem(
        costs=_costs(problem, classes, count),
        edges=_edges(problem, classes),
        memory=memory,
        memory_limit=problem.memory_limit,
        base_memory=base,
        names=tuple(names),
    )
    return Tied(small, tuple(classes), tuple(times.tolist()))


def _costs(problem: Problem, classes: Sequence[int], count: int) -> tuple[CostArray, ...]:
    tally: list[dict[int, tuple[CostArray, int]]] = [{} for _ in range(count)]
    for costs, c in zip(problem.costs, classes, strict=True):
        _, times = tally[c].get(id(costs), (costs, 0))
        tally[c][id(costs)] = (costs, times + 1)
    return tuple(_total(list(each.values())) for each in tally)


def _edges(problem: Problem, classes: Sequence[int]) -> tuple[Edge, ...]:
    tally: dict[tuple[int, int, int], tuple[CostArray, int]] = {}
    for edge in problem.edges:
        key = (classes[edge.a], classes[edge.b], id(edge.cost))
        _, times = tally.get(key, (edge.cost, 0))
        tally[key] = (edge.cost, times + 1)
    return tuple(Edge(a, b, _total([part])) for (a, b, _), part in tally.items())


def _total(parts: list[tuple[CostArray, int]]) -> CostArray:
    """Sum of arrays, each so many times; those that come once alone are shared."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    array, times = parts[0]
    total: CostArray = times * array
    for array, times in parts[1:]:
        total = total + times * array
    return total


def _memory(
    problem: Problem, classes: Sequence[int]
) -> tuple[tuple[MemoryTerm, ...], CostArray | None, IntArray]:
    """Memory by class at the time points where more is held than at any other, and those points."""
    terms = [term for term in problem.memory if term.start < term.end]
    if not terms or problem.memory_limit is None:
        return (), None, np.zeros(0, dtype=np.int64)
    kinds: dict[tuple[int, int], int] = {}
    usages: list[tuple[int, CostArray]] = []
    kind_of = np.empty(len(terms), dtype=np.int64)
    for number, term in enumerate(terms):
        key = (classes[term.node], id(term.usage))
        if key not in kinds:
            kinds[key] = len(usages)
            usages.append((classes[term.node], term.usage))
        kind_of[number] = kinds[key]
    starts = np.array([term.start for term in terms], dtype=np.int64)
    ends = np.array([term.end for term in terms], dtype=np.int64)
    base = problem.base_memory
    if base is None:
        # Of one program on many meshes they are all the same.
        points, counts = _binding(starts.tobytes(), ends.tobytes(), kind_of.tobytes(), len(usages))
    else:
        points = np.arange(problem.horizon)
        base = np.concatenate([base, np.zeros(problem.horizon - len(base), dtype=base.dtype)])
        counts = _counts(starts, ends, kind_of, len(usages), points)
    found = []
    for kind, (c, usage) in enumerate(usages):
        column = counts[:, kind]
        changes = np.flatnonzero(np.diff(column)) + 1
        bounds = [0, *changes.tolist(), len(column)]
        for start, end in pairwise(bounds):
            if column[start]:
                found.append(MemoryTerm(c, start, end, int(column[start]) * usage))
    return tuple(found), base, points


@lru_cache(maxsize=8)
def _binding(
    starts_bytes: bytes, ends_bytes: bytes, kinds_bytes: bytes, kinds: int
) -> tuple[IntArray, IntArray]:
    """The time points that can bind, and how many terms of each kind are held at each."""
    starts, ends, kind_of = (
        np.frombuffer(one, dtype=np.int64) for one in (starts_bytes, ends_bytes, kinds_bytes)
    )
    points = _fullest_moments(starts, ends)
    counts = _counts(starts, ends, kind_of, kinds, points)
    kept = _ends_of_runs(counts)
    kept = kept[_undominated(counts[kept])]
    return points[kept], counts[kept]


def _fullest_moments(starts: IntArray, ends: IntArray) -> IntArray:
    """Time points at which something begins and before the next of which something ends.

    At any other point no more is held than at one of these.
    """
    begins = np.unique(starts)
    stops = np.unique(ends)
    # The last beginning before each ending.
    last = np.searchsorted(begins, stops, side="left") - 1
    return begins[np.unique(last[last >= 0])]


def _counts(
    starts: IntArray, ends: IntArray, kind_of: IntArray, kinds: int, points: IntArray
) -> IntArray:
    """How many terms of each kind are held at each point, shape (points, kinds)."""
    steps = np.zeros((len(points) + 1, kinds), dtype=np.int64)
    np.add.at(steps, (np.searchsorted(points, starts, side="left"), kind_of), 1)
    np.add.at(steps, (np.searchsorted(points, ends, side="left"), kind_of), -1)
    counts: IntArray = np.cumsum(steps, axis=0)[:-1]
    return counts


def _ends_of_runs(counts: IntArray) -> IntArray:
    """The rows but those between two that together hold at least twice as much of everything.

    From one of many equal parts to the next the counts change by the same amounts, so that what is
    held at the same place in each of them lies between what is held there in the first and last.
    Whatever is chosen, one of those two then holds at least as much.
    """
    kept = np.arange(len(counts))
    for _ in range(_PASSES):
        left = counts[kept]
        period = _period(left)
        if period is None:
            break
        before, after = left[: -2 * period], left[2 * period :]
        keep = np.ones(len(left), dtype=bool)
        keep[period:-period] = (2 * left[period:-period] > before + after).any(axis=1)
        if keep.all():
            break
        kept = kept[keep]
    return kept


def _period(counts: IntArray) -> int | None:
    """The commonest distance between equal changes from row to row, if there are any."""
    if len(counts) < 3:
        return None
    _, change = np.unique(np.diff(counts, axis=0), axis=0, return_inverse=True)
    order = np.argsort(change, kind="stable")
    again = change[order][1:] == change[order][:-1]
    distances = np.diff(order)[again]
    if not len(distances):
        return None
    period = int(np.bincount(distances).argmax())
    return period if 2 * period < len(counts) else None


def _undominated(counts: IntArray) -> IntArray:
    """The rows that hold more of something than each other row does, in order."""
    varying = counts[:, counts.min(axis=0) < counts.max(axis=0)]
    _, first = np.unique(varying, axis=0, return_index=True)
    order = first[np.argsort(-varying[first].sum(axis=1), kind="stable")]
    rows = varying[order].astype(np.int32)
    kept = np.zeros(len(order), dtype=bool)
    left = np.ones(len(order), dtype=bool)
    for place in range(len(order)):
        if left[place]:
            kept[place] = True
            # What comes later holds no more in all, so that it cannot hold as much of everything.
            later = place + 1 + np.flatnonzero(left[place + 1 :])
            left[later] = (rows[later] > rows[place]).any(axis=1)
    rows_kept: IntArray = np.sort(order[kept])
    return rows_kept
