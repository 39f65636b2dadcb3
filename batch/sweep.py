"""Planning a grid of points, in local processes or on Ray."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardwright.batch.grid import Point
from shardwright.batch.journal import Record, open_journal
from shardwright.planner.comparison_rows import row_of_failure, row_of_plan
from shardwright.planner.prices import Prices
from shardwright.planner.workers import Failure, Task, failure_of, run_tasks

if TYPE_CHECKING:
    from shardwright.planner.plan_schema import PlanModel
    from shardwright.planner.program import Program


@dataclass(frozen=True)
class Work:
    """A point as a worker gets it: with the directory in which its modules and files are."""

    point: Point
    directory: str


@dataclass(frozen=True)
class Done:
    """What a worker made of a point."""

    plan: PlanModel
    tokens_per_step: int | None
    seconds: float


Outcome = Done | Failure


class Runner(Protocol):
    """Runs work somewhere and yields positions and outcomes as they come."""

    def __call__(self, work: Sequence[Work]) -> Generator[tuple[int, Outcome]]:
        """Closing the generator gives up what is not done."""
        ...


def local_runner(workers: int | None = None) -> Runner:
    """Runs work in processes of this machine; as many as cores where None."""

    def run(work: Sequence[Work]) -> Generator[tuple[int, Outcome]]:
        tasks = [Task("shardwright.batch.sweep:plan_point", one) for one in work]
        yield from run_tasks(tasks, workers=workers)

    return run


def run_sweep(
    points: Sequence[Point],
    journal: str | Path,
    *,
    runner: Runner | None = None,
    prices: Prices | None = None,
    on_record: Callable[[Record, int, int], None] | None = None,
) -> list[Record]:
    """Plans points that the journal does not have yet, and returns the records of all.

    Each finished point is in the journal before the next is told of; a run that is killed goes on
    where it was when it is started again.

    Args:
      journal: path of a file of finished points.
      runner: where to plan; local processes by default.
      prices: of chips, for the costs in the records.
      on_record: called with each new record, how many of the points are finished, and how many
        there are.

    Raises:
      InputError: the journal is another's, or another run has it open.
    """
    report = on_record or (lambda record, done, count: None)
    with open_journal(Path(journal)) as opened:
        known = opened.records
        left = [p for p in points if p.key not in known or not known[p.key].final]
        done = len(points) - len(left)
        work = [Work(point, os.getcwd()) for point in left]
        if work:
            for position, outcome in (runner or local_runner())(work):
                record = _record(left[position], outcome, prices)
                opened.add(record)
                done += 1
                report(record, done, len(points))
        return [known[point.key] for point in points]


def _record(point: Point, outcome: Outcome, prices: Prices | None) -> Record:
    if isinstance(outcome, Failure):
        row = row_of_failure(point.topology, outcome)
        return Record(key=point.key, point=point, row=row, tokens_per_step=None, seconds=0.0)
    tokens = outcome.tokens_per_step
    return Record(
        key=point.key,
        point=point,
        row=row_of_plan(outcome.plan, tokens_per_step=tokens, prices=prices),
        tokens_per_step=tokens,
        seconds=outcome.seconds,
    )


def plan_point(work: Work, report: Callable[[Any], None]) -> Done:
    """Plans a point in a worker.

    Raises:
      ShardwrightError: as `plan` does.
    """
    from shardwright.planner.planning import plan

    point = work.point
    began = time.monotonic()
    if os.path.isdir(work.directory):
        os.chdir(work.directory)
    if work.directory not in sys.path:
        sys.path.insert(0, work.directory)
    same = point.model_dump_json(include={"target", "args", "donate", "options"})
    program, flops, tokens = _program(same)
    made = plan(
        program,
        topology=point.topology,
        memory_fraction=point.memory_fraction,
        time_limit_s=point.time_limit_s,
        seed=point.seed,
        model_flops=flops,
        name=point.target,
        tokens_per_step=tokens,
    )
    return Done(made.data, tokens, time.monotonic() - began)


@functools.lru_cache(maxsize=1)
def _program(same: str) -> tuple[Program, float | None, int | None]:
    """A traced target; the last is kept, as points of one program come one after another."""
    from shardwright.cli_inputs import load_target
    from shardwright.planner.program import Program

    point = Point.model_validate_json(same[:-1] + ',"topology":""}')
    loaded = load_target(point.target, point.args, point.donate, point.options)
    program = loaded.program
    if not isinstance(program, Program):
        program = Program.trace(program, *loaded.args, donate_argnums=loaded.donate)
    return program, loaded.model_flops, loaded.tokens_per_step


def outcome_of(work: Work) -> Outcome:
    """Plans a point, errors as failures: for workers that do not tell errors themselves."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        return plan_point(work, lambda report: None)
    except Exception as error:  # one failed point leaves the others
        return failure_of(error)
