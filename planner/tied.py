"""Solves the integer program of a mesh, repeated layers first with tied choices."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.planner.expert_starts import expert_starts
from shardwright.planner.problem import ShardingProblem
from shardwright.planner.solver import Solution, solve
from shardwright.planner.solver.incumbent import PROVEN, relative_gap
from shardwright.planner.solver.mixtures import mix
from shardwright.planner.solver.ties import tie
from shardwright.planner.solver.whole import improve

_ALONE, _EXPERTS = 0.7, 0.1
"""Parts of the time limit: for the solver alone, and for what people would begin with."""
_LEAST_EXPERT_SECONDS = 0.5
_MOST_WHOLE = 3000
"""Up to this many nodes what is left open after tying is solved as it is."""


def solve_weighed(
    problem: ShardingProblem,
    weights: Mapping[int, float],
    memory_limit: float,
    *,
    time_limit_s: float,
    seed: int,
    gap: float,
    cutoff: float,
    warm_starts: Sequence[Sequence[int]],
    untie: bool,
) -> Solution:
    """The best choices for some weights of what hides, see `ShardingProblem.weighed`.

    Where the problem has alike nodes, they choose alike; the bound is then of nothing. What is not
    proven good is compared with what people would begin with (see `expert_starts`).

    Args:
      cutoff: seconds of a step that are of no use.
      untie: let alike nodes differ where that is better, and bound what any choices cost.
    """
    deadline = time.perf_counter() + time_limit_s
    program = problem.weighed(weights, memory_limit)
    cutoff += problem.feeding.most
    tied = None if problem.alike is None else tie(program, problem.alike)
    small = program if tied is None else tied.problem
    starts = [tuple(c) if tied is None else tied.project(c) for c in warm_starts]
    solution = solve(
        small,
        time_limit_s=_ALONE * time_limit_s,
        seed=seed,
        gap=gap,
        cutoff=cutoff,
        warm_starts=starts,
    )
    if solution.status == "feasible" or (
        solution.status == "infeasible" and not math.isinf(solution.bound)
    ):
        # Not proven good: what people would begin with may be better, or fit at all.
        until = time.perf_counter() + max(_EXPERTS * time_limit_s, _LEAST_EXPERT_SECONDS)
        experts = expert_starts(problem, small, problem.alike, deadline=until, seed=seed)
        again = solve(
            small,
            time_limit_s=max(deadline - time.perf_counter(), 0.0),
            seed=seed,
            gap=gap,
            cutoff=cutoff,
            warm_starts=[*starts, solution.choices, *experts],
        )
        solution = _with_bound(again, solution.bound, gap)
    if tied is None:
        return solution
    choices = tied.lift(solution.choices)
    if solution.status == "cut off":
        return replace(solution, choices=choices)
    if solution.status == "infeasible":
        # Untied choices might fit.
        return replace(solution, choices=choices, bound=-math.inf, least_peak_proven=False)
    if untie:
        mixed = mix(program, tied, solution.choices, deadline=deadline, gap=gap, seed=seed)
        untied = improve(
            program, mixed.choices, deadline=deadline, gap=gap, seed=seed, prices=mixed.prices
        )
        left = deadline - time.perf_counter()
        if untied.status == "optimal" or len(program.costs) > _MOST_WHOLE or left <= 0:
            return untied
        again = solve(program, time_limit_s=left, seed=seed, gap=gap, warm_starts=[untied.choices])
        return _with_bound(again, untied.bound, gap)
    return replace(solution, choices=choices, bound=-math.inf, gap=math.inf, status="feasible")


def _with_bound(solution: Solution, bound: float, gap: float) -> Solution:
    """A solution with the better of its bound and another."""
    if solution.status not in ("feasible", "optimal") or bound <= solution.bound:
        return solution
    bound = min(bound, solution.cost)
    reached = relative_gap(solution.cost, bound)
    proven = reached <= max(gap, PROVEN)
    return replace(solution, bound=bound, gap=reached, status="optimal" if proven else "feasible")
