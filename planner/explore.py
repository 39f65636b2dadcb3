"""A workload on hypothetical chips and tori: which are worth building, and what holds it up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile, is_bundled
from shardwright.hardware_profiles.slices import Slice, parse_slice
from shardwright.planner.explore_journal import ExplorationJournal
from shardwright.planner.explore_model import (
    ExplorationModel,
    PointModel,
    SeedModel,
    check_names,
    checked_objectives,
    pareto_front,
)
from shardwright.planner.explore_points import MOST_PLANS, PointTask, run, unplanned
from shardwright.planner.explore_space import (
    TORUS,
    Value,
    Values,
    checked_vary,
    hypothesis,
    key_of,
    points_of,
)
from shardwright.planner.plan_schema import Unit
from shardwright.planner.program import Program
from shardwright.planner.search import Progress
from shardwright.planner.workers import Failure, failure_of, run_tasks
from shardwright.version import VERSION

_SEEDS = 4
"""Plans of a journal that the first point of a torus begins with."""


@dataclass(frozen=True)
class Exploration:
    """A workload on hypothetical slices.

    Attributes:
      data: everything, as a pydantic model.
    """

    data: ExplorationModel

    @property
    def points(self) -> Sequence[PointModel]:
        """Every point, in the order of the values."""
        return self.data.points

    @property
    def front(self) -> Sequence[PointModel]:
        """The points of the Pareto front, by step time."""
        return [self.data.points[place] for place in self.data.front]

    def to_json(self) -> str:
        """The exploration as JSON text."""
        return self.data.model_dump_json(indent=1)


@dataclass(frozen=True)
class PointProgress:
    """What is known of one point while points are planned.

    Attributes:
      values: of the point.
      planning: how far its search is; None when it has just started or is done.
      point: what became of it, once it is done.
    """

    values: Values
    planning: Progress | None = None
    point: PointModel | None = None


def explore(
    fn: Callable[..., Any] | Program,
    *args: Any,
    base: str,
    vary: Mapping[str, Sequence[Value]],
    minimise: Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] = (),
    memory_fraction: float = 0.9,
    time_limit_s: float = 12.0,
    seed: int = 0,
    model_flops: float | None = None,
    tokens_per_step: float | None = None,
    unit: Unit = "tokens",
    chip: ChipProfile | None = None,
    journal: str | Path | None = None,
    workers: int | None = None,
    name: str | None = None,
    on_progress: Callable[[PointProgress], None] | None = None,
) -> Exploration:
    """Plans a workload on every combination of some hypothetical chips and tori.

    The program is traced once. The first point of each torus is searched as `plan` does; at the
    others the plans that are known are priced, and the best meshes are solved again for what
    would be better there. At the end every plan that was found for a torus is priced at all its
    points.

    Args:
      fn, args, donate_argnums, model_flops: as for `plan`.
      base: the slice that everything is told against: "v5p:4x4x4".
      vary: knob -> values. Knobs of resources are multiples of what the base's chip has:
        "flops", "vector", "hbm_bandwidth", "memory", "ici_bandwidth", "latency" (2 is twice as
        fast), "dcn_bandwidth". "torus" takes "1d", "2d", "3d", of as many chips, and shapes such
        as "8x8".
      minimise: objectives of the Pareto front: "step_time", "chips", "memory_used" and resources.
        By default the step time and each resource that varies.
      memory_fraction, seed: as for `plan`.
      time_limit_s: seconds to search further meshes at the first point of a torus.
      tokens_per_step, unit: what a step works on, for rates.
      chip: a profile to use instead of the known one of the base's generation.
      journal: a file that keeps points as they are done; those that it has are not planned again.
      workers: processes at a time; as many as there are cores where None, and 1 is this process.
      name: of the program, where people know it by another than its own.
      on_progress: called when a point starts, as its search goes on, and when it is done; at
        once for the points of the journal.

    Raises:
      InputError: the function does not trace, the base, a knob, a value or an objective is wrong,
        or the journal is of something else.
    """
    on = parse_slice(base, chip)
    varied = checked_vary(vary)
    if minimise is not None:
        check_names(minimise)
    if not 0 < memory_fraction <= 1:
        raise InputError(
            f"memory_fraction is {memory_fraction}", where="explore", do="Give more than 0, up to 1"
        )
    program = (
        fn if isinstance(fn, Program) else Program.trace(fn, *args, donate_argnums=donate_argnums)
    )
    about = {
        "fingerprint": program.fingerprint,
        "base": on.name,
        "chip": on.chip.digest,
        "memory_fraction": memory_fraction,
        "model_flops": model_flops,
        "version": VERSION,
    }
    values = points_of(varied)
    first = PointTask(
        program,
        base,
        None if is_bundled(on.chip) else on.chip.model_dump_json(),
        values[0],
        memory_fraction,
        time_limit_s,
        seed,
        model_flops,
    )
    with contextlib.ExitStack() as stack:
        kept = None if journal is None else ExplorationJournal(journal, about)
        if kept is not None:
            stack.callback(kept.close)
        work = _Work(on, first, values, kept, workers)
        work.plan(on_progress or (lambda progress: None))
        work.settle()
    points = [work.done[key_of(one)] for one in values]
    objectives = checked_objectives(minimise, points)
    return Exploration(
        ExplorationModel(
            name=name or program.name,
            base=on.name,
            unit=unit,
            tokens_per_step=tokens_per_step,
            memory_fraction=memory_fraction,
            vary={knob: list(given) for knob, given in varied.items()},
            minimise=objectives,
            points=points,
            front=pareto_front(points, objectives),
        )
    )


class _Work:
    """The points of an exploration, and what is known of them."""

    def __init__(
        self,
        on: Slice,
        first: PointTask,
        values: Sequence[dict[str, Value]],
        journal: ExplorationJournal | None,
        workers: int | None,
    ) -> None:
        self._on = on
        self._first = first
        self._values = _in_order(values)
        self._journal = journal
        self._workers = workers
        kept = {} if journal is None else journal.points
        self.done = {key: point for key, point in kept.items() if point.status != "failed"}

    def plan(self, report: Callable[[PointProgress], None]) -> None:
        """Plans every point that is not done."""
        for one in self._values:
            if key_of(one) in self.done:
                report(PointProgress(one, point=self.done[key_of(one)]))
        left = [one for one in self._values if key_of(one) not in self.done]
        tasks = [
            replace(self._first, values=one, known=tuple(self._known(one)[:_SEEDS])) for one in left
        ]
        for task, outcome in _outcomes(tasks, self._workers, report):
            if isinstance(outcome, Failure):
                status = "does-not-fit" if outcome.kind == "does-not-fit" else "failed"
                at = hypothesis(self._on, task.values)
                point = unplanned(task.values, at, status, outcome.message)
            else:
                point = outcome
            self._keep(point)
            report(PointProgress(task.values, point=point))

    def settle(self) -> None:
        """Prices every plan that was found for a torus at all its points, which may be better."""
        tasks = []
        for one in self._values:
            known, point = self._known(one)[:MOST_PLANS], self.done[key_of(one)]
            if point.planned and len(known) > max(1, point.compared):
                tasks.append(replace(self._first, values=one, known=tuple(known), search=False))
        for _, outcome in _outcomes(tasks, self._workers, lambda progress: None):
            if not isinstance(outcome, Failure):
                self._keep(outcome)

    def _keep(self, point: PointModel) -> None:
        self.done[key_of(point.values)] = point
        if self._journal is not None:
            self._journal.add(point)

    def _known(self, values: Values) -> list[SeedModel]:
        """The different plans of finished points on a torus, those of most points first."""
        torus = hypothesis(self._on, values).torus
        found: dict[str, list[SeedModel]] = {}
        for point in self.done.values():
            if point.seed is not None and point.torus == torus:
                found.setdefault(point.seed.model_dump_json(), []).append(point.seed)
        return [alike[0] for alike in sorted(found.values(), key=len, reverse=True)]


def _in_order(values: Sequence[dict[str, Value]]) -> list[dict[str, Value]]:
    """Points of one torus after each other, those nearest to the base first."""

    def turned(one: dict[str, Value]) -> float:
        multiples = [float(value) for knob, value in one.items() if knob != TORUS]
        return sum(max(scale, 1 / scale) for scale in multiples)

    tori = list(dict.fromkeys(str(one.get(TORUS)) for one in values))
    return sorted(values, key=lambda one: (tori.index(str(one.get(TORUS))), turned(one)))


def _outcomes(
    tasks: Sequence[PointTask], workers: int | None, report: Callable[[PointProgress], None]
) -> Generator[tuple[PointTask, PointModel | Failure]]:
    """Every task with its point as it is done, or with why it has none."""
    if workers == 1:
        for task in tasks:
            values = task.values
            report(PointProgress(values))
            try:
                yield task, run(task, lambda p, of=values: report(PointProgress(of, p)))  # type: ignore[misc]
            except Exception as error:  # as in a worker: the other points go on
                yield task, failure_of(error)
        return
    for position, outcome in run_tasks(
        [task.as_task() for task in tasks],
        workers=workers,
        on_progress=lambda position, told: report(PointProgress(tasks[position].values, told)),
    ):
        yield tasks[position], outcome
