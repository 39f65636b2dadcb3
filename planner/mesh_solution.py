"""Step 4 on one mesh: the integer program solved, its solution partitioned and evaluated."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwright.cost_models.memory import PeakMemory
from shardwright.planner.collectives import DimAxes
from shardwright.planner.collector import without_collector
from shardwright.planner.constraints import ValueConstraint, value_constraints
from shardwright.planner.evaluation import Evaluation, evaluate_partitioned
from shardwright.planner.partitioned import Partitioned
from shardwright.planner.piecewise import partition_constrained
from shardwright.planner.prepared import Prepared
from shardwright.planner.problem import LEAST_WEIGHT, ShardingProblem, sharding_of
from shardwright.planner.solver import Solution
from shardwright.planner.solver.incumbent import relative_gap
from shardwright.planner.tied import solve_weighed

_HIDING_WEIGHTS = (0.05, 0.3, 1.0)
_MEMORY_ROUNDS = 3
_MISTAKEN = 1.02
"""Where a step takes this much longer than the integer program knew, it is told what is exposed."""
_EXPOSED_PARTS = (1.0, 0.5)
"""Of what the schedule exposes of one solution: gathers of another may stand where more hides."""
LEAST_SECONDS = 2.0
_NOTICED = 1.02
"""By how much the two measures of memory must differ to solve again."""
_SLOW = 0.9
"""A limit that was lowered and is lowered again to this much of itself does not get there."""
_BINDING = 1.1
"""Memory counts as binding where the solution takes this close to its limit."""


@dataclass(frozen=True)
class Candidate:
    """A solution on one mesh, partitioned and priced.

    Attributes:
      bound_s: no plan on the mesh takes less by the integer program; -inf where nothing is proven.
      by_schedule: better than the integer program's best, of which the schedule exposes more.
    """

    problem: ShardingProblem = field(repr=False)
    solution: Solution = field(repr=False)
    constraints: tuple[ValueConstraint, ...] = field(repr=False)
    partitioned: Partitioned = field(repr=False)
    evaluation: Evaluation = field(repr=False)
    in_shardings: tuple[DimAxes, ...] = field(repr=False)
    out_shardings: tuple[DimAxes, ...] = field(repr=False)
    bound_s: float = -math.inf
    by_schedule: bool = False


@dataclass(frozen=True)
class Estimate:
    """A solution on one mesh by the integer program alone.

    Attributes:
      step_s: seconds of a step.
      weights: of gathers, by loop, with which it was found.
    """

    problem: ShardingProblem = field(repr=False)
    solution: Solution = field(repr=False)
    step_s: float
    weights: dict[int, float] = field(repr=False)


@dataclass(frozen=True)
class Misfit:
    """No plan on a mesh keeps within the memory: the least that was found.

    Attributes:
      proven: no sharding fits by the integer program; otherwise none was found in time.
    """

    least: PeakMemory
    proven: bool


@dataclass(frozen=True)
class RuledOut:
    """No plan on a mesh takes less than `bound_s` seconds by the integer program: too slow."""

    bound_s: float


def solve_mesh(
    prepared: Prepared,
    problem: ShardingProblem,
    memory_limit: float,
    time_limit_s: float,
    seed: int,
    gap: float,
    begin: Candidate | None = None,
    cutoff: float = math.inf,
    estimated: Estimate | None = None,
) -> Candidate | Misfit | RuledOut:
    """The best candidate on one mesh, or the least memory found where none fits.

    The integer program knows memory and overlap only nearly. Where its memory differs from the
    exact evaluation's, it is solved again with its limit moved by the difference; where the
    gathers of a loop last longer than the compute that they hide behind, they are weighed more;
    and where the schedule exposes much that was taken to hide, it is solved once more with that
    part of every gather exposed, and with half of it.

    Args:
      begin: a candidate to improve.
      cutoff: seconds of a step; a mesh on which no plan takes less is ruled out.
      estimated: what to begin with; the nodes of alike layers may then choose differently.
    """
    solver = _Solver(time.monotonic() + time_limit_s, seed, gap, untie=estimated is not None)
    best: Candidate | None = None
    least: PeakMemory | None = None
    proven = False
    bound = -math.inf
    weights = dict.fromkeys(problem.loops, LEAST_WEIGHT)
    begun: Solution | None = None
    known = [] if begin is None else [begin]
    warm = [one.solution.choices for one in known]
    if estimated is not None:
        # Evaluated before alike layers are let differ, which takes long and needs the right limit.
        weights, begun = dict(estimated.weights), estimated.solution
    for weight in _HIDING_WEIGHTS:
        limit = memory_limit
        for _ in range(_MEMORY_ROUNDS + (begun is not None)):
            first, begun = begun, None
            solution = first or solver(problem, weights, limit, warm, cutoff)
            warm = warm if first is None else [first.choices]
            if limit >= memory_limit:
                # For any weights, what the integer program cannot undercut, no step can.
                bound = max(bound, problem.step_bound(solution.bound))
            if solution.status == "cut off":
                if best is not None:
                    return replace(best, bound_s=bound)
                return RuledOut(problem.step_bound(solution.bound))
            candidate = _evaluated(prepared, problem, solution, known)
            peak = candidate.evaluation.peak
            # With a moved limit it is proven of that limit only.
            proven = proven or (limit >= memory_limit and math.isinf(solution.bound))
            for found in (peak, problem.peak_memory(solution.choices)):
                if found.bytes > memory_limit and (least is None or found.bytes < least.bytes):
                    least = found
            if peak.bytes <= memory_limit and (
                best is None or candidate.evaluation.step_s <= best.evaluation.step_s
            ):
                best = candidate
            moved = memory_limit + solution.peak - peak.bytes
            too_strict = moved > limit * _NOTICED and solution.peak > limit / _BINDING
            if not too_strict and peak.bytes <= memory_limit and first is not None:
                continue
            if not too_strict and peak.bytes <= memory_limit:
                break
            if moved <= 0 and solution.status == "infeasible":
                break
            # What is not counted may grow as fast as what is counted shrinks: half of that, then.
            slow = moved <= 0 or (limit < memory_limit and _SLOW * limit < moved <= limit)
            limit = limit / 2 if slow else moved
        longer = _gathering_longest(problem, solution)
        if best is None or not longer or estimated is not None:
            break
        weights.update(dict.fromkeys(longer, weight))
    if best is None:
        return Misfit(least or peak, proven)
    if not math.isfinite(best.solution.bound):
        # The estimate was not undercut: what is proven is proven of it too.
        best = replace(best, solution=_as_stated(problem, best.solution, bound, gap))
    share = _exposed_share(problem, best)
    for part in _EXPOSED_PARTS:
        if not share or time.monotonic() >= solver.deadline:
            break
        other = solver(problem.exposing(part * share), weights, limit, [best.solution.choices])
        stated = _as_stated(problem, other, bound, gap)
        candidate = _evaluated(prepared, problem, stated, known)
        evaluation = candidate.evaluation
        if evaluation.peak.bytes <= memory_limit and evaluation.step_s < best.evaluation.step_s:
            best = replace(candidate, by_schedule=True)
    return replace(best, bound_s=bound)


def estimate_mesh(
    problem: ShardingProblem,
    memory_limit: float,
    time_limit_s: float,
    seed: int,
    gap: float,
    cutoff: float = math.inf,
) -> Estimate | Misfit | RuledOut:
    """The best solution on one mesh by the integer program alone; otherwise as `solve_mesh`."""
    solver = _Solver(time.monotonic() + time_limit_s, seed, gap, untie=False)
    best: Estimate | None = None
    weights = dict.fromkeys(problem.loops, LEAST_WEIGHT)
    for weight in _HIDING_WEIGHTS:
        solution = solver(problem, weights, memory_limit, (), cutoff)
        if solution.status == "cut off":
            return best or RuledOut(problem.step_bound(solution.bound))
        if solution.status == "infeasible":
            return best or Misfit(problem.peak_memory(solution.choices), proven=False)
        step_s = problem.step_seconds(solution.choices)
        if best is None or step_s < best.step_s:
            best = Estimate(problem, solution, step_s, dict(weights))
        longer = _gathering_longest(problem, solution)
        if not longer:
            break
        weights.update(dict.fromkeys(longer, weight))
    assert best is not None
    return best


@dataclass(frozen=True)
class _Solver:
    """What all solutions of one mesh are asked for with."""

    deadline: float
    seed: int
    gap: float
    untie: bool

    def __call__(
        self,
        problem: ShardingProblem,
        weights: Mapping[int, float],
        limit: float,
        warm: Sequence[tuple[int, ...]],
        cutoff: float = math.inf,
    ) -> Solution:
        return solve_weighed(
            problem,
            weights,
            limit,
            time_limit_s=max(LEAST_SECONDS, self.deadline - time.monotonic()),
            seed=self.seed,
            gap=self.gap,
            cutoff=cutoff,
            warm_starts=warm,
            untie=self.untie,
        )


def _as_stated(problem: ShardingProblem, solution: Solution, bound: float, gap: float) -> Solution:
    """A solution of a changed problem as one of the problem itself, of which the bound is."""
    step_s = problem.step_seconds(solution.choices)
    reached = relative_gap(step_s, bound)
    status: Literal["optimal", "feasible"] = "optimal" if reached <= gap else "feasible"
    return replace(solution, cost=step_s, bound=bound, gap=reached, status=status)


def _exposed_share(problem: ShardingProblem, candidate: Candidate) -> float:
    """The part of the gathers that the integer program took to hide and the schedule does not.

    0 where the step takes about what the integer program knew.
    """
    choices, evaluation = candidate.solution.choices, candidate.evaluation
    known = problem.step_seconds(choices)
    compute, gathers, _ = problem.seconds(choices)
    if evaluation.step_s < known * _MISTAKEN or not gathers:
        return 0.0
    beyond = evaluation.exposed_collective_s - (known - compute)
    return min(max(beyond / gathers, 0.0), 1.0)


def _gathering_longest(problem: ShardingProblem, solution: Solution) -> list[int]:
    """The loops whose gathers last longer than the compute that they can hide behind."""
    compute, gathers, _ = problem.seconds_by_loop(solution.choices)
    return [loop for loop, seconds in gathers.items() if seconds > compute.get(loop, 0.0)]


def _evaluated(
    prepared: Prepared, problem: ShardingProblem, solution: Solution, known: list[Candidate]
) -> Candidate:
    """As `evaluate_choices`; choices that were evaluated before are not evaluated again."""
    for one in known:
        if one.solution.choices == solution.choices:
            return replace(one, solution=solution, bound_s=-math.inf, by_schedule=False)
    known.append(evaluate_choices(prepared, problem, solution))
    return known[-1]


@without_collector()
def evaluate_choices(prepared: Prepared, problem: ShardingProblem, solution: Solution) -> Candidate:
    """Puts a solution through the partitioner and prices what comes out."""
    constraints = value_constraints(problem, solution.choices)
    ins, outs = boundary_shardings(problem, solution.choices)
    partitioned = partition_constrained(
        prepared.program, prepared.graph, problem.mesh.shape, constraints, ins, outs
    )
    evaluation = evaluate_partitioned(
        prepared.graph, prepared.fusions, prepared.buffers, partitioned, problem.mesh
    )
    return Candidate(problem, solution, constraints, partitioned, evaluation, ins, outs)


def boundary_shardings(
    problem: ShardingProblem, choices: Sequence[int]
) -> tuple[tuple[DimAxes, ...], tuple[DimAxes, ...]]:
    """The shardings of main's arguments and results under a choice of strategies."""
    nodes = problem.node_graph
    names = tuple(problem.mesh.shape)

    def shardings(values: Sequence[int], of: Sequence[int]) -> tuple[DimAxes, ...]:
        return tuple(
            sharding_of(problem.strategies[node][choices[node]], nodes.whole_dims(value), names)
            for value, node in zip(values, of, strict=True)
        )

    return (
        shardings(nodes.graph.arguments, nodes.argument_nodes),
        shardings(nodes.graph.results, nodes.result_nodes),
    )
