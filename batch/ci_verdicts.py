"""Whether a planned job may pass: pure comparisons with its budget and its lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardwright.batch.ci_config import Job
from shardwright.batch.ci_lock import Entry
from shardwright.planner.prices import Prices
from shardwright.planner.workers import Failure
from shardwright.reports.numbers import quantity

FaultKind = Literal[
    "not-planned", "does-not-fit", "over-budget", "slower", "state-resharded", "not-locked"
]

EXIT_CODES: dict[FaultKind, int] = {
    "not-planned": 2,
    "does-not-fit": 3,
    "over-budget": 4,
    "slower": 5,
    "state-resharded": 6,
    "not-locked": 7,
}
"""Of a check, by its worst fault: the first in this order that any job has."""

_NAMED_TENSORS = 3
_SECONDS_PER_HOUR = 3600.0


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fault(_Model):
    """Why a job does not pass."""

    kind: FaultKind
    message: str


class Result(_Model):
    """One job on one slice.

    Attributes:
      source: "solved" now, or taken from the "lock" as nothing has changed; None without a plan.
      entry: what was planned.
      locked: what the lock says.
      cost_per_step: in the currency of the prices.
      notes: what people should know and what fails nothing.
      seconds: that planning took.
    """

    job: str
    topology: str
    source: Literal["solved", "lock"] | None
    entry: Entry | None
    locked: Entry | None
    cost_per_step: float | None = None
    cost_per_million_tokens: float | None = None
    faults: list[Fault]
    notes: list[str]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


def exit_code(results: Sequence[Result]) -> int:
    """Of a whole check: 0, or the code of the worst fault."""
    codes = [EXIT_CODES[fault.kind] for result in results for fault in result.faults]
    return min(codes, default=0)


def costs(
    entry: Entry, topology: str, prices: Prices | None, tokens_per_step: int | None
) -> tuple[float | None, float | None]:
    """Money of a step and of a million tokens; None where not known."""
    per_hour = None if prices is None else prices.per_hour(topology)
    if per_hour is None:
        return None, None
    step = per_hour * entry.step_time_s / _SECONDS_PER_HOUR
    return step, step / tokens_per_step * 1e6 if tokens_per_step else None


def failed(failure: Failure) -> Fault:
    """The fault of a job that has no plan."""
    kind: FaultKind = "does-not-fit" if failure.kind == "does-not-fit" else "not-planned"
    return Fault(kind=kind, message=failure.message)


def over_budget(
    entry: Entry, job: Job, cost_per_step: float | None, cost_per_million: float | None
) -> list[Fault]:
    """What of the budget is exceeded."""
    budget = job.budget
    told = []
    if budget.step_time_s is not None and entry.step_time_s > budget.step_time_s:
        step, most = quantity(entry.step_time_s, "s"), quantity(budget.step_time_s, "s")
        told.append(f"a step takes {step}, and the budget is {most}")
    used = entry.peak_memory_bytes / entry.memory_capacity_bytes
    if budget.memory_fraction is not None and used > budget.memory_fraction:
        told.append(
            f"{100 * used:.1f} % of the memory is used, and the budget is "
            f"{100 * budget.memory_fraction:.1f} %"
        )
    if budget.mfu is not None and entry.mfu < budget.mfu:
        told.append(f"MFU is {100 * entry.mfu:.1f} %, and at least {100 * budget.mfu:.1f} % is due")
    for cost, most_cost, unit in (
        (cost_per_step, budget.cost_per_step, "a step"),
        (cost_per_million, budget.cost_per_million_tokens, "a million tokens"),
    ):
        if most_cost is None:
            continue
        if cost is None:
            told.append(f"the cost of {unit} is not known: the prices or the tokens are lacking")
        elif cost > most_cost:
            told.append(f"{unit} costs {cost:.4g}, and the budget is {most_cost:.4g}")
    return [Fault(kind="over-budget", message=message) for message in told]


def against_lock(entry: Entry, locked: Entry | None, job: Job) -> tuple[list[Fault], list[str]]:
    """Faults and notes of a plan beside the locked one."""
    if locked is None:
        message = "the lock has no such job: run `shardwright ci update` and commit the lock"
        return [Fault(kind="not-locked", message=message)], []
    faults, notes = [], []
    slower = entry.step_time_s / locked.step_time_s - 1 if locked.step_time_s else 0.0
    if slower > job.tolerance:
        faults.append(
            Fault(
                kind="slower",
                message=f"a step takes {quantity(entry.step_time_s, 's')}, {100 * slower:.1f} % "
                f"more than the locked {quantity(locked.step_time_s, 's')}; "
                f"{100 * job.tolerance:.1f} % are tolerated",
            )
        )
    moved = [
        f"{path} {_sharding_text(locked.state[path].sharding)} -> {_sharding_text(now.sharding)}"
        for path, now in entry.state.items()
        if path in locked.state
        and locked.state[path].type == now.type
        and locked.state[path].sharding != now.sharding
    ]
    if moved:
        more = f" and {len(moved) - _NAMED_TENSORS} more" if moved[_NAMED_TENSORS:] else ""
        message = (
            f"{len(moved)} tensors of saved state are sharded otherwise than locked, so "
            f"checkpoints need resharding: {'; '.join(moved[:_NAMED_TENSORS])}{more}"
        )
        if job.allow_resharding:
            notes.append(message)
        else:
            faults.append(Fault(kind="state-resharded", message=message))
    reshaped = [
        path
        for path, tensor in entry.state.items()
        if path in locked.state and locked.state[path].type != tensor.type
    ]
    if changed := len(reshaped) + len(entry.state.keys() ^ locked.state.keys()):
        notes.append(f"{changed} tensors of saved state are new, gone, or of another shape or type")
    if why := changed_inputs(entry, locked):
        notes.append(f"planned anew, since {why} changed; `shardwright ci update` renews the lock")
    return faults, notes


def changed_inputs(entry: Entry, locked: Entry) -> str:
    """Which of a plan's inputs differ from the locked ones, in words; "" where none does."""
    now, then = entry.inputs, locked.inputs
    # The model's FLOPs follow from the program.
    options_now, options_then = (
        {key: value for key, value in inputs.options.items() if key != "model_flops"}
        for inputs in (now, then)
    )
    parts = {
        "the program": now.program != then.program,
        "the hardware profile": now.chip != then.chip,
        "options": options_now != options_then,
        "versions": now.versions != then.versions,
    }
    return ", ".join(name for name, differs in parts.items() if differs)


def _sharding_text(sharding: list[list[str]]) -> str:
    return f"[{', '.join('+'.join(dim) or '-' for dim in sharding)}]"
