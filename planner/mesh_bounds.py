"""A quick bound of what plans on a mesh take, before its sharding problem is built.

In large programs nodes that are alike choose alike, and each class of them is one node; memory is
plenty.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.cast_tables import Cast, CastTables, casts_of
from shardwright.planner.local_prices import LocalPrices
from shardwright.planner.pricing import Strategies, exchange_seconds
from shardwright.planner.problem import LEAST_WEIGHT, Fixed, FloatArray
from shardwright.planner.reshard_tables import ReshardTables
from shardwright.planner.skeleton import Run, Skeleton
from shardwright.planner.solver import Edge, Problem
from shardwright.planner.solver.screening import costs_alone


@dataclass(frozen=True)
class Classes:
    """A skeleton's nodes by class, with what runs in and between classes counted.

    Attributes:
      first: a node of each class.
      kernels, exchanges: a run of each kind in each class -> the trips of all.
      links: class before and after, number of the reshard, and whether it is within one node -> how
        many there are.
      casts: class before, after and of the product, with one of the casts and how many there are.
    """

    skeleton: Skeleton = field(repr=False)
    first: tuple[int, ...]
    kernels: Mapping[tuple[int, int], float] = field(repr=False)
    exchanges: Mapping[tuple[int, int], float] = field(repr=False)
    links: Mapping[tuple[int, int, int, bool], int] = field(repr=False)
    casts: Sequence[tuple[tuple[int, int, int], Cast, int]] = field(repr=False)


def count_classes(skeleton: Skeleton, alike: Sequence[int] | None) -> Classes:
    """Counts what runs in and between classes of nodes; each node is its own where None."""
    of = range(len(skeleton.kind_of)) if alike is None else alike
    first: dict[int, int] = {}
    for node, number in enumerate(of):
        first.setdefault(number, node)

    def trips(runs: Sequence[Run]) -> dict[tuple[int, int], float]:
        total: dict[tuple[int, int], float] = {}
        for run in runs:
            key = of[run.node], run.what
            total[key] = total.get(key, 0.0) + run.trips
        return total

    examples: dict[tuple[object, ...], tuple[tuple[int, int, int], Cast]] = {}
    casts: Counter[tuple[object, ...]] = Counter()
    for cast in casts_of(skeleton):
        at, run = (of[cast.a], of[cast.b], of[cast.run.node]), cast.run
        key = (*at, cast.made, cast.copied, run.what, run.operand.dims, run.trips)
        examples.setdefault(key, (at, cast))
        casts[key] += 1
    links = Counter((of[x.a], of[x.b], x.what, x.a == x.b) for x in skeleton.links)
    return Classes(
        skeleton,
        tuple(first[number] for number in range(len(first))),
        trips(skeleton.kernel_runs),
        trips(skeleton.exchange_runs),
        links,
        [(*examples[key], count) for key, count in casts.items()],
    )


def quick_bound(
    classes: Classes, prices: LocalPrices, mesh: LogicalMesh, fixed: Fixed, cutoff: float
) -> float:
    """Seconds that no step takes less than; once they reach a cutoff they are not improved."""
    bounded = _Bounded(classes, prices, mesh, fixed)
    if bounded.least >= cutoff or math.isinf(bounded.least):
        return bounded.least
    return costs_alone(bounded.problem(), cutoff)


class _Bounded:
    """What a mesh makes of classes of nodes.

    Attributes:
      least: seconds of compute that no choices take less than.
    """

    def __init__(
        self, classes: Classes, prices: LocalPrices, mesh: LogicalMesh, fixed: Fixed
    ) -> None:
        skeleton = classes.skeleton
        self._classes = classes
        self._skeleton = skeleton
        self._mesh = mesh
        self._prices = prices
        self._tables = ReshardTables(skeleton.reshards, mesh)
        axis_sizes = tuple(mesh.shape.values())
        strategies = Strategies(skeleton.nodes, skeleton.kinds, axis_sizes, fixed)
        kinds = [skeleton.kind_of[node] for node in classes.first]
        self._rows = [strategies(*each) for each in zip(classes.first, kinds, strict=True)]
        self._cuts = [
            prices.cuts(kind, rows, axis_sizes)
            for kind, rows in zip(kinds, self._rows, strict=True)
        ]
        self._compute = [np.zeros(len(rows)) for rows in self._rows]
        for (number, what), trips in classes.kernels.items():
            seconds = prices.kernel_seconds(what, kinds[number])
            self._compute[number] += trips * seconds[self._cuts[number]]
        self.least = sum(float(seconds.min(initial=math.inf)) for seconds in self._compute)

    def problem(self) -> Problem:
        """The integer program, without memory: no step takes less."""
        costs = [(1 - LEAST_WEIGHT) * seconds for seconds in self._compute]
        for (number, what), trips in self._classes.exchanges.items():
            rows = self._rows[number]
            costs[number] += trips * exchange_seconds(self._skeleton, what, rows, self._mesh)
        edges = []
        for a, b, table in self._tables_between(costs):
            if a == b:
                costs[a] += np.diagonal(table)
            else:
                edges.append(Edge(a, b, table))
        return Problem(costs=tuple(costs), edges=tuple(edges))

    def _tables_between(self, costs: list[FloatArray]) -> Iterator[tuple[int, int, FloatArray]]:
        """Seconds between two classes; what runs within one node is added to its costs."""
        rows, links = self._rows, self._classes.links
        self._tables.ask((what, rows[a], rows[b]) for a, b, what, _ in links)
        for (a, b, what, within), count in links.items():
            priced = self._tables.price(what, rows[a], rows[b], within=within)
            if within:
                costs[a] += count * priced.exposed
            elif priced.costs:
                table = priced.exposed
                if priced.gathers is not None:
                    table = table + LEAST_WEIGHT * priced.gathers
                yield a, b, table if count == 1 else count * table
        price = CastTables(self._prices, self._tables)
        for (a, b, product), cast, count in self._classes.casts:
            seconds = price(cast, rows[a], rows[b], rows[product], self._cuts[product])
            yield a, b, (1 - LEAST_WEIGHT) * count * seconds
