"""An exploration of hypothetical hardware as people read it in a terminal, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from shardwright.cli_text import table
from shardwright.planner.explore_model import (
    CHIPS,
    MEMORY_USED,
    STEP_TIME,
    ExplorationModel,
    PointModel,
    objective_text,
)
from shardwright.planner.explore_space import TORUS, key_of
from shardwright.reports.explore_charts import values_text
from shardwright.reports.numbers import column, count, quantity

if TYPE_CHECKING:
    from shardwright.planner.explore import PointProgress

_NAMED = 2
_INDENT = (0, 0, 0, 2)


@contextmanager
def exploration_progress(
    console: Console, points: int, *, quiet: bool
) -> Iterator[Callable[[PointProgress], None]]:
    """Shows which points are being planned until the block ends.

    A terminal gets a bar over all points; anything else a line for each that is done.
    """
    if quiet:
        yield lambda progress: None
        return
    if not console.is_terminal:
        done = 0

        def line(progress: PointProgress) -> None:
            nonlocal done
            if progress.point is not None:
                done += 1
                text = (
                    f"{done} of {points}: {values_text(progress.point)} {_became(progress.point)}"
                )
                console.print(text, highlight=False, soft_wrap=True)

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("points", total=points, last="")
        seen: set[str] = set()

        def report(progress: PointProgress) -> None:
            if progress.point is not None:
                seen.add(key_of(progress.values))
                last = f"{values_text(progress.point)} {_became(progress.point)}"
                bar.update(task, completed=len(seen), last=last)

        yield report


def _became(point: PointModel) -> str:
    if point.step_time_s is not None:
        return f"steps in {quantity(point.step_time_s, 's')}"
    return "does not fit" if point.status == "does-not-fit" else point.message


def exploration_view(data: ExplorationModel, everything: bool = False) -> RenderableType:
    """The front as a table, what binds there, and what has no plan.

    Args:
      everything: every planned point instead of those of the front.
    """
    planned = [point for point in data.points if point.planned]
    lacking = [point for point in data.points if not point.planned]
    work = f", {count(data.tokens_per_step)} {data.unit} a step" if data.tokens_per_step else ""
    parts: list[RenderableType] = [
        Text.assemble((data.name, "bold"), " around ", (data.base, "bold"), work),
        Text(
            f"{len(data.points)} hypothetical slices, {len(planned)} with a plan; multiples are of "
            f"what a chip of {data.base} has",
            "dim",
        ),
    ]
    if planned:
        objectives = ", ".join(map(objective_text, data.minimise))
        heading = Text.assemble(("Pareto front", "bold"), (f"  least {objectives}", "dim"))
        parts += [Text(), heading, Padding(_points(data, everything), _INDENT, expand=False)]
        left = len(planned) - len(data.front)
        if left and not everything:
            noun = "point is" if left == 1 else "points are"
            parts.append(Text(f"  {left} more {noun} beaten; --all shows them", "dim"))
        parts += [Text(), *_binding(data)]
    if lacking:
        parts += [Text(), Text("No plan", "bold")]
        parts += [
            Text.assemble("  ", (values_text(one), "bold"), f"  {one.message}") for one in lacking
        ]
    return Group(*parts)


def _points(data: ExplorationModel, everything: bool) -> RenderableType:
    shown = list(data.front)
    if everything:
        rest = [p for p, point in enumerate(data.points) if point.planned and p not in data.front]
        shown = sorted([*shown, *rest], key=lambda p: data.points[p].measure(STEP_TIME))
    points = [data.points[place] for place in shown]
    unit, times = column([point.measure(STEP_TIME) for point in points], "s")
    knobs = [knob for knob in data.vary if knob != TORUS]
    others = [name for name in data.minimise if name != STEP_TIME and _differs(points, name)]
    headers = ["front"] if everything else []
    headers += ["torus", *(f">{knob}" for knob in knobs), f">step {unit}"]
    headers += [f">{_heading(name)}" for name in others]
    rows = table(*headers, ">exposed", ">memory", "binds")
    for place, point, time in zip(shown, points, times, strict=True):
        step = point.measure(STEP_TIME)
        exposed = (point.exposed_collective_time_s or 0.0) / step if step else 0.0
        memory = (point.peak_memory_bytes or 0.0) / (point.memory_limit_bytes or 1.0)
        mark = [Text("*" if place in data.front else "", "green")] if everything else []
        rows.add_row(
            *mark,
            point.torus,
            *(f"{float(point.values[knob]):g}" for knob in knobs),
            time,
            *(_measured(point, name) for name in others),
            f"{100 * exposed:.0f} %",
            f"{100 * memory * data.memory_fraction:.0f} %",
            ", ".join(f"{name} {gain:.2f}" for name, gain in point.binding[:_NAMED]) or "nothing",
        )
    return rows


def _differs(points: Sequence[PointModel], name: str) -> bool:
    """Whether an objective is another number than a knob of the table."""
    return any(point.values.get(name, 1.0) != point.measure(name) for point in points)


def _heading(name: str) -> str:
    told = {CHIPS: "chips", MEMORY_USED: "used"}
    return told.get(name) or f"{name.partition('_')[0]} a chip"


def _measured(point: PointModel, name: str) -> str:
    value = point.measure(name)
    return quantity(value, "B") if name == MEMORY_USED else f"{value:,.4g}"


def _binding(data: ExplorationModel) -> list[RenderableType]:
    """What binds most, at how many points of the front."""
    first = [data.points[place].binding[0][0] for place in data.front if data.points[place].binding]
    if not first:
        return []
    told = [
        f"{name} at {first.count(name)} of {len(data.front)}"
        for name in sorted(set(first), key=lambda name: -first.count(name))
    ]
    return [
        Text(f"Binds most: {', '.join(told)} points of the front"),
        Text("binds: percent of the step that 1 % more of a resource takes off", "dim"),
    ]
