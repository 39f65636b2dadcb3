"""`shardwright trace`: the predicted step for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwright import cli_inputs as inputs
from shardwright.cli_console import print_note
from shardwright.cli_work import planning


def trace(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's JSON file.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write to this file; PLAN.trace.json beside it by default."
        ),
    ] = None,
) -> None:
    """Writes the predicted step as trace events: open the file in ui.perfetto.dev.

    It shows the cost model's step (kernels in program order, collectives that stop them, gathers
    of weights beside them), not the compiler's schedule.
    """
    written = output or path.with_suffix(".trace.json")
    inputs.check_output(written)
    with planning(quiet=True):
        from shardwright.planner.plan import Plan
        from shardwright.planner.trace_events import trace as trace_of

        events = trace_of(Plan.load(path).data)
    written.write_text(json.dumps(events) + "\n", encoding="utf-8")
    print_note(f"written to {written}: open it in https://ui.perfetto.dev")
