"""Steps 4 and 5: the best plan over the logical meshes of a slice.

For each mesh the integer program is solved, its solution is put through the partitioner, and the
exact evaluation decides between meshes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwright.cost_models.memory import PeakMemory
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.collectives import DimAxes
from shardwright.planner.constraints import ValueConstraint, value_constraints
from shardwright.planner.evaluation import Evaluation, evaluate_partitioned
from shardwright.planner.fusion import FusionPlan, plan_fusions
from shardwright.planner.graph import OpGraph, build_graph
from shardwright.planner.liveness import Lifetime, lifetimes
from shardwright.planner.misfit import does_not_fit
from shardwright.planner.nodes import NodeGraph, build_nodes
from shardwright.planner.partitioned import Partitioned, partition
from shardwright.planner.problem import Fixed, ShardingProblem, build_problem, sharding_of
from shardwright.planner.program import Program
from shardwright.planner.skeleton import Skeleton, build_skeleton
from shardwright.planner.solver import Solution, solve

_HIDING_WEIGHTS = (0.05, 0.5, 1.0)
_MEMORY_ROUNDS = 3
_SEARCH_GAP = 2e-3
_FINAL_GAP = 1e-4
_LEAST_SECONDS = 2.0
_AN_AXIS_MORE = 4.0
"""How many times as long a mesh with more axes than any before is expected to take."""
_FIRST_MESH_SECONDS = 120.0
"""The first run on a machine compiles the solver's kernels, which takes seconds."""
_NOTICED = 1.02
"""By how much the two measures of memory must differ to solve again."""
_BINDING = 1.1
"""Memory counts as binding where the solution takes this close to its limit."""
_WORTH_A_MESH = 0.002
"""Meshes whose plans differ by less than this part of the step time count as equally fast."""


@dataclass(frozen=True)
class Prepared:
    """A program with everything that does not depend on the mesh."""

    program: Program
    graph: OpGraph = field(repr=False)
    nodes: NodeGraph = field(repr=False)
    fusions: FusionPlan = field(repr=False)
    buffers: tuple[Lifetime, ...] = field(repr=False)
    skeleton: Skeleton = field(repr=False)

    def problem(self, mesh: LogicalMesh, fixed: Fixed | None = None) -> ShardingProblem:
        """The sharding problem on a mesh."""
        return build_problem(self.nodes, self.fusions, self.buffers, mesh, fixed, self.skeleton)


@dataclass(frozen=True)
class Progress:
    """How far a search is: told to `on_progress`.

    Attributes:
      best_step_s: step time of the best plan so far, in seconds.
      gap: how far from the optimum of its mesh it is at most, as a part; None where not proven.
    """

    stage: str
    meshes_tried: int = 0
    meshes: int = 0
    best_step_s: float | None = None
    message: str = ""
    gap: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A solution on one mesh, partitioned and priced."""

    problem: ShardingProblem = field(repr=False)
    solution: Solution = field(repr=False)
    constraints: tuple[ValueConstraint, ...] = field(repr=False)
    partitioned: Partitioned = field(repr=False)
    evaluation: Evaluation = field(repr=False)
    in_shardings: tuple[DimAxes, ...] = field(repr=False)
    out_shardings: tuple[DimAxes, ...] = field(repr=False)


@dataclass(frozen=True)
class Misfit:
    """No plan on a mesh keeps within the memory: the least that was found.

    Attributes:
      proven: no sharding fits by the integer program; otherwise none was found in time.
    """

    least: PeakMemory
    proven: bool


@dataclass(frozen=True)
class Considered:
    """What became of one mesh."""

    mesh: LogicalMesh
    status: str
    step_s: float | None = None
    peak_bytes: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """The best candidate and every mesh that was considered."""

    best: Candidate
    considered: tuple[Considered, ...]


def prepare(program: Program) -> Prepared:
    """Builds the op graph of a program and everything else that no mesh changes."""
    graph = build_graph(program)
    nodes = build_nodes(graph)
    fusions = plan_fusions(nodes)
    buffers = lifetimes(nodes, fusions)
    skeleton = build_skeleton(nodes, fusions, buffers)
    return Prepared(program, graph, nodes, fusions, buffers, skeleton)


def search_meshes(
    prepared: Prepared,
    meshes: Sequence[LogicalMesh],
    memory_limit: float,
    *,
    fixed_on: Callable[[LogicalMesh], Fixed],
    time_limit_s: float,
    seed: int,
    on_progress: Callable[[Progress], None],
) -> SearchResult:
    """Plans a program on every mesh in turn, as far as the time limit lets it.

    The first mesh is always planned, however long it takes; the limit is for the others. A mesh is
    left out where meshes like it took longer than what is left.

    Raises:
      DoesNotFitError: no mesh has a plan within the memory limit.
    """
    deadline = time.monotonic() + time_limit_s
    best: Candidate | None = None
    considered: list[Considered] = []
    misfits: list[Misfit] = []
    took: dict[int, float] = {}
    for number, mesh in enumerate(meshes):
        began = time.monotonic()
        left = deadline - began
        axes = len(mesh.shape)
        likely = took.get(axes, _AN_AXIS_MORE * max(took.values(), default=0.0))
        if left < likely:
            considered.append(Considered(mesh, "not tried: out of time"))
            continue
        best_step = None if best is None else best.evaluation.step_s
        tried = Progress("search", number, len(meshes), best_step, mesh.describe(), _gap(best))
        on_progress(tried)
        outcome = solve_mesh(
            prepared,
            prepared.problem(mesh, fixed_on(mesh)),
            memory_limit,
            _FIRST_MESH_SECONDS if number == 0 else max(left, _LEAST_SECONDS),
            seed,
            _SEARCH_GAP,
        )
        took[axes] = max(took.get(axes, 0.0), time.monotonic() - began)
        if number == 0:
            deadline = time.monotonic() + time_limit_s
        if isinstance(outcome, Misfit):
            misfits.append(outcome)
            status = "does not fit" if outcome.proven else "no plan that fits found in time"
            considered.append(Considered(mesh, status, None, outcome.least.bytes))
            continue
        evaluation = outcome.evaluation
        considered.append(Considered(mesh, "planned", evaluation.step_s, evaluation.peak.bytes))
        # Meshes come simplest first; a later one must be worth it.
        if best_step is None or evaluation.step_s < best_step * (1 - _WORTH_A_MESH):
            best = outcome
    if best is None:
        least = min((misfit.least for misfit in misfits), key=lambda peak: peak.bytes)
        proven = len(misfits) == len(meshes) and all(misfit.proven for misfit in misfits)
        name, on = prepared.program.name, meshes[0].slice
        raise does_not_fit(name, on, memory_limit, least, proven=proven)
    best_step = best.evaluation.step_s
    on_progress(Progress("polish", len(meshes), len(meshes), best_step, gap=_gap(best)))
    left = max(deadline - time.monotonic(), _LEAST_SECONDS)
    polished = solve_mesh(
        prepared,
        best.problem,
        memory_limit,
        left,
        seed,
        _FINAL_GAP,
        warm=[best.solution.choices],
    )
    if isinstance(polished, Candidate) and polished.evaluation.step_s <= best.evaluation.step_s:
        best = polished
        evaluation = best.evaluation
        considered = [
            Considered(c.mesh, c.status, evaluation.step_s, evaluation.peak.bytes)
            if c.mesh is best.problem.mesh
            else c
            for c in considered
        ]
    return SearchResult(best, tuple(considered))


def _gap(best: Candidate | None) -> float | None:
    gap = math.inf if best is None else best.solution.gap
    return gap if math.isfinite(gap) else None


def solve_mesh(
    prepared: Prepared,
    problem: ShardingProblem,
    memory_limit: float,
    time_limit_s: float,
    seed: int,
    gap: float,
    warm: Sequence[tuple[int, ...]] = (),
) -> Candidate | Misfit:
    """The best candidate on one mesh, or the least memory found where none fits.

    The integer program knows memory and overlap only nearly. Where its memory differs from the
    exact evaluation's, it is solved again with its limit moved by the difference; where gathers
    last longer than the compute that they hide behind, they are weighed more.
    """
    deadline = time.monotonic() + time_limit_s
    best: Candidate | None = None
    least: PeakMemory | None = None
    proven = False
    for weight in _HIDING_WEIGHTS:
        limit = memory_limit
        for _ in range(_MEMORY_ROUNDS):
            solution = solve(
                problem.weighed(weight, limit),
                time_limit_s=max(_LEAST_SECONDS, deadline - time.monotonic()),
                seed=seed,
                gap=gap,
                warm_starts=warm,
            )
            candidate = evaluate_choices(prepared, problem, solution)
            peak = candidate.evaluation.peak
            proven = solution.bound == float("inf")
            for found in (peak, problem.peak_memory(solution.choices)):
                if found.bytes > memory_limit and (least is None or found.bytes < least.bytes):
                    least = found
            if peak.bytes <= memory_limit and (
                best is None or candidate.evaluation.step_s < best.evaluation.step_s
            ):
                best = candidate
            moved = memory_limit + solution.peak - peak.bytes
            too_strict = moved > limit * _NOTICED and solution.peak > limit / _BINDING
            if (not too_strict and peak.bytes <= memory_limit) or moved <= 0:
                break
            limit = moved
        compute, gathers, _ = problem.seconds(solution.choices)
        if best is None or gathers <= compute:
            break
    if best is not None:
        return best
    return Misfit(least or peak, proven)


def evaluate_choices(prepared: Prepared, problem: ShardingProblem, solution: Solution) -> Candidate:
    """Puts a solution through the partitioner and prices what comes out."""
    constraints = value_constraints(problem, solution.choices)
    ins, outs = boundary_shardings(problem, solution.choices)
    partitioned = partition(
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
