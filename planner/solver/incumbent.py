"""The best choices known, in terms of the original problem, checked exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.planner.solver.problem import Problem, evaluate

PROVEN = 1e-9
"""Relative gap taken as none: the solvers work to tolerances of this order."""


class Incumbent:
    """Keeps the cheapest feasible choices offered, and those of least peak where none is feasible.

    Attributes:
      cost: of the best feasible choices, inf until there are some.
      choices: these, or the allowed choices of least peak.
      peak: peak memory of `choices`, in bytes.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost = math.inf
        self.choices: tuple[int, ...] | None = None
        self.peak = math.inf

    @property
    def found(self) -> bool:
        """Whether feasible choices are known."""
        return math.isfinite(self.cost)

    def offer(self, choices: Sequence[int]) -> bool:
        """Take the choices if they are better; says whether they were."""
        checked = evaluate(self.problem, choices)
        if checked.feasible:
            better = checked.cost < self.cost
        else:
            better = not self.found and math.isfinite(checked.cost) and checked.peak < self.peak
        if better:
            self.choices, self.peak = tuple(int(c) for c in choices), checked.peak
            if checked.feasible:
                self.cost = checked.cost
        return better


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / |cost|; 0 where they meet, inf where there is no cost."""
    if not math.isfinite(cost):
        return math.inf
    if cost <= bound:
        return 0.0
    return (cost - bound) / abs(cost) if cost else math.inf
