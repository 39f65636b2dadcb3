"""Steps 4 and 5: the best plan over the logical meshes of a slice.

For each mesh the integer program is solved, its solution is put through the partitioner, and the
exact evaluation decides between meshes. A mesh whose bound shows that it cannot be worth it is
neither solved to the end nor evaluated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn

from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.mesh_order import GoodMeshes, aligned_first
from shardwright.planner.mesh_solution import (
    LEAST_SECONDS,
    Candidate,
    Estimate,
    Misfit,
    RuledOut,
    estimate_mesh,
    solve_mesh,
)
from shardwright.planner.misfit import argument_facts, does_not_fit, even_share
from shardwright.planner.prepared import Prepared
from shardwright.planner.problem import Fixed

_SEARCH_GAP = 1e-3
_FINAL_GAP = 1e-4
_LARGE_GAP = 2e-3
"""For programs too large to solve as they are."""
_AN_AXIS_MORE = 4.0
"""How many times as long a mesh with more axes than any before is expected to take."""
_FIRST_MESH_SECONDS = 120.0
"""The first run on a machine compiles the solver's kernels, which takes seconds."""
_NOT_TRIED = "not tried"
_WORTH_A_MESH = 0.002
"""Meshes whose plans differ by less than this part of the step time count as equally fast."""
_EVALUATED = 3
"""Meshes of a large program whose plans are evaluated where the first ones do not fit."""
_KEPT = 4
"""Plans kept besides the best."""


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
    found = search_below(
        math.inf,
        prepared,
        meshes,
        memory_limit,
        fixed_on=fixed_on,
        time_limit_s=time_limit_s,
        seed=seed,
        on_progress=on_progress,
    )
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
        self._fixed_on = lru_cache(maxsize=None)(fixed_on)
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
        self._quick: dict[LogicalMesh, float] = {}
        self._first_seconds = _FIRST_MESH_SECONDS

    def run(self, cutoff_s: float, first_mesh_s: float) -> SearchResult | Outdone:
        """Tries the meshes in turn; arguments as of `search_below`."""
        self._cutoff, self._first_seconds = cutoff_s, first_mesh_s
        self._prepared.expect((mesh, self._fixed_on(mesh)) for mesh in self._meshes)
        left = aligned_first(self._meshes, self._prepared.skeleton.kinds)
        if self._prepared.large:
            left = self._most_promising_first(left)
        while left:
            mesh = left[0] if self._prepared.large else self._good.next_of(left)
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

    def _most_promising_first(self, meshes: Sequence[LogicalMesh]) -> list[LogicalMesh]:
        """The meshes by what no plan on them takes less than, simpler ones first among equals.

        For large programs, which take long to solve on a mesh and a moment to bound.
        """
        for mesh in meshes:
            if time.monotonic() > self._deadline:
                break
            self._report("search", mesh.describe())
            self._quick[mesh] = self._prepared.quick_bound(mesh, self._fixed_on(mesh), math.inf)

        def promise(mesh: LogicalMesh) -> float:
            return self._quick.get(mesh, math.inf) * (1 + _WORTH_A_MESH) ** len(mesh.axes)

        return sorted(meshes, key=promise)

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
        seconds = self._first_seconds if first else max(self._deadline - began, LEAST_SECONDS)
        outcome = self._outcome(mesh, seconds, cutoff)
        if first:
            # What it took tells little: the first run on a machine compiles the solver's kernels.
            self._deadline = time.monotonic() + self._seconds
        else:
            self._took[axes] = time.monotonic() - began
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

    def _outcome(
        self, mesh: LogicalMesh, seconds: float, cutoff: float
    ) -> Candidate | Estimate | Misfit | RuledOut:
        fixed = self._fixed_on(mesh)
        if not math.isinf(cutoff):
            bound = self._quick.get(mesh)
            if bound is None:
                bound = self._prepared.quick_bound(mesh, fixed, cutoff)
            if bound >= cutoff:
                return RuledOut(bound)
        problem = self._prepared.problem(mesh, fixed)
        if self._prepared.large:
            return estimate_mesh(
                problem, self._limit, seconds, self._seed, _LARGE_GAP, cutoff=cutoff
            )
        return solve_mesh(
            self._prepared, problem, self._limit, seconds, self._seed, _SEARCH_GAP, cutoff=cutoff
        )

    def _worth_less_than(self, *, by_program: bool = False) -> float:
        """The step time that a mesh must beat; meshes come simplest first.

        Args:
          by_program: what the integer program must beat: its own price of the best plan, since
            bounds are its own too. Where it prices all plans high, they would rule out better ones.
        """
        steps = [estimate.step_s for estimate in self._estimates]
        best = self._best
        if best is not None:
            program_s = best.problem.step_seconds(best.solution.choices)
            steps.append(program_s if by_program else best.evaluation.step_s)
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
                max(self._deadline - time.monotonic(), LEAST_SECONDS),
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
            arguments=argument_facts(self._prepared.graph, on.devices),
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
            max(self._deadline - time.monotonic(), LEAST_SECONDS),
            self._seed,
            _FINAL_GAP,
            begin=best,
        )
        if not isinstance(polished, Candidate):
            return
        if polished.evaluation.step_s <= best.evaluation.step_s:
            self._best = polished
            evaluation = polished.evaluation
            mesh = polished.problem.mesh
            self._note(Considered(mesh, "planned", evaluation.step_s, evaluation.peak.bytes))
