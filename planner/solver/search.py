"""The search on problems too large to hand to a MIP solver at once.

Rounds of two tasks side by side: the dual raises the lower bound, forests improve the solution. As
the gap closes, what is proven too expensive is removed and the rest reduced again, until the MIP
solver can finish it. Work in a round is counted, not timed, so that a seed gives the same rounds;
only the end, and how long a MIP may take, are matters of time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solver.arrays import Arrays, to_arrays
from shardwright.planner.solver.dual import Dual
from shardwright.planner.solver.exact import solve_exact
from shardwright.planner.solver.fixing import fix_by_bound
from shardwright.planner.solver.incumbent import PROVEN, Incumbent, relative_gap
from shardwright.planner.solver.kernels import forest_search
from shardwright.planner.solver.neighbourhood import around, promising, search_within
from shardwright.planner.solver.network import IntArray, Network, NoFeasibleChoiceError
from shardwright.planner.solver.problem import FloatArray
from shardwright.planner.solver.reductions import reduce

EXACT_ENTRIES = 60_000
_DUAL_WORK = 1e8
_FOREST_WORK = 2e8
_NEARBY = 200
_POINTS = 20
_NEIGHBOURHOOD_ENTRIES = 60_000
_NEIGHBOURHOOD_SECONDS = 10.0
_WORTH_REDUCING = 0.1


class Search:
    """A search over one network, which it makes smaller on the way.

    Attributes:
      bound: proven lower bound on the cost of the problem.
    """

    def __init__(
        self,
        network: Network,
        incumbent: Incumbent,
        *,
        deadline: float,
        seed: int,
        gap: float,
        workers: int,
        cutoff: float,
        on_progress: Callable[[float], None],
    ) -> None:
        self.bound = -math.inf
        self._network = network
        self._incumbent = incumbent
        self._deadline = deadline
        self._seed = seed
        self._gap = max(gap, PROVEN)
        self._cutoff = cutoff
        self._on_progress = on_progress
        self._workers = workers
        self._round = 0
        self._round_seconds = 0.0
        self._neighbourhood_seconds = 0.0
        self._neighbourhoods = 0
        self._prices: dict[int, float] = {}

    def run(self) -> None:
        """Search until proven or out of time.

        Raises:
          NoFeasibleChoiceError: there is no feasible choice.
        """
        try:
            with ThreadPoolExecutor(max(self._workers, 1)) as pool:
                while not self._done():
                    if self._network.alive():
                        self._search_at_this_size(pool)
                    else:
                        self._incumbent.offer(self._network.expand([0] * len(self._network.unary)))
                        self._raise_bound(self._network.constant)
        except NoFeasibleChoiceError:
            # What was removed before costs more than the incumbent.
            if not self._incumbent.found:
                raise
            self._raise_bound(self._incumbent.cost)

    def _search_at_this_size(self, pool: ThreadPoolExecutor) -> None:
        """Rounds on the network as it is, until it was made smaller or nothing is left to do."""
        arrays = to_arrays(self._network)
        constant = self._network.constant
        entries = len(arrays.table) + len(arrays.unary)
        iterations = int(np.clip(_DUAL_WORK / entries, 20, 200))
        moves = int(np.clip(_FOREST_WORK / (entries + 100 * len(arrays.nodes)), 20, 400))
        prices = np.array([self._prices.get(t, 0.0) for t in self._network.times.tolist()])
        dual = Dual(arrays, prices, deadline=self._deadline)
        current = self._start(arrays)
        rounding: IntArray | None = None
        fixed_at = math.inf
        stuck = False
        while not self._done():
            began = time.perf_counter()
            self._round += 1
            cost, bound = self._incumbent.cost, self.bound
            seed = self._seed * 1_000_003 + self._round
            keep = self._neighbourhood(arrays, dual, current, seed) if stuck else None
            ascent = pool.submit(dual.ascend, iterations, cost - constant)
            scale = 1e-3 * abs(dual.bound) if math.isfinite(dual.bound) else 0.0
            starts = [start for start in (current, rounding) if start is not None]
            if keep is not None and current is not None:
                within = search_within(
                    self._network,
                    arrays,
                    keep,
                    current,
                    time_limit_s=min(_NEIGHBOURHOOD_SECONDS, 0.5 * self._left()),
                    seed=self._seed,
                )
                current = current if within is None else within
                self._offer(arrays, current)
            elif starts:
                descent = pool.submit(
                    _improve, arrays, starts, dual.prices.copy(), scale, moves, seed
                )
                current = descent.result()
                self._offer(arrays, current)
            ascent.result()
            assert dual.best is not None
            rounding = dual.best.choice
            self._offer(arrays, rounding)
            self._raise_bound(dual.bound + constant)
            self._prices = dict(
                zip(self._network.times.tolist(), dual.prices.tolist(), strict=True)
            )
            self._on_progress(self.bound)
            took = time.perf_counter() - began
            if keep is None:
                self._round_seconds = took
            else:
                self._neighbourhood_seconds = max(took, self._neighbourhood_seconds)
            gap = self._relative_gap()
            slow = self._incumbent.cost == cost and self.bound - bound < 0.05 * (
                self._incumbent.cost - self.bound
            )
            # Forests and neighbourhoods take turns for as long as neither gets far.
            stuck = slow and not stuck and self._incumbent.found
            if self._done() or not (gap < 0.5 * fixed_at or (slow and gap < 0.95 * fixed_at)):
                if slow and entries <= EXACT_ENTRIES:
                    self._finish(arrays, dual)
                continue
            if self._incumbent.found and self._left() > 0:
                fixed_at = gap
                forbidden = fix_by_bound(self._network, dual, self._incumbent.cost - constant)
                if forbidden > _WORTH_REDUCING * entries:
                    reduce(self._network, lambda: self._left() <= 0)
                    return

    def _neighbourhood(
        self, arrays: Arrays, dual: Dual, current: IntArray | None, seed: int
    ) -> NDArray[np.bool_] | None:
        """What to keep for the next neighbourhood: around a node, or what the dual promises."""
        small = len(arrays.table) <= EXACT_ENTRIES
        if current is None or small or self._left() < 1.2 * self._neighbourhood_seconds:
            return None
        if self._neighbourhoods % 4 == 0:
            size = _NEIGHBOURHOOD_ENTRIES * (1 + self._neighbourhoods // 8)
            keep = promising(arrays, dual.settle(3), current, size)
        else:
            rng = np.random.default_rng(seed)
            keep = around(arrays, current, _NEIGHBOURHOOD_ENTRIES, rng)
        self._neighbourhoods += 1
        return keep

    def _finish(self, arrays: Arrays, dual: Dual) -> None:
        """Let the MIP solver work on what is left, for the rest of the time."""
        hint = self._start(arrays)
        points = set(np.flatnonzero(dual.prices).tolist())
        points |= {t for t, _ in dual.worst_points.most_common(_POINTS)}
        result = solve_exact(
            arrays,
            time_limit_s=self._left(),
            hint=hint,
            points=sorted(points),
            gap=self._gap,
            seed=self._seed,
        )
        if result.infeasible:
            raise NoFeasibleChoiceError
        self._raise_bound(result.bound + self._network.constant)
        if result.choice is not None:
            self._offer(arrays, result.choice)
        self._on_progress(self.bound)

    def _start(self, arrays: Arrays) -> IntArray | None:
        """The incumbent in terms of the arrays."""
        if self._incumbent.choices is None:
            return None
        choice = np.array(self._network.project(self._incumbent.choices))[arrays.nodes]
        return choice if (choice >= 0).all() else None

    def _offer(self, arrays: Arrays, choice: IntArray) -> None:
        full = np.zeros(len(self._network.unary), dtype=np.int64)
        full[arrays.nodes] = choice
        self._incumbent.offer(self._network.expand(full.tolist()))

    def _raise_bound(self, bound: float) -> None:
        """What was removed costs more than the incumbent, so the bound holds up to its cost."""
        self.bound = min(max(self.bound, bound), self._incumbent.cost)

    def _relative_gap(self) -> float:
        return relative_gap(self._incumbent.cost, self.bound)

    def _left(self) -> float:
        return self._deadline - time.perf_counter()

    def _done(self) -> bool:
        # A round that would not end in time is not begun.
        enough = self._relative_gap() <= self._gap or self.bound >= self._cutoff
        return enough or self._left() <= 1.3 * self._round_seconds


def _improve(
    arrays: Arrays, starts: list[IntArray], prices: FloatArray, scale: float, moves: int, seed: int
) -> IntArray:
    """The better of what forests make of the starts: over the whole graph, then around nodes."""
    outcomes = []
    for place, start in enumerate(starts):
        choice = start.copy()
        cost, excess = forest_search(
            arrays, choice, prices.copy(), scale, moves // 4, 0, 4 * seed + place
        )
        outcomes.append((excess, cost, place, choice))
    choice = min(outcomes)[-1]
    if len(arrays.nodes) > 2 * _NEARBY:
        forest_search(arrays, choice, prices.copy(), scale, moves, _NEARBY, 4 * seed + 2)
    return choice
