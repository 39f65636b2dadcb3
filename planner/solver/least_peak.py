"""The least peak memory of any allowed choice, for problems that do not fit."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardwright.planner.solver.problem import (
    CostArray,
    Edge,
    FloatArray,
    Problem,
    as_costs,
    evaluate,
)

# Shares of the time left: to find any allowed choice, and for each limit tried after that.
_FIRST_SHARE = 0.3
_SHARE = 0.3


@dataclass(frozen=True)
class LeastPeak:
    """Choices of low peak (None where forbidden entries exclude all), and whether none is lower."""

    choices: tuple[int, ...] | None
    peak: float
    proven: bool


Attempt = Callable[[Problem, float], tuple[tuple[int, ...] | None, bool]]
"""Solves a problem until a deadline: feasible choices or None, and whether there are none."""


def find_least_peak(
    problem: Problem,
    known: tuple[int, ...] | None,
    attempt: Attempt,
    *,
    excluded: float,
    deadline: float,
) -> LeastPeak:
    """Halve the interval between a limit that nothing fits and the least peak found.

    Args:
      problem: one that nothing fits.
      known: allowed choices to begin with.
      attempt: how to solve.
      excluded: bytes within which nothing is known to fit, -1 where that is not known.
      deadline: on the clock of `time.perf_counter`.
    """
    if known is None:
        known, impossible = attempt(_cheap_in_memory(problem), _until(deadline, _FIRST_SHARE))
        if known is None:
            return LeastPeak(None, math.inf, impossible)
    choices, peak = known, evaluate(problem, known).peak
    # Usage is whole bytes, so a peak one above what is excluded is the least.
    proven = True
    while peak - excluded > 1 and time.perf_counter() < deadline:
        limit = math.floor((peak + excluded) / 2)
        tried = dataclasses.replace(_free(problem), memory_limit=limit)
        found, impossible = attempt(tried, _until(deadline, _SHARE))
        if found is not None:
            choices, peak = found, evaluate(problem, found).peak
        else:
            excluded, proven = limit, proven and impossible
    return LeastPeak(choices, peak, proven and peak - excluded <= 1)


def _until(deadline: float, share: float) -> float:
    now = time.perf_counter()
    return now + share * max(deadline - now, 0.0)


def _cheap_in_memory(problem: Problem) -> Problem:
    """The problem without limit, where a choice costs its bytes times the time they are held."""
    free = _free(problem)
    costs = [as_costs(costs) for costs in free.costs]
    for term in problem.memory:
        held = float(max(term.end - term.start, 0))
        costs[term.node] = costs[term.node] + held * term.usage.astype(np.float64)
    return dataclasses.replace(free, costs=tuple(costs), memory_limit=None)


def _free(problem: Problem) -> Problem:
    """The problem with only what is forbidden left of its costs."""
    return dataclasses.replace(
        problem,
        costs=tuple(_forbidden(costs) for costs in problem.costs),
        edges=tuple(Edge(edge.a, edge.b, _forbidden(edge.cost)) for edge in problem.edges),
    )


def _forbidden(costs: CostArray) -> FloatArray:
    return np.where(np.isfinite(as_costs(costs)), 0.0, np.inf)
