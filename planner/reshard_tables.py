"""Tables of seconds between the strategies of two nodes, for the reshards of a skeleton."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.problem import FloatArray
from shardwright.planner.reshard import ReshardCosts
from shardwright.planner.rules import DimFactors
from shardwright.planner.skeleton import Reshard
from shardwright.planner.strategies import IntArray, codes, partial_masks


@dataclass(frozen=True)
class Priced:
    """A reshard's seconds, by strategy of its node or nodes; whether it ever costs anything."""

    gathers: FloatArray | None
    exposed: FloatArray
    costs: bool


class ReshardTables:
    """Prices the reshards between nodes on a mesh.

    Strategies are told apart by identity: nodes that share an array share what is priced.
    """

    def __init__(self, reshards: Sequence[Reshard], mesh: LogicalMesh) -> None:
        self._reshards = reshards
        self._costs = ReshardCosts(mesh)
        self._priced: dict[tuple[int, int, int, bool], Priced] = {}
        self._codes: dict[tuple[int, DimFactors], tuple[IntArray, IntArray]] = {}
        self._masks: dict[tuple[int, frozenset[int]], IntArray] = {}

    def ask(self, changes: Iterable[tuple[int, IntArray, IntArray]]) -> None:
        """Prepares for reshards from strategies to strategies, all at once.

        Args:
          changes: numbers of reshards, and the strategies of the nodes before and after.
        """
        wanted = {}
        for what, a, b in changes:
            reshard = self._reshards[what]
            key = (reshard.shape, reshard.before, reshard.after, id(a), id(b))
            wanted[key] = reshard, a, b
        self._costs.ask(
            (
                (reshard.shape, self.code(a, reshard.before), self.code(b, reshard.after))
                for reshard, a, b in wanted.values()
            ),
            (reshard.nbytes for reshard in self._reshards),
        )

    def price(self, what: int, a: IntArray, b: IntArray, *, within: bool) -> Priced:
        """Seconds of a reshard, by strategies of the node before and the node after.

        Args:
          what: the number of the reshard; `ask` was told of it.
          within: both are one node, and seconds are by its strategies alone.
        """
        key = (what, id(a), id(b), within)
        if key not in self._priced:
            reshard = self._reshards[what]
            self._priced[key] = self._within(reshard, a) if within else self._between(reshard, a, b)
        return self._priced[key]

    def _between(self, reshard: Reshard, a: IntArray, b: IntArray) -> Priced:
        """Seconds by strategies of the node before and the node after, shape (before, after)."""
        gathers, exposed = self._table(reshard, a, b)
        trips = self._trips(reshard, b)
        hides = reshard.hides and bool(gathers.any())
        if not hides:
            exposed = exposed + gathers
        ahead = trips * gathers if hides else None
        return Priced(ahead, trips * exposed, hides or bool(exposed.any()))

    def _within(self, reshard: Reshard, rows: IntArray) -> Priced:
        """Seconds by strategy of the only node, shape (strategies,)."""
        gathers, exposed = self._table(reshard, rows, rows)
        return Priced(None, self._trips(reshard, rows) * np.diagonal(gathers + exposed), True)

    def code(self, rows: IntArray, dims: DimFactors) -> IntArray:
        """The sharding code of a value under each strategy."""
        key = (id(rows), dims)
        if key not in self._codes:
            # The strategies are kept, so that what an id stands for stays.
            self._codes[key] = rows, codes(rows, dims)
        return self._codes[key][1]

    def _trips(self, reshard: Reshard, after: IntArray) -> FloatArray:
        """How often a reshard runs, by strategy of its target."""
        wanted = self.code(after, reshard.after)
        # A node that reads a value in two ways may need one sharding for both.
        again = np.zeros(len(wanted), dtype=bool)
        for other in reshard.earlier:
            again |= self.code(after, other) == wanted
        trips: FloatArray = reshard.trips * ~again
        return trips

    def _table(self, reshard: Reshard, a: IntArray, b: IntArray) -> tuple[FloatArray, FloatArray]:
        shape, nbytes = reshard.shape, reshard.nbytes
        before, after = self.code(a, reshard.before), self.code(b, reshard.after)
        gathers, others = self._costs.seconds(shape, nbytes, before, after)
        if reshard.partial:
            masks = self._partial_masks(a, reshard.partial)
            extra = self._costs.partial_seconds(shape, nbytes, masks, before, after)
            others += extra / reshard.added_up
        return gathers, others

    def _partial_masks(self, rows: IntArray, partial: frozenset[int]) -> IntArray:
        key = (id(rows), partial)
        if key not in self._masks:
            self._masks[key] = partial_masks(rows, partial)
        return self._masks[key]
