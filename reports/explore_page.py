"""An exploration of hypothetical hardware as a page: a table, charts of the front, what binds."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from shardwright.planner.explore_model import STEP_TIME, ExplorationModel, PointModel
from shardwright.planner.explore_space import TORUS
from shardwright.reports.explore_charts import (
    objective_figures,
    sensitivity_figure,
    values_text,
)
from shardwright.reports.numbers import column, quantity
from shardwright.reports.page import document
from shardwright.reports.sections import environment

_NAMED = 2


def exploration_page(data: ExplorationModel) -> str:
    """A self-contained HTML page of an exploration."""
    title = f"{data.name} around {data.base}"
    planned = sum(point.planned for point in data.points)
    lead = (
        f"{len(data.points)} hypothetical slices, {planned} with a plan. Multiples are of what a "
        f"chip of {data.base} has."
    )
    head = Markup('<h1>{}</h1>\n<p class="lead">{}</p>\n').format(title, lead)
    content = head + _sections(data)
    return document(title, content, charts='data-figure="' in content)


def _sections(data: ExplorationModel) -> Markup:
    figures = objective_figures(data)
    bars = sensitivity_figure(data)
    if bars is not None:
        figures.append(("What holds up the points of the front", bars))
    charts = [
        {"id": f"exploration-figure-{number}", "title": title, "figure": figure}
        for number, (title, figure) in enumerate(figures)
    ]
    planned = [(place, point) for place, point in enumerate(data.points) if point.planned]
    seconds, times = column([point.measure(STEP_TIME) for _, point in planned], "s")
    rows = [
        _row(data, point, time, place in data.front)
        for (place, point), time in zip(planned, times, strict=True)
    ]
    return Markup(
        environment()
        .get_template("_exploration.html")
        .render(
            facts=_facts(data),
            knobs=[knob for knob in data.vary if knob != TORUS],
            seconds=seconds,
            rows=sorted(rows, key=lambda row: row["step"]),
            lacking=[
                {"name": values_text(point), "message": point.message}
                for point in data.points
                if not point.planned
            ],
            charts=charts,
        )
    )


def _row(data: ExplorationModel, point: PointModel, time: str, front: bool) -> dict[str, Any]:
    step = point.measure(STEP_TIME)
    return {
        "torus": point.torus,
        "front": front,
        "knobs": [f"{float(v):g}" for knob, v in point.values.items() if knob != TORUS],
        "step": step,
        "time": time,
        "exposed": 100 * (point.exposed_collective_time_s or 0.0) / step if step else 0.0,
        "memory": 100
        * (point.peak_memory_bytes or 0.0)
        / (point.memory_limit_bytes or 1.0)
        * data.memory_fraction,
        "mfu": 100 * (point.mfu or 0.0),
        "binds": ", ".join(f"{name} {gain:.2f}" for name, gain in point.binding[:_NAMED]),
        "mesh": point.mesh,
    }


def _facts(data: ExplorationModel) -> list[dict[str, str]]:
    planned = [point for point in data.points if point.planned]
    if not planned:
        return []
    fastest = min(planned, key=lambda point: point.measure(STEP_TIME))
    facts = [
        {
            "name": "Fastest",
            "value": quantity(fastest.measure(STEP_TIME), "s"),
            "detail": values_text(fastest),
        },
        {
            "name": "On the front",
            "value": str(len(data.front)),
            "detail": "points that no other beats in "
            + ", ".join(name.replace("_", " ") for name in data.minimise),
        },
    ]
    if fastest.binding:
        name, gain = fastest.binding[0]
        detail = f"1 % more takes {gain:.2f} % off the fastest step"
        facts.append({"name": "Binds the fastest most", "value": name, "detail": detail})
    return facts
