"""A comparison of slices as a page: a table, who wins, charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from shardwright.planner.comparison_rows import (
    ComparisonModel,
    ComparisonRow,
    cost_of,
    find_winners,
)
from shardwright.reports.comparison_charts import cost_against_time, step_time_against_chips
from shardwright.reports.numbers import column, count, quantity
from shardwright.reports.page import document
from shardwright.reports.sections import environment


def comparison_page(comparison: ComparisonModel) -> str:
    """A self-contained HTML page of a comparison."""
    title = f"{comparison.name} on {len(comparison.rows)} slices"
    head = Markup(
        '<h1>{}</h1>\n<p class="lead">One row a slice, planned by the same measure.</p>\n'
    )
    content = head.format(title) + comparison_sections(comparison.rows, {}, comparison.unit)
    return document(title, content, charts='data-figure="' in content)


def comparison_sections(
    rows: Sequence[ComparisonRow],
    links: Mapping[str, str],
    unit: str = "tokens",
    finished: bool = True,
) -> Markup:
    """The table and the charts of a comparison.

    Args:
      rows: one a slice.
      links: topology -> address of its plan, where there is one.
      unit: what a step works on.
      finished: whether these are all the rows, so that it can be said who wins.
    """
    planned = [row for row in rows if row.fits]
    charts: list[dict[str, Any]] = []
    for number, (title, figure) in enumerate(
        (
            ("Step time against chips, by generation", step_time_against_chips(planned)),
            (f"Cost of a million {unit} against step time", cost_against_time(planned)),
        )
    ):
        if figure is not None:
            charts.append({"id": f"comparison-figure-{number}", "title": title, "figure": figure})
    return Markup(
        environment()
        .get_template("_comparison.html")
        .render(
            table=_table(planned),
            lacking=[row for row in rows if not row.fits],
            links=links,
            unit=unit,
            wins=_wins(rows, unit) if finished else [],
            charts=charts,
            priced=any(row.cost_per_step is not None for row in planned),
        )
    )


def _wins(rows: Sequence[ComparisonRow], unit: str) -> list[dict[str, str]]:
    """Who is best by time, by cost and by chips, with the figure that it wins by."""
    best = find_winners(rows)
    by_name = {row.topology: row for row in rows}
    found = []
    if best.time is not None:
        seconds = quantity(by_name[best.time].step_time_s or 0.0, "s")
        found.append({"name": "Fastest step", "topology": best.time, "detail": seconds})
    if best.cost is not None:
        row = by_name[best.cost]
        of = "a step" if row.cost_per_million_tokens is None else f"a million {unit}"
        detail = f"{cost_of(row):.4g} {of}"
        found.append({"name": "Cheapest", "topology": best.cost, "detail": detail})
    if best.chips is not None:
        chips = f"{by_name[best.chips].chips:,} chips"
        found.append({"name": "Fewest chips that fit", "topology": best.chips, "detail": chips})
    return found


def _table(rows: Sequence[ComparisonRow]) -> dict[str, Any]:
    seconds, times = column([row.step_time_s or 0.0 for row in rows], "s")
    compute_unit, compute = column([row.compute_time_s or 0.0 for row in rows], "s")
    exposed_unit, exposed = column([row.exposed_collective_time_s or 0.0 for row in rows], "s")
    bytes_unit, peaks = column([row.peak_memory_bytes or 0.0 for row in rows], "B")
    return {
        "seconds": seconds,
        "compute_unit": compute_unit,
        "exposed_unit": exposed_unit,
        "bytes": bytes_unit,
        "rows": [
            {
                "row": row,
                "mesh": ", ".join(f"{a}={n}" for a, n in (row.mesh_axes or {}).items()),
                "time": time,
                "compute": busy,
                "exposed": waiting,
                "peak": peak,
                "rate": "" if row.tokens_per_s is None else count(row.tokens_per_s),
                "chip_rate": "" if row.tokens_per_s_chip is None else count(row.tokens_per_s_chip),
            }
            for row, time, busy, waiting, peak in zip(
                rows, times, compute, exposed, peaks, strict=True
            )
        ],
    }
