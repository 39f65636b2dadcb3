"""From a problem to a solution with a bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.planner.solver.exact import solve_exact
from shardwright.planner.solver.network import Network, NoFeasibleChoiceError
from shardwright.planner.solver.problem import Problem, evaluate, validate


@dataclass(frozen=True)
class Solution:
    """The best choices found and how good they can at most be.

    Attributes:
      choices: one strategy a node; where infeasible, the choices of the least peak found.
      cost: of the choices (exact, see `evaluate`).
      bound: no feasible choice costs less.
      gap: (cost - bound) / |cost|.
      status: "optimal" where the gap asked for is proven, "feasible", or "infeasible" where no
        choice within the limit was found.
      seconds: wall time taken.
      peak, limit: bytes.
      least_peak: where infeasible, the least peak memory found, in bytes.
      least_peak_proven: whether no choice has a lower peak.
    """

    choices: tuple[int, ...]
    cost: float
    bound: float
    gap: float
    status: Literal["optimal", "feasible", "infeasible"]
    seconds: float
    peak: float
    limit: float | None
    least_peak: float | None = None
    least_peak_proven: bool = False


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    warm_starts: Sequence[Sequence[int]] = (),
    gap: float = 0.0,
    workers: int = 2,
    on_progress: Callable[[float, float, float], None] | None = None,
) -> Solution:
    """Choose a strategy for each node at least cost within the memory limit."""
    started = time.perf_counter()
    validate(problem)
    best: tuple[int, ...] = (0,) * len(problem.costs)
    bound = -math.inf
    cost = math.inf
    try:
        network = Network(problem)
        result = solve_exact(network, time_limit_s=time_limit_s, gap=gap)
        bound = result.bound
        if result.choices is not None:
            best = tuple(network.expand(result.choices))
    except NoFeasibleChoiceError:
        bound = math.inf
    checked = evaluate(problem, best)
    seconds = time.perf_counter() - started
    if not checked.feasible:
        return Solution(
            best,
            checked.cost,
            bound,
            math.inf,
            "infeasible",
            seconds,
            checked.peak,
            problem.memory_limit,
            checked.peak,
            False,
        )
    cost = checked.cost
    bound = min(bound, cost)
    relative = 0.0 if cost == bound else (cost - bound) / max(abs(cost), 1e-300)
    status: Literal["optimal", "feasible"] = "optimal" if relative <= max(gap, 1e-9) else "feasible"
    return Solution(
        best, cost, bound, relative, status, seconds, checked.peak, problem.memory_limit
    )
