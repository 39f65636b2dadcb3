"""The arithmetic of comparisons, by hand."""

import pytest

from shardwright.errors import InputError
from shardwright.hardware_profiles import load_chip
from shardwright.planner.comparison_rows import (
    Goal,
    check_goal,
    find_winners,
    pareto_front,
    row_of_failure,
    row_of_plan,
)
from shardwright.planner.plan_schema import (
    EstimateModel,
    OptionsModel,
    PlanModel,
    ProgramModel,
    SolverModel,
    VersionsModel,
)
from shardwright.planner.prices import Prices, load_prices
from shardwright.planner.workers import Failure

PRICES = Prices(currency="USD", chip_hour={"v5e": 1.0, "v5p": 4.0})


def plan(topology="v5e:8x8", step=2.0, peak=10e9):
    """A plan with only what a row reads."""
    chip = load_chip(topology.split("*")[-1].split(":")[0])
    return PlanModel(
        program=ProgramModel(
            name="step",
            fingerprint="f",
            inputs=[],
            outputs=[],
            aliases=[],
            donate_argnums=[],
            in_tree=None,
            out_tree=None,
        ),
        topology=topology,
        chip=chip.model_dump(mode="json"),
        mesh={},
        mesh_axes={"x": 8, "y": 8},
        constraints=[],
        estimate=EstimateModel(
            step_time_s=step,
            compute_time_s=0.75 * step,
            collective_time_s=0.5 * step,
            exposed_collective_time_s=0.25 * step,
            peak_memory_bytes=peak,
            memory_capacity_bytes=16e9,
            mfu=0.4,
            matrix_flops=1e15,
            collectives=[],
            peak_buffers=[],
        ),
        solver=SolverModel(status="optimal", objective=1, bound=1, gap=0, wall_time_s=1),
        meshes_considered=[],
        replicated_ops=[],
        assumptions=[],
        compiler_options={},
        options=OptionsModel(
            topology=topology, mesh=None, pinned={}, memory_fraction=0.9, time_limit_s=1, seed=0
        ),
        versions=VersionsModel(shardwright="0", jax="0", jaxlib="0", platform="tpu"),
    )


def row(topology, step, **options):
    return row_of_plan(plan(topology, step), **{"tokens_per_step": 1000, **options})


def test_rates_are_tokens_over_the_step():
    found = row("v5e:8x8", 2.0)
    assert found.tokens_per_s == 500
    assert found.tokens_per_s_chip == 500 / 64


def test_cost_is_chips_times_price_times_the_step():
    # 64 chips at 1 an hour for 2 s: 64 * 2 / 3600 a step, of 1000 tokens.
    found = row("v5e:8x8", 2.0, prices=PRICES)
    assert found.cost_per_step == pytest.approx(64 * 2 / 3600)
    assert found.cost_per_million_tokens == pytest.approx(64 * 2 / 3600 * 1000)


def test_joined_slices_cost_all_their_chips():
    assert PRICES.per_hour("2*v5e:16x16") == 512


def test_a_slice_may_have_a_price_of_its_own():
    prices = Prices(chip_hour={"v5e": 1.0, "v5e:16x16": 0.5})
    assert prices.per_hour("v5e:16x16") == 128
    assert prices.per_hour("v5e:8x8") == 64


def test_headroom_is_what_may_be_used_and_is_not():
    assert row_of_plan(plan(peak=10e9)).headroom_bytes == pytest.approx(0.9 * 16e9 - 10e9)


def test_a_run_takes_whole_steps():
    found = row("v5e:8x8", 2.0, prices=PRICES, goal=Goal(target_tokens=10_001))
    assert found.run_steps == 11
    assert found.run_time_s == 22
    assert found.run_cost == pytest.approx(11 * 64 * 2 / 3600)


def test_a_slice_that_does_not_fit_lacks_the_difference():
    failure = Failure("does-not-fit", "no", "v5e:8x8", "more", least_bytes=20e9, limit_bytes=14e9)
    found = row_of_failure("v5e:8x8", failure)
    assert not found.fits
    assert found.headroom_bytes == -6e9
    assert found.chips == 64


def test_each_measure_has_its_winner():
    # By time v5p:4x4x4, which costs 4 * 64 * 1 against 1 * 64 * 2 for the same tokens.
    rows = [
        row("v5e:8x8", 2.0, prices=PRICES),
        row("v5p:4x4x4", 1.0, prices=PRICES),
        row("v5e:4x4", 9.0, prices=PRICES),
    ]
    winners = find_winners(rows)
    assert (winners.time, winners.cost, winners.chips) == ("v5p:4x4x4", "v5e:8x8", "v5e:4x4")
    assert winners.goal is None


def test_the_goal_is_the_cheapest_that_is_in_time_and_in_budget():
    goal = Goal(target_tokens=1000 * 3600, deadline_s=1.5 * 3600)  # 3600 steps
    rows = [
        row("v5e:8x8", 2.0, prices=PRICES, goal=goal),  # 2 h for 128
        row("v5p:4x4x4", 1.0, prices=PRICES, goal=goal),  # 1 h for 256
        row("v5p:2x4x4", 1.4, prices=PRICES, goal=goal),  # 1.4 h for 179.2
    ]
    assert [one.meets_goal for one in rows] == [False, True, True]
    assert find_winners(rows).goal == "v5p:2x4x4"


def test_without_prices_the_goal_is_the_fewest_chips_in_time():
    goal = Goal(target_tokens=1000 * 3600, deadline_s=1.5 * 3600)
    rows = [row("v5p:4x4x4", 1.0, goal=goal), row("v5p:2x4x4", 1.4, goal=goal)]
    assert find_winners(rows).goal == "v5p:2x4x4"


def test_nobody_meets_a_goal_out_of_reach():
    goal = Goal(target_tokens=1e12, deadline_s=1.0)
    assert find_winners([row("v5e:8x8", 2.0, goal=goal)]).goal is None


def test_the_pareto_front_is_what_nothing_beats_in_both():
    rows = [
        row("v5e:8x8", 2.0, prices=PRICES),  # 128
        row("v5p:4x4x4", 1.0, prices=PRICES),  # 256
        row("v5p:2x2x4", 3.0, prices=PRICES),  # 192 and slow: beaten
        row("v5e:4x4", 7.0, prices=PRICES),  # 112
    ]
    assert [one.topology for one in pareto_front(rows)] == ["v5p:4x4x4", "v5e:8x8", "v5e:4x4"]


@pytest.mark.parametrize(
    ("goal", "tokens", "prices", "words"),
    [
        (Goal(deadline_s=1), 1000, None, "its size is not given"),
        (Goal(target_tokens=1), None, None, "tokens of one step"),
        (Goal(target_tokens=1, budget=1), 1000, None, "needs prices"),
    ],
)
def test_a_goal_that_cannot_be_judged_is_refused(goal, tokens, prices, words):
    with pytest.raises(InputError, match=words):
        check_goal(goal, tokens, prices)


def test_a_prices_file_is_toml_or_json(tmp_path):
    toml, as_json = tmp_path / "prices.toml", tmp_path / "prices.json"
    toml.write_text('as_of = 2026-01-31\n[chip_hour]\nv5e = 1.5\n"v5e:16x16" = 1\n')
    as_json.write_text('{"as_of": "2026-01-31", "chip_hour": {"v5e": 1.5, "v5e:16x16": 1}}')
    assert load_prices(toml) == load_prices(as_json)
    assert load_prices(toml).per_hour("v5e:2x2") == 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[chip_hour]\nv5e = -1", "chip_hour.v5e"),
        ("[chip_hour]\nv5e = 'dear'", "chip_hour.v5e"),
        ("[chip_hours]\nv5e = 1", "chip_hours"),
        ("chip_hour = {}", "chip_hour"),
        ("[chip_hour", "not TOML"),
    ],
)
def test_a_wrong_prices_file_is_refused_by_its_key(tmp_path, text, words):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load_prices(path)
    assert str(path) in str(caught.value)
