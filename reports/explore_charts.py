"""Charts of an exploration of hypothetical hardware, as plotly figures (see `figures`)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardwright.planner.explore_model import (
    CHIPS,
    MEMORY_USED,
    STEP_TIME,
    ExplorationModel,
    PointModel,
    objective_text,
    pareto_front,
)
from shardwright.planner.explore_space import TORUS
from shardwright.reports.figures import Figure, axis, layout
from shardwright.reports.numbers import column, quantity
from shardwright.reports.palette import GENERATION_COLOURS, LIGHT

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "pentagon")
_MOST_BARS = 24
_BAR_HEIGHT = 22
_GB = 1e9


def values_text(point: PointModel) -> str:
    """What makes a point, in short: "ici_bandwidth x0.5, hbm_bandwidth x2, 8x8"."""
    turned = [f"{k} ×{float(v):g}" for k, v in point.values.items() if k != TORUS]
    return ", ".join([*turned, *([point.torus] if TORUS in point.values else [])])


def objective_figures(data: ExplorationModel) -> list[tuple[str, Figure]]:
    """The step time against each other objective: titles and figures."""
    planned = [point for point in data.points if point.planned]
    if len(planned) < 2:
        return []
    return [
        (f"Step time against {objective_text(name)}", step_time_against(data, name))
        for name in data.minimise
        if name != STEP_TIME
    ]


def step_time_against(data: ExplorationModel, objective: str) -> Figure:
    """All points in the plane of the step time and one other objective, with the front in it.

    The line is the front of these two alone: the least step time for so much or less of the
    other, whatever else it takes. Ringed points are on the front of all objectives.
    """
    planned = [point for point in data.points if point.planned]
    scale = _GB if objective == MEMORY_USED else 1.0
    unit, _ = column([point.measure(STEP_TIME) for point in planned], "s")
    per = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}[unit]

    def trace(points: Sequence[PointModel], **look: object) -> Figure:
        return {
            "type": "scatter",
            "x": [point.measure(objective) / scale for point in points],
            "y": [point.measure(STEP_TIME) * per for point in points],
            **look,
        }

    traces = []
    for number, torus in enumerate(dict.fromkeys(point.torus for point in planned)):
        own = [point for point in planned if point.torus == torus]
        colour = GENERATION_COLOURS[number % len(GENERATION_COLOURS)]
        traces.append(
            trace(
                own,
                mode="markers",
                name=torus,
                meta=f"gen{number % len(GENERATION_COLOURS)}",
                text=[escape(values_text(point)) for point in own],
                marker={
                    "color": colour,
                    "symbol": _SYMBOLS[number % len(_SYMBOLS)],
                    "size": 9,
                    "opacity": 0.75,
                },
                hovertemplate=f"%{{text}}<br>%{{y:.4g}} {unit}",
            )
        )
    traces.append(
        trace(
            [data.points[place] for place in data.front],
            mode="markers",
            name="Pareto front",
            meta="ink",
            marker={"color": LIGHT["ink"], "symbol": "circle-open", "size": 15},
            hoverinfo="skip",
        )
    )
    edge = [planned[place] for place in pareto_front(planned, (STEP_TIME, objective))]
    traces.append(
        trace(
            sorted(edge, key=lambda point: point.measure(objective)),
            mode="lines",
            name="least step time",
            meta="ink",
            line={"color": LIGHT["ink"], "width": 1, "dash": "dot", "shape": "hv"},
            hoverinfo="skip",
        )
    )
    return {
        "data": traces,
        "layout": layout(
            xaxis=axis(_axis_text(objective, data.base)),
            yaxis=axis(f"step time, {unit}", rangemode="tozero"),
            hovermode="closest",
            showlegend=True,
        ),
    }


def _axis_text(objective: str, base: str) -> str:
    if objective == CHIPS:
        return "chips"
    if objective == MEMORY_USED:
        return "memory used, GB a device"
    return f"{objective_text(objective)}, times that of {base.partition(':')[0]}"


def sensitivity_figure(data: ExplorationModel) -> Figure | None:
    """What holds up the points of the front: the gain of 1 % more of each resource.

    Returns:
      None where no point is planned.
    """
    front = [data.points[place] for place in data.front[:_MOST_BARS]]
    names = [name for name in (front[0].sensitivity if front else ()) if _felt(front, name)]
    if not names:
        return None
    labels = [f"{values_text(p)}: {quantity(p.measure(STEP_TIME), 's')}" for p in front]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "meta": f"gen{number % len(GENERATION_COLOURS)}",
            "x": [max(0.0, -point.sensitivity.get(name, 0.0)) for point in front],
            "y": [escape(label) for label in labels],
            "marker": {"color": GENERATION_COLOURS[number % len(GENERATION_COLOURS)]},
            "hovertemplate": f"%{{y}}<br>1 % more {name}: %{{x:.2f}} % faster",
        }
        for number, name in enumerate(names)
    ]
    return {
        "data": traces,
        "layout": layout(
            barmode="stack",
            height=140 + _BAR_HEIGHT * len(front),
            xaxis=axis("percent that 1 % more of each takes off the step"),
            yaxis=axis("", autorange="reversed", showgrid=False),
            hovermode="closest",
            showlegend=True,
        ),
    }


def _felt(points: Sequence[PointModel], name: str) -> bool:
    return any(name in dict(point.binding) for point in points)
