"""What it would cost to keep the locked shardings of saved state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.batch.ci_lock import Entry
from shardwright.batch.ci_verdicts import Result
from shardwright.planner.plan_tasks import PlanTask
from shardwright.planner.workers import Failure, run_tasks
from shardwright.reports.numbers import quantity


def with_price_of_keeping(
    results: Mapping[int, Result], tasks: Mapping[int, PlanTask], workers: int | None
) -> dict[int, Result]:
    """Results whose saved state would be resharded, with a note of what keeping it would cost.

    Each is planned once more, on the locked mesh and with the locked shardings pinned.

    Args:
      results: by position.
      tasks: what was planned, of those that were.
      workers: processes at a time; as many as cores where None.
    """
    to_price = [
        (position, keeping_task(tasks[position], result.entry, result.locked))
        for position, result in results.items()
        if position in tasks
        and result.entry is not None
        and result.locked is not None
        and any(fault.kind == "state-resharded" for fault in result.faults)
    ]
    found = {}
    for number, outcome in run_tasks([t.as_task() for _, t in to_price], workers=workers):
        position = to_price[number][0]
        result = results[position]
        if isinstance(outcome, Failure):
            note = f"with the locked shardings kept there is no plan: {outcome.message}"
        elif result.entry is not None:
            seconds = outcome.estimate.step_time_s
            more = 100 * (seconds / result.entry.step_time_s - 1)
            note = (
                f"with the locked shardings kept a step takes {quantity(seconds, 's')}, "
                f"{more:+.1f} % beside this plan: pin them, or allow resharding"
            )
        found[position] = result.model_copy(update={"notes": [*result.notes, note]})
    return found


def keeping_task(task: PlanTask, entry: Entry, locked: Entry) -> PlanTask:
    """The same task with the locked mesh and, of tensors that are still there, the shardings."""
    pins = {
        path: tuple(tuple(axis.partition("=")[0] for axis in dim) or None for dim in kept.sharding)
        for path, kept in locked.state.items()
        if path in entry.state and entry.state[path].type == kept.type
    }
    return replace(task, mesh=dict(locked.mesh), pinned={**pins, **task.pinned})
