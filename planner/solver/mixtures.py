"""Better choices for many alike parts than one choice for all: parts that choose differently.

Where memory binds, one choice for all parts leaves memory unused, for the next cheaper one does not
fit. With a price on memory the cheapest choices are found at once for the tied problem, a little
above the right price those that need less, a little below those that need more; some parts take
the ones, some the others. The prices that prove most of the tied problem prove about as much of
the whole one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.planner.solver.arrays import to_arrays
from shardwright.planner.solver.dual import Dual
from shardwright.planner.solver.network import Network, NoFeasibleChoiceError
from shardwright.planner.solver.problem import FloatArray, Problem
from shardwright.planner.solver.reductions import forbid_unsupported, reduce_memory
from shardwright.planner.solver.restricted import open_nodes, restrict
from shardwright.planner.solver.solve import solve
from shardwright.planner.solver.ties import Tied

_FACTORS = (0.5, 0.8, 0.95, 1.0, 1.05, 1.25, 2.0)
"""Of the right prices, at which choices are looked for."""
_ROUNDS, _ITERATIONS = 20, 50
_PRICED_SECONDS = 2.0
_MIXING_SECONDS = 6.0
"""The last thousandths of the best mixture take long, and whatever is found is improved after."""
_SETTLED = 1e-5
"""Prices are right where some rounds more raise the bound by less than this part of it."""


@dataclass(frozen=True)
class Mixture:
    """Choices of a whole problem, and prices that bound it.

    Attributes:
      prices: cost per byte, by time point of the whole problem where it is not 0.
    """

    choices: tuple[int, ...]
    prices: dict[int, float]


@dataclass(frozen=True)
class Priced:
    """What is cheapest where memory is paid for instead of limited.

    Attributes:
      prices: the right ones, cost per byte by time point; all 0 where memory does not bind.
      choices: the cheapest at these prices, and at somewhat lower and higher ones.
    """

    prices: FloatArray
    choices: tuple[tuple[int, ...], ...]

    @property
    def binds(self) -> bool:
        """Whether memory keeps anything from being chosen."""
        return bool(self.prices.any())


def price_memory(
    problem: Problem, upper: float, *, deadline: float, gap: float, seed: int, fitting: bool = False
) -> Priced:
    """Choices that are cheapest at about the right prices of memory; not all of them need to fit.

    Args:
      upper: cost of known choices; inf where none are.
      deadline: on the clock of `time.perf_counter`.
      gap: as of `mix`.
      fitting: only choices that probably fit are asked for.
    """
    prices = _prices(problem, upper, deadline)
    found = []
    factors = [f for f in _FACTORS if prices.any() and (f >= 1.0 or not fitting)]
    for factor in factors:
        left = min(_PRICED_SECONDS, deadline - time.perf_counter())
        if left > 0:
            paid = _priced(problem, factor * prices)
            found.append(solve(paid, time_limit_s=left, gap=0.1 * gap, seed=seed).choices)
    return Priced(prices, tuple(found))


def mix(
    problem: Problem,
    tied: Tied,
    priced: Priced,
    choices: Sequence[int],
    *,
    deadline: float,
    gap: float,
    seed: int,
) -> Mixture:
    """The best mixture of choices that are cheapest at about the right prices of memory.

    Args:
      problem: the whole problem.
      tied: its alike nodes tied.
      priced: of the tied problem.
      choices: feasible ones of the whole problem; the mixture costs no more.
      deadline: on the clock of `time.perf_counter`.
      gap: relative gap at which to stop.
    """
    start = tuple(choices)
    if not priced.binds:
        return Mixture(start, {})
    small = restrict(problem, [start, *map(tied.lift, priced.choices)])
    left = open_nodes(small.problem)
    mixed = start
    if left is not None:
        best = solve(
            left.problem,
            time_limit_s=max(0.0, min(_MIXING_SECONDS, deadline - time.perf_counter())),
            gap=gap,
            seed=seed,
            warm_starts=[left.project(small.project(start))],
        )
        mixed = small.lift(left.lift(best.choices))
    at = np.flatnonzero(priced.prices).tolist()
    return Mixture(mixed, {tied.times[t]: float(priced.prices[t]) for t in at})


def _prices(problem: Problem, upper: float, deadline: float) -> FloatArray:
    """The prices of memory that prove the highest bound found, by time point."""
    prices = np.zeros(problem.horizon)
    network = Network(problem)
    try:
        forbid_unsupported(network, network.alive())
        reduce_memory(network)
    except NoFeasibleChoiceError:
        return prices
    if not network.alive() or not len(network.slack):
        return prices
    dual = Dual(to_arrays(network), deadline=deadline)
    for _ in range(_ROUNDS):
        before = dual.bound
        dual.ascend(_ITERATIONS, upper - network.constant)
        settled = dual.bound - before < _SETTLED * abs(dual.bound)
        if settled or time.perf_counter() > deadline:
            break
    prices[network.times] = dual.prices
    return prices


def _priced(problem: Problem, prices: FloatArray) -> Problem:
    """The problem with memory paid for instead of limited."""
    paid = np.concatenate([[0.0], np.cumsum(prices)])
    costs = [np.asarray(c, dtype=np.float64) for c in problem.costs]
    for term in problem.memory:
        price = paid[term.end] - paid[term.start]
        if price:
            costs[term.node] = costs[term.node] + price * term.usage
    return Problem(costs=tuple(costs), edges=problem.edges, names=problem.names)
