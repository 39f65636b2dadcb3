"""Charts of a comparison of slices, as plotly figures (see `figures`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

from shardwright.planner.comparison_rows import ComparisonRow, cost_of, pareto_front
from shardwright.reports.figures import Figure, axis, layout
from shardwright.reports.numbers import quantity
from shardwright.reports.palette import GENERATION_COLOURS, LIGHT

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "pentagon")


def step_time_against_chips(rows: Sequence[ComparisonRow]) -> Figure | None:
    """Step time against chips, a line for each generation, on logarithmic axes.

    Returns:
      None where fewer than two slices have a plan.
    """
    planned = [row for row in rows if row.step_time_s]
    if len(planned) < 2:
        return None
    traces = []
    for number, generation in enumerate(_generations(planned)):
        own = sorted(
            (row for row in planned if row.generation == generation),
            key=lambda row: (row.chips, row.step_time_s),
        )
        colour, symbol = _look(number)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": generation,
                "meta": f"gen{number % len(GENERATION_COLOURS)}",
                "x": [row.chips for row in own],
                "y": [row.step_time_s for row in own],
                "text": [row.topology for row in own],
                "line": {"color": colour, "width": 1.5},
                "marker": {"color": colour, "symbol": symbol, "size": 9},
                "hovertemplate": "%{text}<br>%{x} chips, %{y:.3g} s",
            }
        )
    chips = sorted({row.chips for row in planned})
    return {
        "data": traces,
        "layout": layout(
            xaxis=axis("chips", type="log", tickvals=chips, ticktext=[f"{n:,}" for n in chips]),
            yaxis=axis("step time", type="log", **_log_ticks([row.step_time_s for row in planned])),
            hovermode="closest",
            showlegend=True,
        ),
    }


def cost_against_time(rows: Sequence[ComparisonRow]) -> Figure | None:
    """Cost against step time with the Pareto front: the slices that none beats in both.

    Cost is of a million tokens, or of a step where tokens are not known.

    Returns:
      None where fewer than two slices have a price.
    """
    priced = [row for row in rows if row.step_time_s and cost_of(row) is not None]
    if len(priced) < 2:
        return None
    traces = []
    for number, generation in enumerate(_generations(priced)):
        own = [row for row in priced if row.generation == generation]
        colour, symbol = _look(number)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": generation,
                "meta": f"gen{number % len(GENERATION_COLOURS)}",
                "x": [row.step_time_s for row in own],
                "y": [cost_of(row) for row in own],
                "text": [row.topology for row in own],
                "marker": {"color": colour, "symbol": symbol, "size": 10},
                "hovertemplate": "%{text}<br>%{x:.3g} s, %{y:.4g}",
            }
        )
    front = pareto_front(priced)
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "meta": "ink",
            "x": [row.step_time_s for row in front],
            "y": [cost_of(row) for row in front],
            "line": {"color": LIGHT["ink"], "width": 1, "dash": "dot", "shape": "hv"},
            "hoverinfo": "skip",
        }
    )
    of_tokens = all(row.cost_per_million_tokens is not None for row in priced)
    what = "cost of a million tokens" if of_tokens else "cost of a step"
    return {
        "data": traces,
        "layout": layout(
            xaxis=axis("step time, s"), yaxis=axis(what), hovermode="closest", showlegend=True
        ),
    }


def _log_ticks(seconds: Sequence[float | None]) -> dict[str, list[Any]]:
    """Ticks at 1, 2 and 5 times the powers of ten around some times."""
    known = [one for one in seconds if one]
    low, high = floor(log10(min(known))), ceil(log10(max(known)))
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in (1, 2, 5)]
    return {"tickvals": ticks, "ticktext": [quantity(tick, "s") for tick in ticks]}


def _generations(rows: Sequence[ComparisonRow]) -> list[str]:
    return list(dict.fromkeys(row.generation for row in rows))


def _look(number: int) -> tuple[str, str]:
    return GENERATION_COLOURS[number % len(GENERATION_COLOURS)], _SYMBOLS[number % len(_SYMBOLS)]
