"""`refine=N`: the best few plans compiled for TPU, and the best chosen by what was compiled.

The cost models know the compiler's habits, not its decisions. Where several plans are close, the
compiled program tells which of them is best.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from shardwright.errors import DoesNotFitError, ShardwrightError
from shardwright.planner.compiled_cache import compiled_for_tpu
from shardwright.planner.compiled_schedule import compiled_time
from shardwright.planner.hlo import parse_hlo
from shardwright.planner.plan import Plan
from shardwright.planner.plan_schema import RefinedModel
from shardwright.planner.program import Program
from shardwright.planner.search import Progress
from shardwright.planner.workers import available_cores

_BYTES_A_COMPILER = 6e9
"""Memory that a process of the compiler may take, of a large model."""


@dataclass(frozen=True)
class Entrant:
    """A plan that may be chosen.

    Attributes:
      program: that it is of.
      tokens: work of one step, by which step times are compared.
    """

    plan: Plan
    program: Program = field(repr=False)
    tokens: float = 1.0


@dataclass(frozen=True)
class Refined:
    """The position of the best entrant, and what the compiler made of each."""

    best: int
    outcomes: tuple[RefinedModel, ...]


def refine(entrants: Sequence[Entrant], on_progress: Callable[[Progress], None]) -> Refined:
    """Compiles plans for their slice, several at a time, and chooses by the compiled programs.

    What was compiled before is taken from the user's cache.

    Args:
      entrants: the best first, by prediction; it wins ties.
      on_progress: called before the first and after every one.

    Raises:
      InputError: libtpu is not installed.
      DoesNotFitError: the compiler finds no room for any.
      ShardwrightError: the compiler fails at every one.
    """
    outcomes: dict[int, RefinedModel] = {}
    failures: dict[int, ShardwrightError] = {}

    def tell() -> None:
        done = len(outcomes) + len(failures)
        steps = [one.compiled_step_s for one in outcomes.values() if one.compiled_step_s]
        told = f"{done} of {len(entrants)} compiled"
        on_progress(
            Progress("compile", done, len(entrants), min(steps, default=None), message=told)
        )

    tell()
    with ThreadPoolExecutor(_at_once(len(entrants))) as pool:
        jobs = {pool.submit(_compiled, one): i for i, one in enumerate(entrants)}
        try:
            for job in as_completed(jobs):
                try:
                    outcomes[jobs[job]] = job.result()
                except ShardwrightError as error:
                    failures[jobs[job]] = error
                tell()
        except BaseException:
            # Else those that wait for their turn would be compiled before an interrupt is heeded.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for position, failure in failures.items():
        outcomes[position] = _outcome(entrants[position], problem=failure.what)
    steps = {
        position: one.compiled_step_s / entrants[position].tokens
        for position, one in sorted(outcomes.items())
        if one.compiled_step_s is not None
    }
    if not steps:
        if failures:
            raise failures[min(failures)]
        raise _no_room(entrants, outcomes)
    best = min(steps, key=lambda position: steps[position])
    return Refined(best, tuple(outcomes[position] for position in sorted(outcomes)))


def _at_once(count: int) -> int:
    """How many compilers run at a time: as cores and free memory allow."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(count, available_cores(), int(free / _BYTES_A_COMPILER)))


def _compiled(entrant: Entrant) -> RefinedModel:
    made = compiled_for_tpu(entrant.plan, entrant.program)
    if made.refused:
        return _outcome(entrant, problem=f"the compiler finds no room: {made.refused}")
    time = compiled_time(parse_hlo(made.hlo), entrant.plan.logical_mesh)
    return _outcome(
        entrant,
        compiled_step_s=time.step_s,
        compiled_compute_s=time.compute_s,
        compiled_exposed_s=time.exposed_s,
        compiled_peak_bytes=made.result["memory"]["peak"] or None,
    )


def _outcome(entrant: Entrant, **found: float | str | None) -> RefinedModel:
    plan = entrant.plan
    return RefinedModel.model_validate(
        {
            "variant": plan.data.variant,
            "layout": plan.logical_mesh.describe(),
            "predicted_step_s": plan.estimate.step_time_s,
            **found,
        }
    )


def _no_room(entrants: Sequence[Entrant], outcomes: dict[int, RefinedModel]) -> DoesNotFitError:
    plan = entrants[0].plan
    return DoesNotFitError(
        f"the TPU compiler finds no room for any of the {len(entrants)} best plans of "
        f"{plan.data.program.name}; of the first, {outcomes[0].problem}",
        where=plan.data.topology,
        do="Plan with a smaller memory_fraction, so that more is left for what the compiler needs",
    )
