"""Static pictures of a plan for papers and slides: SVG and PNG files in the light palette.

The torus is drawn here; charts are drawn by plotly.js in a headless Chrome or Chromium, which the
package kaleido finds (or BROWSER_PATH names).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from shardwright.errors import InputError
from shardwright.planner.comparison_rows import ComparisonModel
from shardwright.planner.plan_schema import PlanModel
from shardwright.reports.comparison_charts import cost_against_time, step_time_against_chips
from shardwright.reports.figures import Figure, memory_figure
from shardwright.reports.time_figures import collectives_figure, step_time_figure
from shardwright.reports.torus import lay_out
from shardwright.reports.torus_svg import shown_axes, torus_svg
from shardwright.reports.views import logical_mesh

Format = Literal["svg", "png"]
_SCALE = 2
_COMPARISON_SIZE = (900, 520)
_SIZES = {"step-time": (900, 220), "memory": (1000, 460), "collectives": (1000, 460)}


def torus_pictures(plan: PlanModel) -> dict[str, str]:
    """Name of a file without its suffix -> SVG: one picture for each mesh axis."""
    mesh = logical_mesh(plan)
    return {f"torus-{axis}": torus_svg(mesh, axis) for axis in shown_axes(mesh)}


def charts(plan: PlanModel) -> dict[str, Figure]:
    """Name of a file without its suffix -> plotly figure, of those that the plan has data for."""
    figures = {
        "step-time": step_time_figure(plan.estimate),
        "memory": memory_figure(plan.estimate, plan.options.memory_fraction),
        "collectives": collectives_figure(plan.estimate),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def write_pictures(plan: PlanModel, folder: Path, form: Format) -> list[Path]:
    """Writes every picture of a plan.

    Args:
      folder: made where it is missing.
      form: of the files.

    Returns:
      the files.

    Raises:
      InputError: the folder cannot be written, kaleido is not installed, or there is no browser.
    """
    with _folder(folder):
        tori = torus_pictures(plan)
        drawn = {name: (figure, _SIZES[name]) for name, figure in charts(plan).items()}
        if form == "svg":
            for name, text in tori.items():
                (folder / f"{name}.svg").write_text(text, encoding="utf-8")
        else:
            layout = lay_out(logical_mesh(plan))
            size = (round(layout.width), round(layout.height))
            drawn |= {name: (_framed(text, *size), size) for name, text in tori.items()}
        _draw({folder / f"{name}.{form}": chart for name, chart in drawn.items()}, form)
    return sorted(folder / f"{name}.{form}" for name in tori | drawn)


def write_comparison_pictures(
    comparison: ComparisonModel, folder: Path, form: Format
) -> list[Path]:
    """Writes the charts of a comparison: those that its rows have data for.

    Arguments, result and errors are those of `write_pictures`.
    """
    planned = [row for row in comparison.rows if row.fits]
    figures = {
        "step-time-against-chips": step_time_against_chips(planned),
        "cost-against-time": cost_against_time(planned),
    }
    drawn = {
        folder / f"{name}.{form}": (figure, _COMPARISON_SIZE)
        for name, figure in figures.items()
        if figure is not None
    }
    with _folder(folder):
        _draw(drawn, form)
    return sorted(drawn)


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Makes a folder, and tells what cannot be written into it as an InputError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(
            f"pictures cannot be written here ({error.strerror})",
            where=str(path),
            do="Give a folder that can be made and written",
        ) from None


def _framed(svg: str, width: int, height: int) -> Figure:
    """A figure that holds nothing but an SVG picture, for the browser to turn into pixels."""
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    hidden = {"visible": False, "range": [0, 1], "fixedrange": True}
    image = {
        "source": source,
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": 1,
        "sizex": 1,
        "sizey": 1,
        "sizing": "stretch",
    }
    margin = dict.fromkeys("lrtb", 0)
    return {
        "data": [],
        "layout": {
            "width": width,
            "height": height,
            "margin": margin,
            "images": [image],
            "xaxis": hidden,
            "yaxis": hidden,
        },
    }


def _draw(figures: Mapping[Path, tuple[Figure, tuple[int, int]]], form: Format) -> None:
    """Draws all figures in one browser, which asks nobody for anything."""
    try:
        kaleido: Any = import_module("kaleido")
        no_browser: Any = import_module("choreographer.errors").ChromeNotFoundError
    except ModuleNotFoundError:
        raise InputError(
            "the package kaleido is not installed",
            where="pictures",
            do='Install it: pip install "shardwright[pictures]"',
        ) from None
    jobs: list[dict[str, Any]] = [
        {
            "fig": figure,
            "path": str(path),
            "opts": {
                "format": form,
                "width": width,
                "height": height,
                "scale": _SCALE if form == "png" else 1,
            },
        }
        for path, (figure, (width, height)) in figures.items()
    ]
    own_page = kaleido.PageGenerator(mathjax=False)
    try:
        kaleido.write_fig_from_object_sync(jobs, kopts={"page_generator": own_page})
    except no_browser:
        raise InputError(
            "there is no Chrome or Chromium to draw charts with",
            where="pictures",
            do="Install one, or set BROWSER_PATH to where it is",
        ) from None
