"""What people see on stderr while a plan is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from shardwright.reports.facts import STAGES
from shardwright.reports.numbers import quantity

if TYPE_CHECKING:
    from shardwright.planner.search import Progress

Report = Callable[["Progress"], None]

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress_display(console: Console, *, quiet: bool) -> Iterator[Report]:
    """Shows how far planning is until the block ends.

    A terminal gets one line that keeps changing and goes away at the end; anything else gets a
    line at every stage and at every better plan, and one every few seconds of search.

    Args:
      console: to write to, on stderr.
      quiet: shows nothing.

    Yields:
      what to call with each `Progress`.
    """
    if quiet:
        yield lambda progress: None
    elif console.is_terminal:
        with _live(console) as report:
            yield report
    else:
        console.print(STAGES["load"])
        yield _lines(console)


@contextmanager
def _live(console: Console) -> Iterator[Report]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<21}"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[meshes]:<14}"),
        TextColumn("{task.fields[best]:<16}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(STAGES["load"], total=None, meshes="", best="")

        def report(progress: Progress) -> None:
            searching = progress.meshes > 0
            bar.update(
                task,
                description=STAGES.get(progress.stage, progress.stage),
                completed=progress.meshes_tried,
                total=progress.meshes if searching else None,
                meshes=f"{progress.meshes_tried} of {progress.meshes}" if searching else "",
                best=f"best {_best(progress)}" if progress.best_step_s is not None else "",
            )

        yield report


def _lines(console: Console) -> Report:
    last_stage, last_best, last_time = "", float("inf"), 0.0

    def report(progress: Progress) -> None:
        nonlocal last_stage, last_best, last_time
        now = time.monotonic()
        best = float("inf") if progress.best_step_s is None else progress.best_step_s
        waited = now - last_time >= _SECONDS_BETWEEN_LINES
        if progress.stage == last_stage and best >= last_best and not waited:
            return
        last_stage, last_best, last_time = progress.stage, best, now
        line = STAGES.get(progress.stage, progress.stage)
        if progress.meshes:
            line += f": {progress.meshes_tried} of {progress.meshes} tried"
            line += f", best {_best(progress)}" if progress.best_step_s is not None else ""
            line += f", now {progress.message}" if progress.message else ""
        console.print(line, highlight=False, soft_wrap=True)

    return report


def _best(progress: Progress) -> str:
    return quantity(progress.best_step_s or 0.0, "s")
