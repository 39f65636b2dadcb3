"""One step in several forms, planned together: rematerialisation, microbatches, state types.

Forms that do the same work differ in time and memory, and which of them is best depends on how they
are sharded. So they are searched together with the meshes, and a form is left as soon as a bound
shows that no plan of it takes less than the best so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.errors import DoesNotFitError, InputError
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.flops import matrix_flops
from shardwright.planner.plan_schema import VariantModel
from shardwright.planner.prepared import Prepared
from shardwright.planner.problem import Fixed
from shardwright.planner.program import Program
from shardwright.planner.search import (
    Considered,
    Outdone,
    Progress,
    SearchResult,
    search_below,
    search_meshes,
)

_WORTH_A_VARIANT = 0.002
"""A form counts as faster than an earlier one by this part of the step, as meshes do."""
_MISFIT_SECONDS = 5.0
"""For finding out how little memory a form needs that does not fit."""
_KEPT = 4


@dataclass(frozen=True)
class Variant:
    """One form of a step.

    Attributes:
      fn: a function of `args`, or a `Program`.
      args: arrays or `jax.ShapeDtypeStruct`s, any pytrees.
      donate_argnums: as for `plan`; those given there where None.
      model_flops: as for `plan`; those given there where None.
      tokens_per_step: of this form. Where all forms tell them, the least time a token is best,
        otherwise the least time a step.
      options: what makes this form, to be told with the plan.
    """

    fn: Callable[..., Any] | Program
    args: Sequence[Any] = ()
    donate_argnums: int | Sequence[int] | None = None
    model_flops: float | None = None
    tokens_per_step: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


Variants = Mapping[str, Variant | Program | tuple[Any, ...]]
"""Name -> a variant, a program, or (function, argument, ...)."""


def checked_variants(given: Variants) -> dict[str, Variant]:
    """The variants in one form.

    Raises:
      InputError: there are none, or one is neither variant, program nor (function, argument, ...).
    """
    if not isinstance(given, Mapping) or not given:
        raise InputError(
            "the variants are not a mapping of names, or it is empty",
            where="variants",
            do='Give {"name": (fn, *args), ...}, or Variants or Programs for the tuples',
        )
    found = {}
    for name, one in given.items():
        if isinstance(one, Program):
            one = Variant(one)
        elif isinstance(one, tuple) and one and callable(one[0]):
            one = Variant(one[0], one[1:])
        if not isinstance(name, str) or not name or not isinstance(one, Variant):
            raise InputError(
                f"{one!r:.60} is no form of a step, or {name!r} no name",
                where=f"variants[{name!r}]",
                do="Give a text and (fn, *args), a Variant or a Program",
            )
        found[name] = one
    return found


@dataclass(frozen=True)
class Form:
    """A variant that is ready to be searched.

    Attributes:
      meshes: to be tried, most plausible first.
      tokens: work of one step, by which step times are compared; the same for all forms where they
        are compared by step.
    """

    name: str
    prepared: Prepared = field(repr=False)
    meshes: Sequence[LogicalMesh] = field(repr=False)
    fixed_on: Callable[[LogicalMesh], Fixed] = field(repr=False)
    tokens: float = 1.0

    @property
    def least_s(self) -> float:
        """No plan takes less: its matrix products at the peak of the slice."""
        on = self.meshes[0].slice
        peak = on.chip.device_peak_flops("bf16") * on.devices
        return matrix_flops(self.prepared.graph) / peak


@dataclass(frozen=True)
class ChosenForm:
    """The best plan of the best form, and what became of every form, in the order given."""

    name: str
    found: SearchResult = field(repr=False)
    outcomes: tuple[VariantModel, ...]
    others: tuple[tuple[str, SearchResult], ...] = field(default=(), repr=False)
    """The other forms that were planned, the best first."""


def search_variants(
    forms: Sequence[Form],
    memory_limit: float,
    *,
    time_limit_s: float,
    seed: int,
    on_progress: Callable[[Progress], None],
) -> ChosenForm:
    """The best plan over forms and meshes.

    Every form is planned on its first mesh, those with the least FLOPs first, as far as it can be
    better than the best so far. The best of them is then searched as if it were alone, and the
    others on the meshes that suit it best, then on all.

    Args:
      time_limit_s: seconds for the meshes of the best form, and as many again for those of the
        others, after the first mesh of each.

    Raises:
      DoesNotFitError: no form has a plan within the memory limit.
    """
    search = _Search(forms, memory_limit, time_limit_s, seed, on_progress)
    return search.run()


@dataclass
class _Run:
    """How far the search of one form is."""

    form: Form
    considered: dict[LogicalMesh, Considered] = field(default_factory=dict)
    plans: list[SearchResult] = field(default_factory=list)
    bound_s: float = math.inf
    by_flops: bool = False
    misfit: DoesNotFitError | None = None

    @property
    def best_s(self) -> float:
        """Seconds of its best plan so far."""
        return min((found.best.evaluation.step_s for found in self.plans), default=math.inf)

    @property
    def open(self) -> bool:
        """Whether more meshes may give a plan that is worth it."""
        return not self.by_flops and len(self.considered) < len(self.form.meshes)

    def note(self, found: SearchResult | Outdone) -> None:
        """Takes up what a search found."""
        for one in found.considered:
            known = self.considered.get(one.mesh)
            # A mesh may be planned again, and worse.
            if known is None or (one.step_s or math.inf) <= (known.step_s or math.inf):
                self.considered[one.mesh] = one
        if isinstance(found, SearchResult):
            self.plans.append(found)
        else:
            self.bound_s = min(self.bound_s, found.bound_s)

    def result(self) -> SearchResult:
        """Everything that was found, as one search."""
        first = min(self.plans, key=lambda found: found.best.evaluation.step_s)
        others = {
            one.problem.mesh: one for found in self.plans for one in (*found.others, found.best)
        }
        others.pop(first.best.problem.mesh)
        ranked = sorted(others.values(), key=lambda one: one.evaluation.step_s)
        considered = tuple(
            self.considered.get(mesh) or Considered(mesh, "not tried: out of time")
            for mesh in self.form.meshes
        )
        return replace(first, considered=considered, others=tuple(ranked[:_KEPT]))


class _Search:
    """One search over forms and meshes."""

    def __init__(
        self,
        forms: Sequence[Form],
        memory_limit: float,
        time_limit_s: float,
        seed: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._in_order = [_Run(form) for form in forms]
        self._runs = sorted(self._in_order, key=lambda run: run.form.least_s / run.form.tokens)
        self._limit = memory_limit
        self._seconds = time_limit_s
        self._seed = seed
        self._report = on_progress

    def run(self) -> ChosenForm:
        for run in self._runs:
            self._on_first_mesh(run)
        if self._best() is None:
            self._find_one_that_fits()
        best = self._best()
        if best is None:
            raise self._misfit()
        self._on_all_meshes(best)
        self._others(best)
        best = self._best()
        assert best is not None
        others = sorted(
            (run for run in self._runs if run.plans and run is not best),
            key=lambda run: run.best_s / run.form.tokens,
        )
        return ChosenForm(
            best.form.name,
            best.result(),
            tuple(self._outcome(run, best) for run in self._in_order),
            tuple((run.form.name, run.result()) for run in others),
        )

    def _best(self) -> _Run | None:
        planned = [run for run in self._runs if run.plans]
        return min(planned, key=lambda run: run.best_s / run.form.tokens, default=None)

    def _cutoff(self, run: _Run) -> float:
        """Seconds of a step that a form must undercut.

        Bounds are of the integer program, which may know the best plan as slower than the exact
        evaluation does: then they are compared with what it knows.
        """
        best = self._best()
        if best is None:
            return math.inf
        plan = min((found.best for found in best.plans), key=lambda one: one.evaluation.step_s)
        known = plan.problem.step_seconds(plan.solution.choices)
        worth = 1.0 if best is run else 1 - _WORTH_A_VARIANT
        return max(best.best_s, known) / best.form.tokens * run.form.tokens * worth

    def _below(self, run: _Run, meshes: Sequence[LogicalMesh], seconds: float) -> None:
        found = search_below(
            self._cutoff(run),
            run.form.prepared,
            meshes,
            self._limit,
            fixed_on=run.form.fixed_on,
            time_limit_s=seconds,
            seed=self._seed,
            on_progress=self._telling(run),
            first_mesh_s=seconds,
        )
        run.note(found)

    def _telling(self, run: _Run) -> Callable[[Progress], None]:
        def tell(progress: Progress) -> None:
            best = self._best()
            step = progress.best_step_s if best is None else best.best_s
            self._report(
                replace(
                    progress,
                    message=f"{run.form.name}: {progress.message}".removesuffix(": "),
                    best_step_s=step,
                )
            )

        return tell

    def _on_first_mesh(self, run: _Run) -> None:
        cutoff = self._cutoff(run)
        if run.form.least_s >= cutoff:
            run.by_flops, run.bound_s = True, run.form.least_s
            return
        first = run.form.meshes[:1]
        try:
            if math.isfinite(cutoff):
                self._below(run, first, max(self._seconds, _MISFIT_SECONDS))
            # Without a cutoff, what does not fit is told by how much.
            if not run.plans and math.isinf(run.bound_s):
                run.note(self._alone(run, first, _MISFIT_SECONDS))
        except DoesNotFitError as error:
            run.misfit = error
            run.considered[first[0]] = Considered(first[0], "does not fit", None, error.least_bytes)

    def _alone(self, run: _Run, meshes: Sequence[LogicalMesh], seconds: float) -> SearchResult:
        return search_meshes(
            run.form.prepared,
            meshes,
            self._limit,
            fixed_on=run.form.fixed_on,
            time_limit_s=seconds,
            seed=self._seed,
            on_progress=self._telling(run),
        )

    def _on_all_meshes(self, run: _Run) -> None:
        if run.open:
            run.note(self._alone(run, run.form.meshes, self._seconds))

    def _find_one_that_fits(self) -> None:
        """Where no form fits on its first mesh: on others, those that miss by least first."""
        for run in sorted(self._runs, key=lambda run: _least_bytes(run.misfit)):
            try:
                self._on_all_meshes(run)
            except DoesNotFitError as error:
                run.misfit = min(error, run.misfit or error, key=_least_bytes)
            else:
                return

    def _misfit(self) -> DoesNotFitError:
        run = min(self._runs, key=lambda run: _least_bytes(run.misfit))
        assert run.misfit is not None
        error = run.misfit
        return DoesNotFitError(
            f"none of {len(self._runs)} variants fits, and least memory is needed by "
            f"{run.form.name}: {error.what}",
            where=error.where,
            do=error.do,
            least_bytes=error.least_bytes,
            limit_bytes=error.limit_bytes,
        )

    def _others(self, best: _Run) -> None:
        """Tries every other form on the other meshes, those that suit the best form first."""
        steps = {one.mesh: one.step_s for one in best.considered.values() if one.step_s}
        suiting = sorted(steps, key=lambda mesh: steps[mesh])
        deadline = time.monotonic() + self._seconds
        others = sorted(
            (run for run in self._runs if run is not best),
            key=lambda run: min(run.bound_s, run.best_s) / run.form.tokens,
        )
        places = {
            id(run): sorted(
                run.form.meshes,
                key=lambda mesh: suiting.index(mesh) if mesh in steps else len(suiting),
            )
            for run in others
        }
        for place in range(max((len(run.form.meshes) for run in others), default=0)):
            for run in others:
                meshes = places[id(run)]
                left = deadline - time.monotonic()
                if not run.open or place >= len(meshes) or meshes[place] in run.considered:
                    continue
                if left <= 0:
                    return
                self._below(run, [meshes[place]], left)

    def _outcome(self, run: _Run, best: _Run) -> VariantModel:
        tried = [one for one in run.considered.values() if not one.status.startswith("not tried")]
        open_meshes = len(run.form.meshes) - len(tried)
        step_s, peak = None, None
        planned = [one for one in tried if one.step_s is not None]
        if run is best or planned:
            fastest = min(planned, key=lambda one: one.step_s or math.inf)
            step_s, peak = fastest.step_s, fastest.peak_bytes
            status = "chosen" if run is best else "planned"
        elif run.by_flops:
            status = f"ruled out: its matrix products alone take {run.bound_s:.4g} s"
        elif math.isfinite(run.bound_s):
            status = f"ruled out: at least {run.bound_s:.4g} s by the integer program"
            if open_meshes:
                status += " on the meshes tried"
        else:
            status = "does not fit"
            peak = None if run.misfit is None else run.misfit.least_bytes
        if open_meshes and not run.by_flops:
            status += f" ({len(tried)} of {len(run.form.meshes)} meshes tried)"
        return VariantModel(
            name=run.form.name,
            status=status,
            step_time_s=step_s,
            bound_s=run.bound_s if math.isfinite(run.bound_s) else None,
            peak_memory_bytes=peak,
        )


def _least_bytes(error: DoesNotFitError | None) -> float:
    return math.inf if error is None or error.least_bytes is None else error.least_bytes
