"""Comparisons as pages: every slice has its row, who wins, charts of what is known."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.planner.comparison_rows import ComparisonModel, ComparisonRow, Goal, find_winners
from shardwright.reports.comparison_charts import cost_against_time, step_time_against_chips
from shardwright.reports.comparison_page import comparison_page, comparison_sections


def row(topology: str, chips: int, seconds: float, **more: Any) -> ComparisonRow:
    return ComparisonRow(
        topology=topology,
        generation=topology.partition(":")[0],
        chips=chips,
        status="planned",
        message="",
        headroom_bytes=1e9,
        mesh_axes={"x": chips},
        step_time_s=seconds,
        compute_time_s=0.9 * seconds,
        exposed_collective_time_s=0.1 * seconds,
        peak_memory_bytes=8e9,
        mfu=0.4,
        tokens_per_s=1000 / seconds,
        tokens_per_s_chip=1000 / seconds / chips,
        **more,
    )


FAST = row("v6e:4x4", 16, 0.5, cost_per_step=3.0, cost_per_million_tokens=3000.0)
CHEAP = row("v5e:4x4", 16, 1.0, cost_per_step=1.0, cost_per_million_tokens=1000.0)
BEATEN = row("v5e:2x4", 8, 2.0, cost_per_step=2.0, cost_per_million_tokens=2000.0)
LACKING = ComparisonRow(
    topology="v5e:1x1",
    generation="v5e",
    chips=1,
    status="does-not-fit",
    message="no sharding fits: <b>3 GB</b> more than may be used",
    headroom_bytes=-3e9,
)
ROWS = [FAST, CHEAP, BEATEN, LACKING]


def traces(figure: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    assert figure is not None
    return {trace["name"]: trace for trace in figure["data"]}


def test_each_generation_is_a_line_of_step_time_over_chips() -> None:
    lines = traces(step_time_against_chips(ROWS))
    assert set(lines) == {"v5e", "v6e"}
    assert lines["v5e"]["x"] == [8, 16]
    assert lines["v5e"]["y"] == [2.0, 1.0]


def test_generations_differ_in_more_than_colour() -> None:
    lines = traces(step_time_against_chips(ROWS))
    assert len({line["marker"]["symbol"] for line in lines.values()}) == len(lines)


def test_the_pareto_front_is_what_none_beats_in_both() -> None:
    drawn = traces(cost_against_time(ROWS))
    assert list(zip(drawn["Pareto front"]["x"], drawn["Pareto front"]["y"], strict=True)) == [
        (0.5, 3000.0),
        (1.0, 1000.0),
    ]


def test_one_slice_or_none_with_a_price_makes_no_chart() -> None:
    assert step_time_against_chips([FAST]) is None
    unpriced = [row("v5e:4x4", 16, 1.0), row("v5e:2x4", 8, 2.0)]
    assert cost_against_time(unpriced) is None


@pytest.mark.parametrize("figure", [step_time_against_chips(ROWS), cost_against_time(ROWS)])
def test_charts_are_figures_that_plotly_accepts(figure: dict[str, Any]) -> None:
    pytest.importorskip("plotly.graph_objects").Figure(figure)


def test_winners_are_told_with_what_they_win_by() -> None:
    text = comparison_sections(ROWS, {})
    for name, topology, detail in (
        ("Fastest step", "v6e:4x4", "500.0 ms"),
        ("Cheapest", "v5e:4x4", "1000 a million tokens"),
        ("Fewest chips that fit", "v5e:2x4", "8 chips"),
    ):
        fact = f'<dt>{name}</dt><dd><span class="value">{topology}</span>'
        assert f'{fact}<span class="detail">{detail}</span>' in text


def test_nobody_has_won_before_all_are_done() -> None:
    assert "Fastest step" not in comparison_sections(ROWS, {}, finished=False)


def test_slices_without_a_plan_say_why_as_text() -> None:
    text = comparison_sections(ROWS, {"v5e:1x1": "/plans/one"})
    assert '<a href="/plans/one">v5e:1x1</a>' in text
    assert "&lt;b&gt;3 GB&lt;/b&gt; more than may be used" in text


def test_a_comparison_is_a_page_of_its_own() -> None:
    comparison = ComparisonModel(
        name="model <i>x</i>",
        unit="tokens",
        tokens_per_step=1000,
        prices=None,
        goal=Goal(),
        rows=ROWS,
        winners=find_winners(ROWS),
    )
    page = comparison_page(comparison)
    assert "<h1>model &lt;i&gt;x&lt;/i&gt; on 4 slices</h1>" in page
    assert "script-src &#39;sha256-" in page
