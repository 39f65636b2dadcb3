"""Exact minimisation: a MIP solver, with rows of memory added where they are broken.

Few time points ever bind, so most rows are never needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.planner.solver.arrays import Arrays
from shardwright.planner.solver.network import IntArray

_LP_ROUNDS = 12
# How far, relatively, the solver's tolerances may put the value of a relaxation above the truth.
_LP_ERROR = 1e-7


@dataclass(frozen=True)
class ExactResult:
    """Best choices by node of the arrays (None where none was found), and a lower bound."""

    choice: IntArray | None
    bound: float
    infeasible: bool = False


_INFEASIBLE = ExactResult(None, math.inf, True)


def solve_exact(
    arrays: Arrays,
    *,
    time_limit_s: float,
    hint: IntArray | None = None,
    points: Iterable[int] = (),
    gap: float = 0.0,
    seed: int = 0,
) -> ExactResult:
    """Minimise exactly, or as far as the time allows.

    Args:
      arrays: the problem.
      time_limit_s: wall time allowed.
      hint: a start.
      points: time points whose rows to begin with; with none, relaxations are solved to find them.
      gap: relative gap at which to stop.
      seed: of the MIP solver.
    """
    # OR-Tools and scipy.sparse take most of a second to import, and many programs need neither.
    from shardwright.planner.solver.mip_model import MipModel

    deadline = time.perf_counter() + time_limit_s
    model = MipModel(arrays)
    if hint is not None:
        model.refer(model.cost(hint))
    rows = list(dict.fromkeys(points))
    bound = -math.inf
    for _ in range(_LP_ROUNDS if len(arrays.slack) and not rows else 0):
        relaxed = model.solve(rows, deadline, seed=seed)
        if relaxed.infeasible:
            return _INFEASIBLE
        bound = max(bound, relaxed.bound - _LP_ERROR * abs(relaxed.bound))
        model.refer(bound)
        broken = [] if relaxed.picks is None else model.broken_points(relaxed.picks, 1e-6)
        if not broken:
            break
        rows += [t for t in broken if t not in rows]
    while True:
        solved = model.solve(rows, deadline, integer=True, hint=hint, gap=gap, seed=seed)
        if solved.infeasible:
            return _INFEASIBLE
        bound = max(bound, solved.bound)
        if solved.picks is None:
            return ExactResult(None, bound)
        choice = model.choice(solved.picks)
        broken = model.broken_points(model.indicator(choice), 0.0)
        if not broken:
            return ExactResult(choice, bound)
        fresh = [t for t in broken if t not in rows]
        if not fresh:
            # Over the limit by less than the solver's tolerance.
            return ExactResult(None, bound)
        rows += fresh
