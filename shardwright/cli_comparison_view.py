"""A comparison of slices as people read it in a terminal, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from shardwright.cli_quantities import duration_text, money_text
from shardwright.cli_text import table
from shardwright.reports.numbers import column, count, quantity

if TYPE_CHECKING:
    from shardwright.planner.comparison import SliceProgress
    from shardwright.planner.comparison_rows import ComparisonModel, ComparisonRow

_MARKS = {"time": "fastest", "cost": "cheapest", "chips": "fewest chips"}


@contextmanager
def comparison_progress(
    console: Console, slices: int, *, quiet: bool
) -> Iterator[Callable[[SliceProgress], None]]:
    """Shows which slices are being planned until the block ends.

    A terminal gets a bar over all slices and a line for each that is being planned; anything
    else a line for each that is done.
    """
    if quiet:
        yield lambda progress: None
    elif console.is_terminal:
        with _live(console, slices) as report:
            yield report
    else:
        done = 0

        def report_line(progress: SliceProgress) -> None:
            nonlocal done
            if progress.row is not None:
                done += 1
                text = f"{done} of {slices}: {progress.topology} {outcome_text(progress.row)}"
                console.print(text, highlight=False, soft_wrap=True)

        yield report_line


@contextmanager
def _live(console: Console, slices: int) -> Iterator[Callable[[SliceProgress], None]]:
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]:<16}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        overall = bar.add_task("slices", total=slices, best="")
        running: dict[str, TaskID] = {}

        def report(progress: SliceProgress) -> None:
            name = progress.topology
            if progress.row is not None:
                if name in running:
                    bar.remove_task(running.pop(name))
                bar.advance(overall)
                return
            if name not in running:
                running[name] = bar.add_task(name, total=None, best="")
            if (now := progress.planning) is not None:
                best = "" if now.best_step_s is None else f"best {quantity(now.best_step_s, 's')}"
                bar.update(
                    running[name],
                    total=now.meshes or None,
                    completed=now.meshes_tried,
                    best=best,
                )

        yield report


def outcome_text(row: ComparisonRow) -> str:
    """What became of one slice, in a few words."""
    if row.step_time_s is not None:
        return f"steps in {quantity(row.step_time_s, 's')}"
    if row.status == "does-not-fit":
        lacking = "" if row.headroom_bytes is None else f", {_lacking(row)}"
        return f"does not fit{lacking}"
    return row.message


def _lacking(row: ComparisonRow) -> str:
    return f"{quantity(-(row.headroom_bytes or 0.0), 'B')} a device too much"


def comparison_view(comparison: ComparisonModel) -> RenderableType:
    """The whole table, its winners, and why slices have no plan."""
    rows = comparison.rows
    planned = [row for row in rows if row.fits]
    failed = [row for row in rows if not row.fits]
    parts: list[RenderableType] = [_title(comparison)]
    if planned:
        parts += [Text(), _plans(comparison, planned)]
        rates = _rates(comparison, planned)
        parts += [] if rates is None else [Text(), rates]
        parts += [Text(), _winners(comparison)]
    if failed:
        parts += [Text(), Text("No plan", "bold")]
        parts += [
            Text.assemble("  ", (row.topology, "bold"), f"  {_reason(row)}") for row in failed
        ]
    return Group(*parts)


def _reason(row: ComparisonRow) -> str:
    if row.status == "does-not-fit":
        return row.message.removeprefix(f"{row.topology}: ")
    return row.message


def _title(comparison: ComparisonModel) -> Text:
    rows, per_step = len(comparison.rows), comparison.tokens_per_step
    work = f", {count(per_step)} {comparison.unit} a step" if per_step else ""
    text = Text.assemble((comparison.name, "bold"), f" on {rows} slice{'s'[: rows != 1]}{work}")
    prices = comparison.prices
    if prices is not None:
        told = [prices.source, f"as of {prices.as_of}" if prices.as_of else ""]
        origin = ", ".join(part for part in told if part)
        text.append(f"; prices in {prices.currency}{f' ({origin})' if origin else ''}", "dim")
    return text


def _plans(comparison: ComparisonModel, planned: list[ComparisonRow]) -> RenderableType:
    unit, steps = column([row.step_time_s or 0.0 for row in planned], "s")
    computes = _in_unit([row.compute_time_s or 0.0 for row in planned], unit)
    exposed = _in_unit([row.exposed_collective_time_s or 0.0 for row in planned], unit)
    size_unit, free = column([row.headroom_bytes or 0.0 for row in planned], "B")
    headers = ("slice", ">chips", "mesh", f">step {unit}", ">compute", ">exposed")
    shown = table(*headers, f">free {size_unit}", ">MFU", "")
    for row, step, compute, rest, room in zip(planned, steps, computes, exposed, free, strict=True):
        mesh = ", ".join(f"{axis}={size}" for axis, size in (row.mesh_axes or {}).items())
        cells: list[Text | str] = [
            row.topology,
            f"{row.chips:,}",
            Text(mesh, "dim"),
            step,
            compute,
            rest,
            room,
        ]
        shown.add_row(*cells, f"{100 * (row.mfu or 0.0):.1f} %", _marks(comparison, row))
    return shown


def _rates(comparison: ComparisonModel, planned: list[ComparisonRow]) -> RenderableType | None:
    """Rates, costs and the whole run; None where nothing is known of any."""
    unit = comparison.unit
    columns: list[tuple[str, Callable[[ComparisonRow], str]]] = []
    if comparison.tokens_per_step is not None:
        columns.append((f">{unit}/s", lambda row: count(row.tokens_per_s or 0.0)))
        columns.append((">a chip", lambda row: count(row.tokens_per_s_chip or 0.0)))
    if any(row.cost_per_step is not None for row in planned):
        columns.append((">cost a step", lambda row: _money(row.cost_per_step)))
    if any(row.cost_per_million_tokens is not None for row in planned):
        columns.append((f">cost of 1 M {unit}", lambda row: _money(row.cost_per_million_tokens)))
    if any(row.run_time_s is not None for row in planned):
        columns.append((">whole run", lambda row: duration_text(row.run_time_s or 0.0)))
    if any(row.run_cost is not None for row in planned):
        columns.append((">its cost", lambda row: _money(row.run_cost)))
    if not columns:
        return None
    shown = table("slice", *(header for header, _ in columns))
    for row in planned:
        shown.add_row(row.topology, *(cell(row) for _, cell in columns))
    return shown


def _in_unit(values: list[float], unit: str) -> list[str]:
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    digits = 1 if max(values, default=0.0) / scale >= 10 else 2
    return [f"{value / scale:.{digits}f}" for value in values]


def _money(value: float | None) -> str:
    return "-" if value is None else money_text(value)


def _marks(comparison: ComparisonModel, row: ComparisonRow) -> Text:
    winners = comparison.winners
    won = [word for key, word in _MARKS.items() if getattr(winners, key) == row.topology]
    text = Text(", ".join(won), "green")
    if row.meets_goal is False:
        text.append(f"{'; ' if won else ''}misses the goal", "yellow")
    return text


def _winners(comparison: ComparisonModel) -> Text:
    winners, goal = comparison.winners, comparison.goal
    told = [
        f"{word} {topology}"
        for key, word in _MARKS.items()
        if (topology := getattr(winners, key)) is not None
    ]
    text = Text.assemble(("Winners", "bold"), "  ", "; ".join(told))
    if goal.deadline_s is None and goal.budget is None:
        return text
    limits = [] if goal.deadline_s is None else [f"in {duration_text(goal.deadline_s)}"]
    if goal.budget is not None:
        currency = comparison.prices.currency if comparison.prices else ""
        limits.append(f"for {money_text(goal.budget)} {currency}")
    asked = f"{count(goal.target_tokens or 0.0)} {comparison.unit} {' and '.join(limits)}"
    if winners.goal is None:
        text.append(f"\nNo slice does {asked}", "yellow")
        return text
    row = next(row for row in comparison.rows if row.topology == winners.goal)
    cost = "" if row.run_cost is None else f", {money_text(row.run_cost)}"
    measure = "cheapest" if row.run_cost is not None else "smallest"
    run = duration_text(row.run_time_s or 0.0)
    text.append(f"\nThe {measure} slice for {asked} is {winners.goal}: {run}{cost}", "green")
    return text
