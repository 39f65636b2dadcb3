"""Seconds that products take longer for operands that they cast, by the strategies of two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardwright.planner.local_prices import LocalPrices
from shardwright.planner.operand_casts import CastRun
from shardwright.planner.problem import FloatArray
from shardwright.planner.reshard_tables import ReshardTables
from shardwright.planner.rules import DimFactors
from shardwright.planner.skeleton import Skeleton
from shardwright.planner.strategies import IntArray


@dataclass(frozen=True)
class Cast:
    """A product that casts an operand inside it, where that comes as it is made.

    Attributes:
      a: the node that makes the operand.
      b: the node that reads it first: the product's, or the copy that serves several readers.
      made: the factors of `a` on each dimension of the operand.
      copied: whether `b` is a copy.
    """

    a: int
    b: int
    made: DimFactors
    copied: bool
    run: CastRun


def casts_of(skeleton: Skeleton) -> Iterator[Cast]:
    """The casts of a skeleton's products."""
    copies = {copy.value: copy.node for copy in skeleton.copies}
    for run in skeleton.cast_runs:
        producer = skeleton.nodes.producers[run.operand.value]
        copy = copies.get(run.operand.value)
        target = run.node if copy is None else copy
        yield Cast(producer.node, target, producer.dims, copy is not None, run)


class CastTables:
    """Prices casts on a mesh; what is alike is priced once."""

    def __init__(self, prices: LocalPrices, tables: ReshardTables) -> None:
        self._prices = prices
        self._tables = tables
        self._known: dict[tuple[object, ...], FloatArray] = {}

    def __call__(
        self, cast: Cast, before: IntArray, after: IntArray, product: IntArray, cuts: IntArray
    ) -> FloatArray:
        """Seconds by strategies of `cast.a` and `cast.b`, for all runs.

        Where a value is moved once for several readers, a copy that is not moved costs each reader
        the least that any of its strategies takes with the copy's sharding.

        Args:
          before, after, product: strategies of `a`, of `b` and of the product's node.
          cuts: of the product's node, by strategy.
        """
        run, dims = cast.run, cast.run.operand.dims
        key = (
            run.what, cast.made, dims, run.trips, cast.copied, id(before), id(after), id(product)
        )  # fmt: skip
        if key not in self._known:
            kind = self._prices.skeleton.kind_of[run.node]
            at = self._tables.code(product, dims)
            seconds = self._prices.cast_seconds(run.what, kind)[cuts]
            if cast.copied:
                asked = self._tables.code(after, tuple((d,) for d in range(len(dims))))
                at, seconds = asked, _least(seconds, at, asked)
            unmoved = self._tables.code(before, cast.made)[:, None] == at[None, :]
            self._known[key] = run.trips * np.where(unmoved, seconds[None, :], 0.0)
        return self._known[key]


def _least(seconds: FloatArray, codes: IntArray, asked: IntArray) -> FloatArray:
    """The least seconds of those with each code that is asked for; 0 where there are none."""
    least = {
        code: float(seconds[codes == code].min()) for code in np.intersect1d(codes, asked).tolist()
    }
    return np.array([least.get(code, 0.0) for code in asked.tolist()])
