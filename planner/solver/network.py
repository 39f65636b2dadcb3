"""The working copy of a problem that reductions shrink, and the way back to its choices."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solver.problem import FloatArray, Problem, as_costs

IntArray = NDArray[np.int64]


class NoFeasibleChoiceError(Exception):
    """A reduction proved that no choice is feasible."""


@dataclass(frozen=True)
class Term:
    """Bytes above the least that a node holds in [start, end), by strategy."""

    start: int
    end: int
    usage: FloatArray


@dataclass(frozen=True)
class Indexed:
    """Terms of other strategies: strategy s of the node holds what `index[s]` held in `parts`."""

    index: IntArray
    parts: tuple[Term | Indexed, ...]


def flatten(parts: Sequence[Term | Indexed]) -> list[Term]:
    """Plain terms of what a node holds."""
    if all(isinstance(part, Term) for part in parts):
        return cast("list[Term]", list(parts))
    terms: list[Term] = []
    stack: list[tuple[Term | Indexed, IntArray | None]] = [(part, None) for part in parts]
    while stack:
        part, index = stack.pop()
        if isinstance(part, Indexed):
            composed = part.index if index is None else part.index[index]
            stack += [(inner, composed) for inner in part.parts]
        else:
            terms.append(part if index is None else Term(part.start, part.end, part.usage[index]))
    return join_intervals(terms)


def join_intervals(terms: Iterable[Term]) -> list[Term]:
    """One term an interval, in order."""
    total: dict[tuple[int, int], FloatArray] = {}
    for term in terms:
        interval = term.start, term.end
        total[interval] = total[interval] + term.usage if interval in total else term.usage
    return [Term(*interval, total[interval]) for interval in sorted(total)]


@dataclass(frozen=True)
class Restriction:
    """`node` kept the strategies `kept`; `forward[old]` is a new one that does as well, or -1."""

    node: int
    kept: IntArray
    forward: IntArray


@dataclass(frozen=True)
class Elimination:
    """`node` left; its best strategy is `table[choices of parents]`."""

    node: int
    parents: tuple[int, ...]
    table: IntArray


@dataclass(frozen=True)
class Merger:
    """`absorbed` joined `node`: it takes `follow[choice of node]`.

    `forward[i, j]` is the strategy of `node` for the old pair (i, j), -1 where that was forbidden.
    """

    node: int
    absorbed: int
    follow: IntArray
    forward: IntArray


Step = Restriction | Elimination | Merger


class Network:
    """Costs, edges and memory under reduction.

    Attributes:
      unary: cost by strategy, None for a node that left.
      tables: for each node, its neighbours and the cost table (own strategies, theirs). The two
        ends share one buffer (one is the transpose of the other).
      terms: memory by node, each with a least usage of zero.
      slack: bytes left at each time point when each node uses its least; empty without a limit.
      times: the original number of each time point.
      constant: cost of what was decided.
      changed: nodes whose strategies, edges or memory changed since `reduce` looked for dominance.
      trail: reductions made, in order.
    """

    def __init__(self, problem: Problem) -> None:
        self.changed: set[int] = set(range(len(problem.costs)))
        self.unary: list[FloatArray | None] = [as_costs(costs) for costs in problem.costs]
        self.tables: list[dict[int, FloatArray]] = [{} for _ in problem.costs]
        self.terms: list[list[Term | Indexed]] = [[] for _ in problem.costs]
        self.slack: FloatArray = np.zeros(0)
        self.times: IntArray = np.zeros(0, dtype=np.int64)
        self.constant = 0.0
        self.trail: list[Step] = []
        # Edges that share a table go on sharing it.
        tables: dict[int, FloatArray] = {}
        for edge in problem.edges:
            if id(edge.cost) not in tables:
                tables[id(edge.cost)] = as_costs(edge.cost)
            self.add_table(edge.a, edge.b, tables[id(edge.cost)])
        if problem.memory_limit is not None and math.isfinite(problem.memory_limit):
            self.slack = np.full(problem.horizon, float(problem.memory_limit))
            self.times = np.arange(problem.horizon)
            if problem.base_memory is not None:
                self.slack[: len(problem.base_memory)] -= problem.base_memory
            for term in problem.memory:
                if term.start < term.end:
                    self.terms[term.node].append(
                        Term(term.start, term.end, term.usage.astype(np.float64))
                    )

    def copy(self) -> Network:
        """A network that shares tables but can be reduced apart; its trail starts here."""
        other = copy.copy(self)
        other.unary = list(self.unary)
        other.tables = [dict(tables) for tables in self.tables]
        other.terms = [list(terms) for terms in self.terms]
        other.trail = []
        other.changed = set(self.changed)
        return other

    def entries(self) -> int:
        """Number of entries in all tables."""
        return sum(t.size for tables in self.tables for t in tables.values()) // 2

    def alive(self) -> list[int]:
        """Nodes still to decide."""
        return [node for node, costs in enumerate(self.unary) if costs is not None]

    def costs(self, node: int) -> FloatArray:
        """Costs by strategy of a node that is still there."""
        costs = self.unary[node]
        assert costs is not None
        return costs

    def add_table(self, a: int, b: int, table: FloatArray) -> None:
        """Add an edge; parallel edges add up, a loop falls on the node."""
        if a == b:
            self.unary[a] = self.costs(a) + np.diagonal(table)
            return
        if b in self.tables[a]:
            table = self.tables[a][b] + table
        self.tables[a][b] = table
        self.tables[b][a] = table.T
        self.changed |= {a, b}

    def drop_table(self, a: int, b: int) -> None:
        """Remove an edge."""
        del self.tables[a][b], self.tables[b][a]
        self.changed |= {a, b}

    def restrict(self, node: int, keep: NDArray[np.bool_], forward: IntArray | None = None) -> None:
        """Keep some strategies of a node; `forward[old]` is an old one that does as well."""
        kept = np.flatnonzero(keep)
        if not len(kept):
            raise NoFeasibleChoiceError
        renumbered = np.full(len(keep), -1)
        renumbered[kept] = np.arange(len(kept))
        if forward is not None:
            renumbered = renumbered[forward]
        self.trail.append(Restriction(node, kept, renumbered))
        self.unary[node] = self.costs(node)[kept]
        self.changed.add(node)
        self.changed.update(self.tables[node])
        for other, table in self.tables[node].items():
            self.tables[node][other] = np.ascontiguousarray(table[kept])
            self.tables[other][node] = self.tables[node][other].T
        if self.terms[node]:
            self.terms[node] = [Indexed(kept, tuple(self.terms[node]))]

    def eliminate(self, node: int, parents: tuple[int, ...], table: IntArray) -> None:
        """Take out a node that follows `parents`; its costs and memory are the caller's to move."""
        for other in list(self.tables[node]):
            self.drop_table(node, other)
        self.unary[node] = None
        self.terms[node] = []
        self.trail.append(Elimination(node, parents, table))

    def expand(self, choices: Sequence[int]) -> list[int]:
        """Original choices from choices of the network (entries of nodes that left are ignored)."""
        full = [int(choice) for choice in choices]
        for step in reversed(self.trail):
            match step:
                case Restriction(node, kept, _):
                    full[node] = int(kept[full[node]])
                case Elimination(node, parents, table):
                    full[node] = int(table[tuple(full[parent] for parent in parents)])
                case Merger(node, absorbed, follow, _):
                    full[absorbed] = int(follow[full[node]])
        return full

    def project(self, choices: Sequence[int]) -> list[int]:
        """Choices of the network from original ones; -1 where an original choice cannot be kept."""
        own = [int(choice) for choice in choices]
        for step in self.trail:
            match step:
                case Restriction(node, _, forward):
                    own[node] = int(forward[own[node]]) if own[node] >= 0 else -1
                case Elimination(node, _, _):
                    own[node] = -1
                case Merger(node, absorbed, _, forward):
                    pair = own[node], own[absorbed]
                    own[node] = int(forward[pair]) if min(pair) >= 0 else -1
                    own[absorbed] = -1
        return own
