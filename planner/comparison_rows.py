"""Plans on several slices as rows of one table, and who wins.

Everything here is arithmetic on finished plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile, parse_chip
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.plan_schema import PlanModel, Unit
from shardwright.planner.prices import Prices
from shardwright.planner.workers import Failure

_SECONDS_PER_HOUR = 3600.0


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Goal(_Model):
    """What a whole run must keep.

    Attributes:
      target_tokens: tokens (examples) to train on.
      deadline_s: seconds that it may take.
      budget: money that it may cost, in the currency of the prices.
    """

    target_tokens: float | None = Field(default=None, gt=0)
    deadline_s: float | None = Field(default=None, gt=0)
    budget: float | None = Field(default=None, gt=0)


class ComparisonRow(_Model):
    """One slice.

    Times are seconds of one step, memory is bytes of one device, money is in the currency of the
    prices; what does not apply (no plan, no prices, no tokens) is None.
    """

    topology: str
    generation: str
    chips: int
    status: Literal["planned", "does-not-fit", "input", "crashed", "internal"]
    message: str = Field(description="why there is no plan; empty where there is one")
    headroom_bytes: float | None = Field(
        description="memory that may be used and is not; negative by what is lacking"
    )
    mesh_axes: dict[str, int] | None = None
    step_time_s: float | None = None
    compute_time_s: float | None = None
    exposed_collective_time_s: float | None = None
    peak_memory_bytes: float | None = None
    mfu: float | None = None
    gap: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_chip: float | None = None
    cost_per_step: float | None = None
    cost_per_million_tokens: float | None = None
    run_steps: int | None = Field(default=None, description="steps to the target tokens")
    run_time_s: float | None = None
    run_cost: float | None = None
    meets_goal: bool | None = Field(
        default=None, description="within the deadline and the budget; None without either"
    )

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.status == "planned"


class Winners(_Model):
    """The topology that is best by each measure; None where no slice has it.

    Ties go to fewer chips, then to the faster.
    """

    time: str | None
    cost: str | None = Field(description="of a token (a step where tokens are not known)")
    chips: str | None
    goal: str | None = Field(
        description="the cheapest slice that meets the goal; the one with fewest chips without "
        "prices; None without a goal"
    )


class ComparisonModel(_Model):
    """A whole comparison.

    Attributes:
      name: of the program.
      unit: what a step works on.
      tokens_per_step: how many of them; None where not known.
    """

    name: str
    unit: Unit
    tokens_per_step: int | None
    prices: Prices | None
    goal: Goal
    rows: list[ComparisonRow]
    winners: Winners


def row_of_plan(
    plan: PlanModel,
    *,
    tokens_per_step: int | None = None,
    prices: Prices | None = None,
    goal: Goal | None = None,
) -> ComparisonRow:
    """The row of a finished plan."""
    goal = goal or Goal()
    on = parse_slice(plan.topology, parse_chip(plan.chip))
    estimate, chips = plan.estimate, on.chips
    step = estimate.step_time_s
    per_hour = None if prices is None else prices.per_hour(plan.topology, chips)
    per_step = None if per_hour is None else per_hour * step / _SECONDS_PER_HOUR
    rate = tokens_per_step / step if tokens_per_step and step else None
    steps = None
    if goal.target_tokens is not None and tokens_per_step:
        steps = ceil(goal.target_tokens / tokens_per_step)
    run_time = None if steps is None else steps * step
    run_cost = None if steps is None or per_step is None else steps * per_step
    limit = estimate.memory_capacity_bytes * plan.options.memory_fraction
    return ComparisonRow(
        topology=plan.topology,
        generation=on.chip.name,
        chips=chips,
        status="planned",
        message="",
        headroom_bytes=limit - estimate.peak_memory_bytes,
        mesh_axes=dict(plan.mesh_axes),
        step_time_s=step,
        compute_time_s=estimate.compute_time_s,
        exposed_collective_time_s=estimate.exposed_collective_time_s,
        peak_memory_bytes=estimate.peak_memory_bytes,
        mfu=estimate.mfu,
        gap=plan.solver.gap,
        tokens_per_s=rate,
        tokens_per_s_chip=None if rate is None else rate / chips,
        cost_per_step=per_step,
        cost_per_million_tokens=(
            per_step / tokens_per_step * 1e6 if per_step is not None and tokens_per_step else None
        ),
        run_steps=steps,
        run_time_s=run_time,
        run_cost=run_cost,
        meets_goal=_meets(goal, run_time, run_cost),
    )


def _meets(goal: Goal, run_time: float | None, run_cost: float | None) -> bool | None:
    if goal.deadline_s is None and goal.budget is None:
        return None
    in_time = goal.deadline_s is None or (run_time is not None and run_time <= goal.deadline_s)
    in_money = goal.budget is None or (run_cost is not None and run_cost <= goal.budget)
    return in_time and in_money


def row_of_failure(
    topology: str, failure: Failure, chip: ChipProfile | None = None
) -> ComparisonRow:
    """The row of a slice that has no plan.

    Args:
      topology: a legal slice.
      failure: why.
      chip: the profile that was used instead of the bundled one.
    """
    on = parse_slice(topology, chip)
    lacking = None
    if failure.least_bytes is not None and failure.limit_bytes is not None:
        lacking = failure.limit_bytes - failure.least_bytes
    return ComparisonRow(
        topology=topology,
        generation=on.chip.name,
        chips=on.chips,
        status=failure.kind,  # type: ignore[arg-type]
        message=failure.message,
        headroom_bytes=lacking,
        peak_memory_bytes=failure.least_bytes,
    )


def find_winners(rows: Sequence[ComparisonRow]) -> Winners:
    """Who is best by time, by cost, by chips, and for the goal."""
    planned = [row for row in rows if row.fits]
    meeting = [row for row in planned if row.meets_goal]
    by_tokens = any(row.cost_per_million_tokens is not None for row in planned)
    priced = any(row.run_cost is not None for row in meeting)

    def best(
        among: Sequence[ComparisonRow], measure: Callable[[ComparisonRow], float | None]
    ) -> str | None:
        measured = [(value, row) for row in among if (value := measure(row)) is not None]
        ranked = sorted(measured, key=lambda m: (m[0], m[1].chips, m[1].step_time_s or 0.0))
        return ranked[0][1].topology if ranked else None

    return Winners(
        time=best(planned, lambda row: row.step_time_s),
        cost=best(
            planned,
            lambda row: row.cost_per_million_tokens if by_tokens else row.cost_per_step,
        ),
        chips=best(planned, lambda row: row.chips),
        goal=best(meeting, lambda row: row.run_cost if priced else row.chips),
    )


def pareto_front(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The rows that no other beats in both time and cost, fastest first.

    Cost is of a million tokens, or of a step where tokens are not known.
    """
    front: list[ComparisonRow] = []
    for row in sorted(
        (r for r in rows if cost_of(r) is not None),
        key=lambda r: (r.step_time_s or 0.0, cost_of(r)),
    ):
        if not front or (cost_of(row) or 0.0) < (cost_of(front[-1]) or 0.0):
            front.append(row)
    return front


def cost_of(row: ComparisonRow) -> float | None:
    """Cost of a million tokens, or of a step where tokens are not known."""
    per_tokens = row.cost_per_million_tokens
    return row.cost_per_step if per_tokens is None else per_tokens


def check_goal(goal: Goal, tokens_per_step: int | None, prices: Prices | None) -> None:
    """Makes sure that a goal can be judged.

    Raises:
      InputError: a deadline or a budget without target tokens, target tokens of a program whose
        tokens are not known, or a budget without prices.
    """
    judged = goal.deadline_s is not None or goal.budget is not None
    if judged and goal.target_tokens is None:
        raise InputError(
            "a deadline or a budget is for a whole run, and its size is not given",
            where="target_tokens",
            do="Give --target-tokens too, such as 1T",
        )
    if goal.target_tokens is not None and not tokens_per_step:
        raise InputError(
            "the tokens of one step are not known, so steps to a target cannot be counted",
            where="tokens_per_step",
            do="Give --tokens-per-step",
        )
    if goal.budget is not None and prices is None:
        raise InputError(
            "a budget needs prices", where="budget", do="Give --prices a file of chip prices"
        )
