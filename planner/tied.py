"""Solves the integer program of a mesh, repeated layers first with tied choices."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.planner.problem import ShardingProblem
from shardwright.planner.solver import Solution, solve
from shardwright.planner.solver.mixtures import mix
from shardwright.planner.solver.ties import tie
from shardwright.planner.solver.whole import improve


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

    Where the problem has alike nodes, they choose alike; the bound is then of nothing.

    Args:
      cutoff: seconds of a step that are of no use.
      untie: let alike nodes differ where that is better, and bound what any choices cost.
    """
    deadline = time.perf_counter() + time_limit_s
    program = problem.weighed(weights, memory_limit)
    cutoff += problem.feeding.most
    if problem.alike is None:
        return solve(
            program,
            time_limit_s=time_limit_s,
            seed=seed,
            gap=gap,
            cutoff=cutoff,
            warm_starts=warm_starts,
        )
    tied = tie(program, problem.alike)
    solution = solve(
        tied.problem,
        time_limit_s=time_limit_s,
        seed=seed,
        gap=gap,
        cutoff=cutoff,
        warm_starts=[tied.project(choices) for choices in warm_starts],
    )
    choices = tied.lift(solution.choices)
    if solution.status == "cut off":
        return replace(solution, choices=choices)
    if solution.status == "infeasible":
        # Untied choices might fit.
        return replace(solution, choices=choices, bound=-math.inf, least_peak_proven=False)
    if untie:
        mixed = mix(program, tied, solution.choices, deadline=deadline, gap=gap, seed=seed)
        return improve(
            program, mixed.choices, deadline=deadline, gap=gap, seed=seed, prices=mixed.prices
        )
    return replace(solution, choices=choices, bound=-math.inf, gap=math.inf, status="feasible")
