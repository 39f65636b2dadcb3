"""One program planned on many slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import is_bundled
from shardwright.planner.comparison_rows import (
    ComparisonModel,
    ComparisonRow,
    Goal,
    check_goal,
    find_winners,
    row_of_failure,
    row_of_plan,
)
from shardwright.planner.plan_schema import Unit
from shardwright.planner.plan_tasks import PlanTask, with_trees
from shardwright.planner.prices import Prices, load_prices
from shardwright.planner.slice_choice import choose_slices, parse_chip_range
from shardwright.planner.workers import Failure, run_tasks

if TYPE_CHECKING:
    from pathlib import Path

    from shardwright.hardware_profiles.chip import ChipProfile
    from shardwright.planner.plan import Plan
    from shardwright.planner.program import Program
    from shardwright.planner.search import Progress


@dataclass(frozen=True)
class Comparison:
    """Plans of one program on many slices.

    Attributes:
      data: the table, as a pydantic model.
      plans: topology -> plan, of the slices that have one.
    """

    data: ComparisonModel
    plans: Mapping[str, Plan] = field(repr=False)

    @property
    def rows(self) -> Sequence[ComparisonRow]:
        """One row a slice, in the order asked for."""
        return self.data.rows

    def to_json(self) -> str:
        """The table as JSON text; plans save themselves."""
        return self.data.model_dump_json(indent=1)


@dataclass(frozen=True)
class SliceProgress:
    """What is known of one slice while slices are planned.

    Attributes:
      topology: the slice.
      planning: how far its search is; None when it has just started or is done.
      row: its row, once it is done.
    """

    topology: str
    planning: Progress | None = None
    row: ComparisonRow | None = None


def compare(
    fn: Callable[..., Any] | Program,
    *args: Any,
    topologies: Sequence[str] = ("all",),
    chips: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    memory_fraction: float = 0.9,
    time_limit_s: float = 12.0,
    seed: int = 0,
    model_flops: float | None = None,
    tokens_per_step: int | None = None,
    unit: Unit = "tokens",
    prices: Prices | str | Path | None = None,
    target_tokens: float | None = None,
    deadline_s: float | None = None,
    budget: float | None = None,
    chip: ChipProfile | None = None,
    workers: int | None = None,
    name: str | None = None,
    on_progress: Callable[[SliceProgress], None] | None = None,
) -> Comparison:
    """Plans one program on many slices, several at a time.

    A slice on which planning fails is a row that says why; the others are planned all the same.

    Args:
      fn, args, donate_argnums, model_flops: as for `plan`; traced once.
      topologies: slices, globs and generations: "v5e:16x16", "v5p:4x4x*", "v6e", "all".
      chips: keeps the slices of patterns that have so many chips: "64..512".
      memory_fraction, time_limit_s, seed: as for `plan`, for each slice.
      tokens_per_step: tokens (or images, or examples) of one step, for rates and costs.
      unit: what these are called.
      prices: of chips, or the path of a prices file.
      target_tokens: of a whole run, whose time and cost the rows then tell.
      deadline_s: seconds that the run may take.
      budget: money that the run may cost, in the currency of the prices.
      chip: a profile to use instead of the bundled one of its name.
      workers: processes at a time; as many as there are cores where None.
      name: of the program, where people know it by another than its own.
      on_progress: called when a slice starts, as its search goes on, and when it is done.

    Raises:
      InputError: the function does not trace, a pattern names no slice, or the goal cannot be
        judged with what is given.
    """
    from shardwright.planner.program import Program

    priced = prices if isinstance(prices, Prices) or prices is None else load_prices(prices)
    if tokens_per_step is not None and tokens_per_step < 1:
        raise InputError(
            f"tokens_per_step is {tokens_per_step}", where="compare", do="Give 1 or more"
        )
    goal = Goal(target_tokens=target_tokens, deadline_s=deadline_s, budget=budget)
    check_goal(goal, tokens_per_step, priced)
    slices = choose_slices(
        topologies,
        None if chips is None else parse_chip_range(chips),
        () if chip is None else (chip,),
    )
    if isinstance(fn, Program):
        program = fn
    else:
        program = Program.trace(fn, *args, donate_argnums=donate_argnums)
    tasks = [
        PlanTask(
            program,
            topology=on.name,
            memory_fraction=memory_fraction,
            time_limit_s=time_limit_s,
            seed=seed,
            model_flops=model_flops,
            chip=None if is_bundled(on.chip) else on.chip,
            name=name,
            tokens_per_step=tokens_per_step,
        )
        for on in slices
    ]

    def row_of(task: PlanTask, outcome: Any) -> ComparisonRow:
        if isinstance(outcome, Failure):
            return row_of_failure(task.topology, outcome, task.chip)
        return row_of_plan(outcome, tokens_per_step=tokens_per_step, prices=priced, goal=goal)

    return _run(
        tasks,
        row_of,
        on_progress or (lambda progress: None),
        workers,
        lambda rows: ComparisonModel(
            name=name or program.name,
            unit=unit,
            tokens_per_step=tokens_per_step,
            prices=priced,
            goal=goal,
            rows=rows,
            winners=find_winners(rows),
        ),
    )


def _run(
    tasks: Sequence[PlanTask],
    row_of: Callable[[PlanTask, Any], ComparisonRow],
    report: Callable[[SliceProgress], None],
    workers: int | None,
    table: Callable[[list[ComparisonRow]], ComparisonModel],
) -> Comparison:
    from shardwright.planner.plan import Plan

    rows: dict[int, ComparisonRow] = {}
    plans: dict[int, Plan] = {}
    for position, outcome in run_tasks(
        [task.as_task() for task in tasks],
        workers=workers,
        on_progress=lambda position, progress: report(
            SliceProgress(tasks[position].topology, progress)
        ),
    ):
        task = tasks[position]
        rows[position] = row_of(task, outcome)
        if not isinstance(outcome, Failure):
            program = task.program
            data = with_trees(outcome, program)
            plans[position] = Plan(data, program.in_tree, program.out_tree, program)
        report(SliceProgress(task.topology, row=rows[position]))
    return Comparison(
        table([rows[position] for position in range(len(tasks))]),
        {tasks[position].topology: plans[position] for position in sorted(plans)},
    )
