"""`shardwright report`: a plan as one HTML page, and as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardwright import cli_inputs as inputs
from shardwright.cli_console import print_note
from shardwright.cli_work import planning
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.planner.plan_schema import PlanModel


def report(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's JSON file.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the page to this HTML file; beside the plan by default."
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write pictures as PNG files to a folder.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write pictures as SVG files to a folder.")
    ] = None,
) -> None:
    """Makes a page of a plan that needs no network and no other file, or pictures of it.

    With --png or --svg the page is written only where -o names it. Pictures of charts are drawn
    by an installed Chrome or Chromium.
    """
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise InputError(
            f"a page is an HTML file, and this ends in {output.suffix or 'nothing'}",
            where=str(output),
            do="Give -o plan.html; for pictures give --png DIR or --svg DIR",
        )
    page = output if output is not None or png or svg else path.with_suffix(".html")
    if page is not None:
        inputs.check_output(page)
    with planning(quiet=True):
        from shardwright.planner.plan import Plan

        plan = Plan.load(path).data
    if page is not None:
        page.write_text(_page_of(plan), encoding="utf-8")
        print_note(f"written to {page}")
    if png is not None:
        _write_pictures(plan, png, "png")
    if svg is not None:
        _write_pictures(plan, svg, "svg")


def _write_pictures(plan: PlanModel, folder: Path, form: Literal["png", "svg"]) -> None:
    from shardwright.reports.pictures import write_pictures

    files = write_pictures(plan, folder, form)
    print_note(f"written to {folder}: {', '.join(file.name for file in files)}")


def _page_of(plan: PlanModel) -> str:
    try:
        from shardwright.reports.page import plan_page

        return plan_page(plan)
    except ModuleNotFoundError as error:
        raise InputError(
            f"the package {error.name} is not installed",
            where="report",
            do='Install what reports need: pip install "shardwright[report]"',
        ) from None
