"""Steps 4 and 5: the best plan over the logical meshes of a slice.

For each mesh the integer program is solved, its solution is put through the partitioner, and the
exact evaluation decides between meshes. A mesh whose bound shows that it cannot be worth it is
neither solved to the end nor evaluated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from shardwright.cost_models.memory import PeakMemory
from shardwright.extensions import load_extensions
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.collectives import DimAxes
from shardwright.planner.constraints import ValueConstraint, value_constraints
from shardwright.planner.evaluation import Evaluation, evaluate_partitioned
from shardwright.planner.fusion import FusionPlan, plan_fusions
from shardwright.planner.graph import OpGraph
from shardwright.planner.graph_reader import build_graph
from shardwright.planner.liveness import Lifetime, lifetimes
from shardwright.planner.mesh_order import GoodMeshes, aligned_first
from shardwright.planner.misfit import does_not_fit, even_share
from shardwright.planner.named_layout import NamedLayout, tie_names
from shardwright.planner.nodes import NodeGraph, build_nodes
from shardwright.planner.partitioned import Partitioned, partition
from shardwright.planner.problem import Fixed, ShardingProblem, build_problem, sharding_of
from shardwright.planner.program import Program
from shardwright.planner.repeats import alike_nodes
from shardwright.planner.skeleton import Skeleton, build_skeleton
from shardwright.planner.solver import Solution
from shardwright.planner.tied import solve_weighed

_LEAST_WEIGHT = 1e-3
"""Of gathers against the compute that they hide behind: among plans of equal steps, that with less
to gather is taken, and a bound of the integer program is at most this much below the step."""
_HIDING_WEIGHTS = (0.05, 0.3, 1.0)
_MEMORY_ROUNDS = 3
_SEARCH_GAP = 1e-3
_FINAL_GAP = 1e-4
_LARGE_GAP = 2e-3
"""For programs too large to solve as they are."""
_LEAST_SECONDS = 2.0
_AN_AXIS_MORE = 4.0
"""How many times as long a mesh with more axes than any before is expected to take."""
_FIRST_MESH_SECONDS = 120.0
"""The first run on a machine compiles the solver's kernels, which takes seconds."""
_NOT_TRIED = "not tried"
_NOTICED = 1.02
"""By how much the two measures of memory must differ to solve again."""
_BINDING = 1.1
"""Memory counts as binding where the solution takes this close to its limit."""
_WORTH_A_MESH = 0.002
"""Meshes whose plans differ by less than this part of the step time count as equally fast."""
_MOST_NODES = 1000
"""Above this many nodes, repeated layers are tied."""
_EVALUATED = 3
"""Meshes of a large program whose plans are evaluated where the first ones do not fit."""
_KEPT = 4
"""Plans kept besides the best."""


@dataclass(frozen=True)
class Prepared:
    """A program with everything that does not depend on the mesh."""

    program: Program
    graph: OpGraph = field(repr=False)
    nodes: NodeGraph = field(repr=False)
    fusions: FusionPlan = field(repr=False)
    buffers: tuple[Lifetime, ...] = field(repr=False)
    skeleton: Skeleton = field(repr=False)
    alike: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict, repr=False)
    layout: NamedLayout | None = field(default=None, repr=False)

    def problem(self, mesh: LogicalMesh, fixed: Fixed | None = None) -> ShardingProblem:
        """The sharding problem on a mesh; in a large program the nodes of alike layers are tied."""
        problem = build_problem(self.nodes, self.fusions, self.buffers, mesh, fixed, self.skeleton)
        if self.large:
            key = tuple(sorted((fixed or {}).items()))
            if key not in self.alike:
                self.alike[key] = alike_nodes(self.skeleton, fixed or {})
            problem = replace(problem, alike=self.alike[key])
        return problem if self.layout is None else tie_names(problem, self.layout)

    @property
    def large(self) -> bool:
        """Whether the program is too large to solve as it is, and to partition for every mesh."""
        return len(self.skeleton.kind_of) > _MOST_NODES


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
    """A solution on one mesh, partitioned and priced.

    Attributes:
      bound_s: no plan on the mesh takes less by the integer program; -inf where nothing is proven.
    """

    problem: ShardingProblem = field(repr=False)
    solution: Solution = field(repr=False)
    constraints: tuple[ValueConstraint, ...] = field(repr=False)
    partitioned: Partitioned = field(repr=False)
    evaluation: Evaluation = field(repr=False)
    in_shardings: tuple[DimAxes, ...] = field(repr=False)
    out_shardings: tuple[DimAxes, ...] = field(repr=False)
    bound_s: float = -math.inf


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


@dataclass(frozen=True)
class Considered:
    """What became of one mesh."""

    mesh: LogicalMesh
    status: str
    step_s: float | None = None
    peak_bytes: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """The best candidate, every mesh that was considered, and the best plans on other meshes."""

    best: Candidate
    considered: tuple[Considered, ...]
    others: tuple[Candidate, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Outdone:
    """A search that found nothing below its cutoff.

    Attributes:
      bound_s: no plan on the meshes that were tried takes less; inf where none fits.
    """

    considered: tuple[Considered, ...]
    bound_s: float


def prepare(program: Program) -> Prepared:
    """Builds the op graph of a program and everything else that no mesh changes."""
    load_extensions()
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
    ruled out where a bound proves that no plan on it is worth more than the best so far, and left
    out where meshes like it took longer than what is left. Meshes that split an axis of a good one
    come before others with as many axes.

    Raises:
      DoesNotFitError: no mesh has a plan within the memory limit.
    """
    search = _Search(prepared, meshes, memory_limit, fixed_on, time_limit_s, seed, on_progress)
    found = search.run()
    assert isinstance(found, SearchResult)  # nothing was to be undercut
    return found


def search_below(
    cutoff_s: float,
    prepared: Prepared,
    meshes: Sequence[LogicalMesh],
    memory_limit: float,
    *,
    fixed_on: Callable[[LogicalMesh], Fixed],
    time_limit_s: float,
    seed: int,
    on_progress: Callable[[Progress], None],
    first_mesh_s: float = _FIRST_MESH_SECONDS,
) -> SearchResult | Outdone:
    """As `search_meshes`, for plans that take less than another form of the program does.

    Args:
      cutoff_s: seconds of a step; a mesh on which no plan takes less is ruled out.
      first_mesh_s: the most seconds that the first mesh may take.

    Raises:
      DoesNotFitError: no mesh has a plan within the memory limit, and there is no cutoff.
    """
    search = _Search(prepared, meshes, memory_limit, fixed_on, time_limit_s, seed, on_progress)
    return search.run(cutoff_s, first_mesh_s)


class _Search:
    """One search over meshes."""

    def __init__(
        self,
        prepared: Prepared,
        meshes: Sequence[LogicalMesh],
        memory_limit: float,
        fixed_on: Callable[[LogicalMesh], Fixed],
        time_limit_s: float,
        seed: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._prepared = prepared
        self._meshes = meshes
        self._limit = memory_limit
        self._fixed_on = fixed_on
        self._seconds = time_limit_s
        self._deadline = time.monotonic() + time_limit_s
        self._seed = seed
        self._on_progress = on_progress
        self._found: list[Candidate] = []
        self._estimates: list[Estimate] = []
        self._best: Candidate | None = None
        self._considered: dict[LogicalMesh, Considered] = {}
        self._misfits: list[Misfit] = []
        self._took: dict[int, float] = {}
        self._good = GoodMeshes()
        self._cutoff = math.inf
        self._bounds: list[float] = []
        self._first_seconds = _FIRST_MESH_SECONDS

    def run(
        self, cutoff_s: float = math.inf, first_mesh_s: float = _FIRST_MESH_SECONDS
    ) -> SearchResult | Outdone:
        """Tries the meshes in turn; arguments as of `search_below`."""
        self._cutoff, self._first_seconds = cutoff_s, first_mesh_s
        left = aligned_first(self._meshes, self._prepared.skeleton.kinds)
        while left:
            mesh = self._good.next_of(left)
            left.remove(mesh)
            self._try(mesh)
        if self._prepared.large:
            self._evaluate_estimates()
        if self._best is None:
            if math.isinf(self._cutoff):
                self._raise_misfit()
            considered = tuple(self._considered[mesh] for mesh in self._meshes)
            return Outdone(considered, min(self._bounds, default=math.inf))
        if not self._prepared.large:
            self._polish()
        assert self._best is not None
        best = self._best
        others = sorted(
            (c for c in self._found if c.problem.mesh is not best.problem.mesh),
            key=lambda c: c.evaluation.step_s,
        )
        considered = tuple(self._considered[mesh] for mesh in self._meshes)
        return SearchResult(best, considered, tuple(others[:_KEPT]))

    def _try(self, mesh: LogicalMesh) -> None:
        first = not self._considered
        began = time.monotonic()
        axes = len(mesh.shape)
        likely = self._took.get(axes, _AN_AXIS_MORE * max(self._took.values(), default=0.0))
        if not first and self._deadline - began < likely:
            self._note(Considered(mesh, f"{_NOT_TRIED}: out of time"))
            return
        self._report("search", mesh.describe())
        cutoff = self._worth_less_than(by_program=True)
        problem = self._prepared.problem(mesh, self._fixed_on(mesh))
        seconds = self._first_seconds if first else max(self._deadline - began, _LEAST_SECONDS)
        outcome: Candidate | Estimate | Misfit | RuledOut
        if self._prepared.large:
            outcome = estimate_mesh(
                problem, self._limit, seconds, self._seed, _LARGE_GAP, cutoff=cutoff
            )
        else:
            outcome = solve_mesh(
                self._prepared,
                problem,
                self._limit,
                seconds,
                self._seed,
                _SEARCH_GAP,
                cutoff=cutoff,
            )
        self._took[axes] = time.monotonic() - began
        if first:
            self._deadline = time.monotonic() + self._seconds
        if isinstance(outcome, RuledOut):
            self._bounds.append(outcome.bound_s)
            if math.isinf(outcome.bound_s):
                self._note(Considered(mesh, "does not fit"))
                return
            tied = " with alike layers sharded alike" if self._prepared.large else ""
            status = f"ruled out: no plan on it{tied} takes less than {outcome.bound_s:.4g} s"
            self._note(Considered(mesh, status))
            self._report("search", f"{mesh.describe()}: {status}")
            self._good.note(mesh, outcome.bound_s)
        elif isinstance(outcome, Misfit):
            self._misfits.append(outcome)
            status = "does not fit" if outcome.proven else "no plan that fits found in time"
            self._note(Considered(mesh, status, None, outcome.least.bytes))
        elif isinstance(outcome, Estimate):
            self._note(Considered(mesh, "estimated", outcome.step_s, outcome.solution.peak))
            self._good.note(mesh, outcome.step_s)
            self._estimates.append(outcome)
        else:
            evaluation = outcome.evaluation
            self._note(Considered(mesh, "planned", evaluation.step_s, evaluation.peak.bytes))
            self._good.note(mesh, evaluation.step_s)
            self._found.append(outcome)
            if evaluation.step_s < self._worth_less_than():
                self._best = outcome
            else:
                self._bounds.append(outcome.bound_s)

    def _worth_less_than(self, *, by_program: bool = False) -> float:
        """The step time that a mesh must beat; meshes come simplest first.

        Args:
          by_program: what the integer program must beat, where it knows the best plan as faster
            than the evaluation does: bounds are compared with what they bound.
        """
        steps = [estimate.step_s for estimate in self._estimates]
        best = self._best
        if best is not None:
            steps.append(best.evaluation.step_s)
            if by_program:
                steps.append(best.problem.step_seconds(best.solution.choices))
        return min(min(steps, default=math.inf) * (1 - _WORTH_A_MESH), self._cutoff)

    def _evaluate_estimates(self) -> None:
        """Evaluates the best estimate that fits; alike layers may then differ."""
        for estimate in sorted(self._estimates, key=lambda e: e.step_s)[:_EVALUATED]:
            mesh = estimate.problem.mesh
            self._report("polish", mesh.describe())
            outcome = solve_mesh(
                self._prepared,
                estimate.problem,
                self._limit,
                max(self._deadline - time.monotonic(), _LEAST_SECONDS),
                self._seed,
                _LARGE_GAP,
                estimated=estimate,
            )
            if isinstance(outcome, Candidate):
                evaluation = outcome.evaluation
                self._note(Considered(mesh, "planned", evaluation.step_s, evaluation.peak.bytes))
                self._found.append(outcome)
                self._best = outcome
                return
            if isinstance(outcome, Misfit):
                self._misfits.append(outcome)
                status = "no plan that fits found in time"
                self._note(Considered(mesh, status, None, outcome.least.bytes))

    def _note(self, considered: Considered) -> None:
        self._considered[considered.mesh] = considered

    def _report(self, stage: str, message: str = "") -> None:
        best = self._best
        step = None if best is None else best.evaluation.step_s
        gap = None if best is None or math.isinf(best.solution.gap) else best.solution.gap
        tried = sum(not c.status.startswith(_NOT_TRIED) for c in self._considered.values())
        self._on_progress(Progress(stage, tried, len(self._meshes), step, message, gap))

    def _raise_misfit(self) -> NoReturn:
        misfits = self._misfits
        least = min((misfit.least for misfit in misfits), key=lambda peak: peak.bytes)
        proven = len(misfits) == len(self._meshes) and all(misfit.proven for misfit in misfits)
        program, on = self._prepared.program, self._meshes[0].slice
        raise does_not_fit(
            program.name,
            on,
            self._limit,
            least,
            even_share(self._prepared.graph, self._prepared.buffers, on.devices),
            proven=proven,
            untried=sum(c.status.startswith(_NOT_TRIED) for c in self._considered.values()),
        )

    def _polish(self) -> None:
        """Solves the best mesh to a smaller gap."""
        best = self._best
        assert best is not None
        self._report("polish")
        polished = solve_mesh(
            self._prepared,
            best.problem,
            self._limit,
            max(self._deadline - time.monotonic(), _LEAST_SECONDS),
            self._seed,
            _FINAL_GAP,
            warm=[best.solution.choices],
        )
        if not isinstance(polished, Candidate):
            return
        if polished.evaluation.step_s <= best.evaluation.step_s:
            self._best = polished
            evaluation = polished.evaluation
            mesh = polished.problem.mesh
            self._note(Considered(mesh, "planned", evaluation.step_s, evaluation.peak.bytes))


def solve_mesh(
    prepared: Prepared,
    problem: ShardingProblem,
    memory_limit: float,
    time_limit_s: float,
    seed: int,
    gap: float,
    warm: Sequence[tuple[int, ...]] = (),
    cutoff: float = math.inf,
    estimated: Estimate | None = None,
) -> Candidate | Misfit | RuledOut:
    """The best candidate on one mesh, or the least memory found where none fits.

    The integer program knows memory and overlap only nearly. Where its memory differs from the
    exact evaluation's, it is solved again with its limit moved by the difference; where the
    gathers of a loop last longer than the compute that they hide behind, they are weighed more.

    Args:
      cutoff: seconds of a step; a mesh on which no plan takes less is ruled out.
      estimated: what to begin with; the nodes of alike layers may then choose differently.
    """
    deadline = time.monotonic() + time_limit_s
    best: Candidate | None = None
    least: PeakMemory | None = None
    proven = False
    bound = -math.inf
    weights = dict.fromkeys(problem.loops, _LEAST_WEIGHT)
    if estimated is not None:
        weights, warm = dict(estimated.weights), [estimated.solution.choices]
    for weight in _HIDING_WEIGHTS:
        limit = memory_limit
        for _ in range(_MEMORY_ROUNDS):
            solution = solve_weighed(
                problem,
                weights,
                limit,
                time_limit_s=max(_LEAST_SECONDS, deadline - time.monotonic()),
                seed=seed,
                gap=gap,
                cutoff=cutoff,
                warm_starts=warm,
                untie=estimated is not None,
            )
            if limit >= memory_limit:
                # For any weights, what the integer program cannot undercut, no step can.
                bound = max(bound, problem.step_bound(solution.bound))
            if solution.status == "cut off":
                if best is not None:
                    return replace(best, bound_s=bound)
                return RuledOut(problem.step_bound(solution.bound))
            candidate = evaluate_choices(prepared, problem, solution)
            peak = candidate.evaluation.peak
            # With a moved limit it is proven of that limit only.
            proven = proven or (limit >= memory_limit and math.isinf(solution.bound))
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
        longer = _gathering_longest(problem, solution)
        if best is None or not longer or estimated is not None:
            break
        weights.update(dict.fromkeys(longer, weight))
    if best is not None:
        return replace(best, bound_s=bound)
    return Misfit(least or peak, proven)


def estimate_mesh(
    problem: ShardingProblem,
    memory_limit: float,
    time_limit_s: float,
    seed: int,
    gap: float,
    cutoff: float = math.inf,
) -> Estimate | Misfit | RuledOut:
    """The best solution on one mesh by the integer program alone; otherwise as `solve_mesh`."""
    deadline = time.monotonic() + time_limit_s
    best: Estimate | None = None
    weights = dict.fromkeys(problem.loops, _LEAST_WEIGHT)
    for weight in _HIDING_WEIGHTS:
        solution = solve_weighed(
            problem,
            weights,
            memory_limit,
            time_limit_s=max(_LEAST_SECONDS, deadline - time.monotonic()),
            seed=seed,
            gap=gap,
            cutoff=cutoff,
            warm_starts=(),
            untie=False,
        )
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


def _gathering_longest(problem: ShardingProblem, solution: Solution) -> list[int]:
    """The loops whose gathers last longer than the compute that they can hide behind."""
    compute, gathers, _ = problem.seconds_by_loop(solution.choices)
    return [loop for loop, seconds in gathers.items() if seconds > compute.get(loop, 0.0)]


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
