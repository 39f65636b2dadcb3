"""Planning the jobs of a configuration, as far as their lock does not know them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.batch.ci_config import Config, Job
from shardwright.batch.ci_keeping import with_price_of_keeping
from shardwright.batch.ci_lock import Entry, Inputs, Lock, entry_of
from shardwright.batch.ci_verdicts import Result, against_lock, costs, failed, over_budget
from shardwright.errors import InputError, ShardwrightError
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.plan_tasks import PlanTask
from shardwright.planner.prices import Prices, load_prices
from shardwright.planner.spec_patterns import spec_of_data
from shardwright.planner.workers import Failure, failure_of, run_tasks

if TYPE_CHECKING:
    from shardwright.planner.program import Program

OnResult = Callable[[Result, int], None]
"""Called with every result as it comes and the number of all."""


@dataclass(frozen=True)
class _Traced:
    """A target's program, and what its model tells of it."""

    program: Program
    model_flops: float | None
    tokens_per_step: int | None


@dataclass(frozen=True)
class _Unit:
    """One job on one slice."""

    job_name: str
    job: Job
    topology: str
    traced: _Traced | Failure

    @property
    def key(self) -> str:
        """As the lock names it."""
        return f"{self.job_name}@{self.topology}"


@dataclass(frozen=True)
class _Work:
    """What to plan for a unit, what its plan follows from, and which arguments are saved state."""

    task: PlanTask
    inputs: Inputs
    state: frozenset[str]


def run_jobs(
    config: Config,
    lock: Lock | None,
    *,
    names: Sequence[str] = (),
    fresh: bool = False,
    price_keeping: bool = False,
    workers: int | None = None,
    on_result: OnResult | None = None,
) -> list[Result]:
    """Plans every job on each of its slices and judges it.

    What has the same program, hardware profile, options and versions as in the lock is taken from
    there. Relative paths and modules are found from the current directory.

    Args:
      names: only these jobs; all where empty.
      fresh: plans everything, whatever the lock knows.
      price_keeping: where saved state would be resharded, also says what keeping it would cost.
      workers: processes that plan at a time; as many as cores where None.

    Raises:
      InputError: there is no job of such a name, or the prices cannot be read.
    """
    unknown = [name for name in names if name not in config.jobs]
    if unknown:
        raise InputError(
            f"there is no job {', '.join(unknown)}",
            where="command line",
            do=f"The jobs are {', '.join(config.jobs)}",
        )
    prices = None if config.prices is None else load_prices(Path(config.prices))
    units = _units({n: job for n, job in config.jobs.items() if not names or n in names})
    locked = {} if lock is None else lock.entries
    report = on_result or (lambda result, count: None)
    results: dict[int, Result] = {}
    to_plan: list[tuple[int, _Work]] = []

    def finish(position: int, result: Result) -> None:
        results[position] = result
        report(result, len(units))

    for position, unit in enumerate(units):
        made = _task(unit)
        if isinstance(made, Failure):
            finish(position, _without_plan(unit, made, locked.get(unit.key), 0.0))
            continue
        known = locked.get(unit.key)
        unchanged = known is not None and (
            known.inputs == made.inputs and known.state.keys() == set(made.state)
        )
        if known is not None and unchanged and not fresh:
            finish(position, _judge(unit, known, known, prices, "lock", 0.0))
        else:
            to_plan.append((position, made))
    began: dict[int, float] = {}

    def started(number: int, progress: Any) -> None:
        if progress is None:
            began[number] = time.monotonic()

    for number, outcome in run_tasks(
        [work.task.as_task() for _, work in to_plan], workers=workers, on_progress=started
    ):
        position, work = to_plan[number]
        unit, seconds = units[position], time.monotonic() - began[number]
        known = locked.get(unit.key)
        if isinstance(outcome, Failure):
            finish(position, _without_plan(unit, outcome, known, seconds))
            continue
        entry = entry_of(outcome, work.inputs, work.state)
        finish(position, _judge(unit, entry, known, prices, "solved", seconds))
    if price_keeping:
        tasks = {position: work.task for position, work in to_plan}
        results |= with_price_of_keeping(results, tasks, workers)
    return [results[position] for position in range(len(units))]


def _units(jobs: dict[str, Job]) -> list[_Unit]:
    """Every job on each of its slices; each program is traced once."""
    traced: dict[str, _Traced | Failure] = {}
    units = []
    for name, job in jobs.items():
        same = job.model_dump(mode="json", include={"target", "args", "donate", "options", "mesh"})
        key = json.dumps(same, sort_keys=True)
        if key not in traced:
            traced[key] = _trace(job)
        units += [_Unit(name, job, topology, traced[key]) for topology in job.topologies]
    return units


def _trace(job: Job) -> _Traced | Failure:
    from shardwright.cli_inputs import load_target
    from shardwright.planner.program import Program
    from shardwright.planner.tracing import in_mesh

    try:
        target = load_target(job.target, job.args, job.donate, job.options)
        program = target.program
        if not isinstance(program, Program):
            function = program
            program = in_mesh(
                job.mesh,
                lambda: Program.trace(function, *target.args, donate_argnums=target.donate),
            )
    except ShardwrightError as error:
        return failure_of(error)
    return _Traced(program, target.model_flops, job.tokens_per_step or target.tokens_per_step)


def _task(unit: _Unit) -> _Work | Failure:
    job, traced = unit.job, unit.traced
    if isinstance(traced, Failure):
        return traced
    try:
        chip = parse_slice(unit.topology).chip
        state = _state_paths(traced.program, job)
        pins = {
            p: spec_of_data(spec, f"pinned {p}", partial=True) for p, spec in job.pinned.items()
        }
    except InputError as error:
        return failure_of(error)
    task = PlanTask(
        traced.program,
        topology=unit.topology,
        mesh=job.mesh,
        pinned=pins,
        memory_fraction=job.memory_fraction,
        time_limit_s=job.time_limit_s,
        seed=job.seed,
        model_flops=traced.model_flops,
    )
    return _Work(task, _inputs(task, chip), state)


def _inputs(task: PlanTask, chip: ChipProfile) -> Inputs:
    import jax
    import jaxlib

    from shardwright.version import VERSION

    return Inputs(
        program=task.program.fingerprint,
        chip=chip.digest,
        versions={"shardwright": VERSION, "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        options={
            "mesh": None if task.mesh is None else dict(task.mesh),
            "pinned": {
                path: [list(e) if isinstance(e, tuple) else e for e in spec]
                for path, spec in task.pinned.items()
            },
            "memory_fraction": task.memory_fraction,
            "time_limit_s": task.time_limit_s,
            "seed": task.seed,
            "model_flops": task.model_flops,
        },
    )


def _state_paths(program: Program, job: Job) -> frozenset[str]:
    """Paths of the arguments that are saved state.

    Raises:
      InputError: a pattern matches no argument.
    """
    from shardwright.planner.spec_patterns import match_specs

    paths = [tensor.path for tensor in program.inputs]
    if not job.state:
        return frozenset(paths[given] for given in program.aliases.values())
    matched = match_specs({pattern: () for pattern in job.state}, paths, "state")
    return frozenset(p for p, spec in zip(paths, matched, strict=True) if spec is not None)


def _without_plan(unit: _Unit, failure: Failure, locked: Entry | None, seconds: float) -> Result:
    return Result(
        job=unit.job_name,
        topology=unit.topology,
        source=None,
        entry=None,
        locked=locked,
        faults=[failed(failure)],
        notes=[],
        seconds=seconds,
    )


def _judge(
    unit: _Unit,
    entry: Entry,
    locked: Entry | None,
    prices: Prices | None,
    source: Any,
    seconds: float,
) -> Result:
    tokens = None if isinstance(unit.traced, Failure) else unit.traced.tokens_per_step
    per_step, per_million = costs(entry, unit.topology, prices, tokens)
    faults, notes = against_lock(entry, locked, unit.job)
    return Result(
        job=unit.job_name,
        topology=unit.topology,
        source=source,
        entry=entry,
        locked=locked,
        cost_per_step=per_step,
        cost_per_million_tokens=per_million,
        faults=[*over_budget(entry, unit.job, per_step, per_million), *faults],
        notes=notes,
        seconds=seconds,
    )


def updated_lock(
    results: Sequence[Result], lock: Lock | None, config: Config, *, whole: bool
) -> Lock:
    """The lock that a set of results makes.

    Args:
      whole: every job was run, so entries of others go.
    """
    kept = {} if lock is None else dict(lock.entries)
    if whole:
        current = {f"{name}@{t}" for name, job in config.jobs.items() for t in job.topologies}
        kept = {key: entry for key, entry in kept.items() if key in current}
    for result in results:
        key = f"{result.job}@{result.topology}"
        if result.entry is not None:
            kept[key] = result.entry
        else:
            kept.pop(key, None)
    return Lock(entries=kept)


def stale_entries(lock: Lock | None, config: Config) -> list[str]:
    """Entries of the lock that no job has any more."""
    current = {f"{name}@{t}" for name, job in config.jobs.items() for t in job.topologies}
    return [] if lock is None else sorted(lock.entries.keys() - current)
