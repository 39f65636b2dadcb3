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
from shardwright.planner.halo import halo_seconds
from shardwright.planner.local_prices import LocalPrices, op_dims
from shardwright.planner.pricing import Strategies
from shardwright.planner.problem import LEAST_WEIGHT, Fixed, FloatArray
from shardwright.planner.reshard_tables import Priced, ReshardTables
from shardwright.planner.skeleton import Run, Skeleton
from shardwright.planner.solver import Edge, Problem
from shardwright.planner.solver.screening import costs_alone
from shardwright.planner.strategies import IntArray, local_dims


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
        self._tables = ReshardTables(mesh)
        self._axis_sizes = tuple(mesh.shape.values())
        strategies = Strategies(skeleton.nodes, skeleton.kinds, self._axis_sizes, fixed)
        kinds = [skeleton.kind_of[node] for node in classes.first]
        self._rows = [strategies(*each) for each in zip(classes.first, kinds, strict=True)]
        self._cuts = [
            prices.cuts(kind, rows, self._axis_sizes)
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
            costs[number] += trips * self._exchange(number, what)
        edges = []
        for a, b, table in self._tables_between(costs):
            if a == b:
                costs[a] += np.diagonal(table)
            else:
                edges.append(Edge(a, b, table))
        return Problem(costs=tuple(costs), edges=tuple(edges))

    def _tables_between(self, costs: list[FloatArray]) -> Iterator[tuple[int, int, FloatArray]]:
        """Seconds between two classes; what runs within one node is added to its costs."""
        for (a, b, within), count, priced in self._reshards():
            if within:
                costs[a] += count * priced.exposed
            elif priced.costs:
                table = priced.exposed
                if priced.gathers is not None:
                    table = table + LEAST_WEIGHT * priced.gathers
                yield a, b, table if count == 1 else count * table
        price = CastTables(self._prices, self._tables)
        for (a, b, product), cast, count in self._classes.casts:
            of, cuts = self._rows, self._cuts[product]
            yield a, b, (1 - LEAST_WEIGHT) * count * price(cast, of[a], of[b], of[product], cuts)

    def _reshards(self) -> Iterator[tuple[tuple[int, int, bool], int, Priced]]:
        reshards, links, rows = self._skeleton.reshards, self._classes.links, self._rows
        tables = self._tables
        tables.ask(
            ((reshards[what], rows[a], rows[b]) for a, b, what, _ in links),
            (reshard.nbytes for reshard in reshards),
        )
        known: dict[tuple[int, int, int, bool], Priced] = {}
        for (a, b, what, within), count in links.items():
            key = (what, id(rows[a]), id(rows[b]), within)
            if key not in known:
                known[key] = (
                    tables.within(reshards[what], rows[a])
                    if within
                    else tables.between(reshards[what], rows[a], rows[b])
                )
            yield (a, b, within), count, known[key]

    def _exchange(self, number: int, what: int) -> FloatArray:
        nodes, rows = self._skeleton.nodes, self._rows[number]

        def local(op_id: int, position: int) -> IntArray:
            value, dims = op_dims(nodes, op_id, position)
            return local_dims(rows, nodes.graph.values[value].shape, dims, self._axis_sizes)

        op = nodes.graph.ops[self._skeleton.exchanges[what]]
        return halo_seconds(op, nodes.graph, rows, local, self._mesh)
