"""Charts of where the step time goes, as plotly figures (see `figures`)."""

from __future__ import annotations

from html import escape

from shardwright.planner.plan_schema import EstimateModel
from shardwright.reports.facts import group_collectives, short_source
from shardwright.reports.figures import Figure, axis, layout
from shardwright.reports.numbers import column, op_text, quantity
from shardwright.reports.palette import LIGHT

_SHOWN = 12
_INSIDE = 0.12
"""Parts of the step time that are at least this wide hold their own label."""


def step_time_figure(estimate: EstimateModel) -> Figure:
    """The step as one bar: compute, and communication that no compute hides."""
    parts = (
        ("compute", "compute", estimate.compute_time_s, ""),
        ("exposed", "exposed communication", estimate.exposed_collective_time_s, "/"),
    )
    whole = estimate.step_time_s or 1.0
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"{name}, {quantity(seconds, 's')}",
            "meta": token,
            "x": [seconds],
            "y": [""],
            "marker": {"color": LIGHT[token], "pattern": {"shape": pattern, "solidity": 0.35}},
            "text": [quantity(seconds, "s") if seconds >= _INSIDE * whole else ""],
            "textposition": "inside",
            "insidetextanchor": "middle",
        }
        for token, name, seconds, pattern in parts
    ]
    return {
        "data": traces,
        "layout": layout(
            barmode="stack",
            xaxis=axis("seconds of one step"),
            yaxis=axis("", showticklabels=False),
            showlegend=True,
        ),
    }


def collectives_figure(estimate: EstimateModel) -> Figure | None:
    """The collectives that cost most, a bar each; None where there are none."""
    groups = group_collectives(estimate)[:_SHOWN][::-1]
    if not groups:
        return None
    unit, _ = column([group.seconds for group in groups], "s")
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}[unit]
    labels = [
        escape(f"{group.kind} over {', '.join(group.axes)}: {op_text(group.op)} ")
        + escape(short_source(group.source, 28))
        for group in groups
    ]
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "meta": token,
                "x": [
                    group.seconds * scale if group.can_hide is hides else None for group in groups
                ],
                "y": list(range(len(groups))),
                "marker": {"color": LIGHT[token], "pattern": {"shape": shape, "solidity": 0.35}},
            }
            for hides, token, shape, name in (
                (False, "exposed", "/", "exposed"),
                (True, "hidden", "", "can hide behind compute"),
            )
        ],
        "layout": layout(
            barmode="stack",
            xaxis=axis(f"{unit} in one step"),
            yaxis=axis("", tickvals=list(range(len(groups))), ticktext=labels),
            showlegend=True,
        ),
    }
