"""Solves the integer program of a mesh, repeated layers first with tied choices."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.planner.collector import without_collector
from shardwright.planner.expert_starts import expert_starts
from shardwright.planner.problem import ShardingProblem
from shardwright.planner.solver import Problem, Solution, solve
from shardwright.planner.solver.incumbent import PROVEN, Incumbent, relative_gap
from shardwright.planner.solver.mixtures import Priced, mix, price_memory
from shardwright.planner.solver.ties import Tied, tie
from shardwright.planner.solver.whole import improve

_ALONE, _EXPERTS = 0.7, 0.1
"""Parts of the time limit: for the solver alone, and for what people would begin with."""
_LEAST_EXPERT_SECONDS = 0.5
_MOST_WHOLE = 3000
"""Up to this many nodes what is left open after tying is solved as it is."""
_TIED_GAP = 3e-2
"""Of a search in the tied problem no more is asked. Where memory binds the last percents are slow
to prove, layers that may differ undercut them by as much, and what is cheapest at the right prices
of memory comes nearer at once."""


@without_collector()
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
    solver = _Solver(problem, deadline, seed, cutoff + problem.feeding.most)
    if problem.alike is None:
        return solver.solve(program, warm_starts, gap)
    tied = tie(program, problem.alike)
    starts = [tied.project(choices) for choices in warm_starts]
    begun = Incumbent(program)
    priced = None

    def price(upper: float) -> Priced:
        return price_memory(
            tied.problem, upper, deadline=deadline, gap=gap, seed=seed, fitting=not untie
        )

    if untie:
        priced = price(_best(program, warm_starts).cost)
        if priced.binds:
            begun = _best(program, [*warm_starts, *map(tied.lift, priced.choices)])
    if not begun.found:
        binds = priced is None or priced.binds
        solution = solver.solve(tied.problem, starts, max(gap, _TIED_GAP) if binds else gap)
        if priced is None and solution.status in ("optimal", "feasible"):
            priced = price(solution.cost)
            if not priced.binds:
                solution = solver.solve(tied.problem, [solution.choices], gap)
        if priced is None or solution.status in ("cut off", "infeasible"):
            choices = tied.lift(solution.choices)
            if solution.status == "cut off":
                return replace(solution, choices=choices)
            # Untied choices might fit.
            return replace(solution, choices=choices, bound=-math.inf, least_peak_proven=False)
        begun = _best(tied.problem, [solution.choices, *priced.choices])
        assert begun.choices is not None
        begun.choices = tied.lift(begun.choices)
    assert priced is not None and begun.choices is not None
    if untie:
        return _untied(program, tied, priced, begun.choices, deadline, gap, seed)
    return replace(
        solution,
        choices=begun.choices,
        cost=begun.cost,
        bound=-math.inf,
        gap=math.inf,
        status="feasible",
        peak=begun.peak,
    )


@dataclass(frozen=True)
class _Solver:
    """Solves a problem, or its alike nodes tied, with what people would begin with."""

    problem: ShardingProblem
    deadline: float
    seed: int
    cutoff: float

    def solve(self, program: Problem, starts: Sequence[Sequence[int]], gap: float) -> Solution:
        left = self.deadline - time.perf_counter()
        solution = solve(
            program,
            time_limit_s=_ALONE * left,
            seed=self.seed,
            gap=gap,
            cutoff=self.cutoff,
            warm_starts=starts,
        )
        nothing_fits = solution.status == "infeasible" and math.isinf(solution.bound)
        if solution.status in ("optimal", "cut off") or nothing_fits:
            return solution
        # Not proven good: what people would begin with may be better, or fit at all.
        until = time.perf_counter() + max(_EXPERTS * left, _LEAST_EXPERT_SECONDS)
        experts = expert_starts(
            self.problem, program, self.problem.alike, deadline=until, seed=self.seed
        )
        again = solve(
            program,
            time_limit_s=max(self.deadline - time.perf_counter(), 0.0),
            seed=self.seed,
            gap=gap,
            cutoff=self.cutoff,
            warm_starts=[*starts, solution.choices, *experts],
        )
        return _with_bound(again, solution.bound, gap)


def _best(program: Problem, known: Iterable[Sequence[int]]) -> Incumbent:
    """The cheapest of some choices that fit, if any do."""
    incumbent = Incumbent(program)
    for choices in known:
        incumbent.offer(choices)
    return incumbent


def _untied(
    program: Problem,
    tied: Tied,
    priced: Priced,
    begun: Sequence[int],
    deadline: float,
    gap: float,
    seed: int,
) -> Solution:
    """Choices in which alike nodes may differ, better than those known, and their bound."""
    mixed = mix(program, tied, priced, begun, deadline=deadline, gap=gap, seed=seed)
    untied = improve(
        program, mixed.choices, deadline=deadline, gap=gap, seed=seed, prices=mixed.prices
    )
    left = deadline - time.perf_counter()
    if untied.status == "optimal" or len(program.costs) > _MOST_WHOLE or left <= 0:
        return untied
    again = solve(program, time_limit_s=left, seed=seed, gap=gap, warm_starts=[untied.choices])
    return _with_bound(again, untied.bound, gap)


def _with_bound(solution: Solution, bound: float, gap: float) -> Solution:
    """A solution with the better of its bound and another."""
    if solution.status not in ("feasible", "optimal") or bound <= solution.bound:
        return solution
    bound = min(bound, solution.cost)
    reached = relative_gap(solution.cost, bound)
    proven = reached <= max(gap, PROVEN)
    return replace(solution, bound=bound, gap=reached, status="optimal" if proven else "feasible")
