"""Charts as plotly figures: plain data that plotly.js draws and plotly's image export reads.

Colours are those of the light palette. What has a name of the palette as its `meta` (a trace) or
`name` (a shape) is drawn in the colours of the page's scheme instead where a page shows it. Figures
whose key is in a table beside them say so in their layout's `meta`, and go without a legend on
narrow screens.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from shardwright.planner.plan_schema import EstimateModel
from shardwright.reports.facts import short_source
from shardwright.reports.numbers import quantity
from shardwright.reports.palette import LIGHT

Figure = dict[str, Any]

KINDS = {
    "state": "state: parameters and optimizer",
    "input": "other arguments",
    "loop": "carried by loops: saved activations, gradient sums",
    "collective": "left by collectives",
    "result": "results",
    "temporary": "temporaries",
}
"""What people call the kinds of buffers of `MemoryModel`, in the order they are stacked."""

_PATTERNS = {"loop": "/", "collective": "."}
_GB = 1e9
_SHOW_CAPACITY_FROM = 0.35
_LEAST_BAND = 0.02


def layout(**more: Any) -> Figure:
    """What all charts share."""
    base: Figure = {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": LIGHT["ink"]},
        "paper_bgcolor": LIGHT["paper"],
        "plot_bgcolor": LIGHT["paper"],
        "margin": {"l": 64, "r": 16, "t": 24, "b": 48},
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "y": -0.28, "yanchor": "top", "x": 0},
    }
    return base | more


def axis(title: str, **more: Any) -> Figure:
    """An axis of a chart."""
    base: Figure = {
        "title": {"text": title},
        "gridcolor": LIGHT["rule"],
        "linecolor": LIGHT["rule"],
        "zeroline": False,
        "automargin": True,
    }
    return base | more


def memory_figure(estimate: EstimateModel, memory_fraction: float) -> Figure | None:
    """Memory over the step, stacked by kind; None where the plan does not have it.

    Args:
      estimate: of a plan.
      memory_fraction: part of the capacity that the plan may use.
    """
    memory = estimate.memory
    if memory is None or not memory.positions:
        return None
    places = [
        escape(short_source(memory.sources[number])) if number >= 0 else ""
        for number in memory.source_of
    ]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "meta": kind,
            "x": memory.positions,
            "y": [nbytes / _GB for nbytes in memory.nbytes[kind]],
            "stackgroup": "memory",
            "line": {"shape": "hv", "width": 0.5, "color": LIGHT[kind]},
            "fillcolor": LIGHT[kind],
            "fillpattern": {
                "shape": _PATTERNS.get(kind, ""),
                "fillmode": "overlay",
                "fgcolor": LIGHT["paper"],
                "size": 7,
                "solidity": 0.2,
            },
            "hovertemplate": "%{y:.2f} GB",
        }
        for kind, name in KINDS.items()
        if kind in memory.nbytes
    ]
    totals = _totals(memory.nbytes)
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "total",
            "meta": "ink",
            "x": memory.positions,
            "y": [total / _GB for total in totals],
            "line": {"shape": "hv", "width": 1.2, "color": LIGHT["ink"]},
            "text": places,
            "hovertemplate": "%{y:.2f} GB<br>%{text}",
        }
    )
    peak, capacity = estimate.peak_memory_bytes, estimate.memory_capacity_bytes
    with_capacity = peak > _SHOW_CAPACITY_FROM * capacity
    top = 1.06 * max(peak * 1.08, capacity if with_capacity else 0.0)
    shapes = _loop_bands(estimate)
    notes = _loop_notes(estimate)
    if with_capacity:
        for level, text in (
            (capacity, f"capacity {quantity(capacity, 'B')}"),
            (capacity * memory_fraction, f"{100 * memory_fraction:.0f} % allowed"),
        ):
            shapes.append(_level(level / _GB))
            notes.append(_note(text, 1.0, level / _GB, xref="paper", xanchor="right"))
    at = totals.index(max(totals))
    notes.append(
        _note(f"peak {quantity(peak, 'B')}", memory.positions[at], peak / _GB, showarrow=True)
    )
    return {
        "data": traces,
        "layout": layout(
            xaxis=axis("operations in program order, loop bodies once", showgrid=False),
            yaxis=axis("GB a device", range=[0, top / _GB]),
            hovermode="x unified",
            shapes=shapes,
            annotations=notes,
            meta={"keyed": True},
        ),
    }


def _totals(nbytes: dict[str, list[int]]) -> list[int]:
    return [sum(row) for row in zip(*nbytes.values(), strict=True)]


def _loops(estimate: EstimateModel) -> Sequence[tuple[int, int, float]]:
    """Loops wide enough to be seen: first, last, trips."""
    memory = estimate.memory
    if memory is None:
        return ()
    least = _LEAST_BAND * memory.operations
    return [(x.first, x.last, x.trips) for x in memory.loops if x.last - x.first >= least]


def _loop_bands(estimate: EstimateModel) -> list[Figure]:
    return [
        {
            "type": "rect",
            "name": "rule",
            "layer": "below",
            "xref": "x",
            "yref": "paper",
            "x0": first,
            "x1": last,
            "y0": 0,
            "y1": 1,
            "fillcolor": LIGHT["rule"],
            "opacity": 0.35,
            "line": {"width": 0},
        }
        for first, last, _ in _loops(estimate)
    ]


def _loop_notes(estimate: EstimateModel) -> list[Figure]:
    return [
        _note(f"loop × {trips:g}", (first + last) / 2, 1.0, yref="paper", yanchor="bottom")
        for first, last, trips in _loops(estimate)
    ]


def _level(height: float) -> Figure:
    return {
        "type": "line",
        "name": "quiet",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": height,
        "y1": height,
        "line": {"color": LIGHT["quiet"], "width": 1, "dash": "dash"},
    }


def _note(text: str, x: float, y: float, **more: Any) -> Figure:
    base: Figure = {"text": text, "x": x, "y": y, "showarrow": False, "yanchor": "bottom"}
    if more.get("showarrow"):
        base |= {
            "ax": 0,
            "ay": -28,
            "arrowhead": 2,
            "bgcolor": LIGHT["paper"],
            "arrowcolor": LIGHT["ink"],
        }
    return base | more
