"""Comparing slices, with real plans."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.cli import main
from shardwright.cli_inputs import load_target
from shardwright.hardware_profiles import load_chip, parse_chip
from shardwright.planner.prices import Prices
from shardwright.planner.workers import Failure, Task, run_tasks

ROWS = 8192


def step(weight, batch):
    return jax.nn.relu(batch @ weight) @ weight.T


ARGUMENTS = (
    jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16),
    jax.ShapeDtypeStruct((ROWS, 1024), jnp.bfloat16),
)


@pytest.fixture(scope="module")
def comparison():
    seen = []
    made = sw.compare(
        step,
        *ARGUMENTS,
        topologies=["v5e:2x2", "v6e:2x2"],
        tokens_per_step=ROWS,
        memory_fraction=0.5,
        time_limit_s=1,
        on_progress=seen.append,
    )
    return made, seen


def test_every_row_is_what_planning_that_slice_alone_says(comparison):
    made, _ = comparison
    for row in made.rows:
        alone = sw.plan(step, *ARGUMENTS, topology=row.topology, memory_fraction=0.5)
        assert row.step_time_s == alone.estimate.step_time_s
        assert row.mesh_axes == alone.mesh_axes
        assert row.tokens_per_s == pytest.approx(ROWS / alone.estimate.step_time_s)


def test_the_winner_by_time_has_the_least_step_time(comparison):
    made, _ = comparison
    least = min(made.rows, key=lambda row: row.step_time_s)
    assert made.data.winners.time == least.topology == "v6e:2x2"


def test_plans_of_the_rows_are_whole(comparison):
    made, _ = comparison
    plan = made.plans["v5e:2x2"]
    assert jax.tree.structure(plan.in_specs) == jax.tree.structure(tuple(ARGUMENTS))
    assert sw.Plan.from_json(plan.to_json()).in_specs == plan.in_specs


def test_progress_tells_the_start_and_the_end_of_every_slice(comparison):
    _, seen = comparison
    for topology in ("v5e:2x2", "v6e:2x2"):
        of_it = [progress for progress in seen if progress.topology == topology]
        assert of_it[0].row is None
        assert of_it[-1].row is not None
        assert any(progress.planning for progress in of_it)


def test_a_slice_too_small_is_a_row_and_the_others_are_planned():
    # Two arrays of 24 GB in all cannot be on one v5e chip of 16 GiB.
    big = jax.ShapeDtypeStruct((12_000_000_000 // 4, 1), jnp.float32)
    made = sw.compare(
        lambda a, b: a + b, big, big, topologies=["v5e:1x1", "v5e:4x4"], time_limit_s=1
    )
    lacking, planned = made.rows
    assert lacking.status == "does-not-fit"
    assert lacking.headroom_bytes < -(24e9 - 0.9 * 2**34) * 0.99
    assert planned.fits
    assert list(made.plans) == ["v5e:4x4"]


def test_a_script_needs_no_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import jax, jax.numpy as jnp, shardwright as sw
        made = sw.compare(lambda x: x @ x, jax.ShapeDtypeStruct((512, 512), jnp.float32),
                          topologies=["v5e:2x2"], time_limit_s=1)
        print("rows", len(made.rows))
        """)
    )
    found = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert found.stdout == "rows 1\n"


def test_a_chip_of_the_users_own_is_planned_and_priced():
    own = load_chip("v5e").model_copy(update={"name": "mine"})
    own = parse_chip(own.model_dump(mode="json"))
    made = sw.compare(
        step,
        *ARGUMENTS,
        topologies=["mine:2x2", "v5e:2x2"],
        chip=own,
        prices=Prices(chip_hour={"mine": 2.0, "v5e": 1.0}),
        time_limit_s=1,
    )
    mine, bundled = made.rows
    assert mine.step_time_s == pytest.approx(bundled.step_time_s)
    assert mine.cost_per_step == pytest.approx(2 * bundled.cost_per_step)
    assert made.data.winners.cost == "v5e:2x2"


# -- the processes that plan ---------------------------------------------------------------------


def test_nothing_to_do_starts_nothing():
    assert list(run_tasks([])) == []


def test_an_error_of_a_task_is_its_result(monkeypatch, tmp_path):
    (tmp_path / "thrower.py").write_text(
        "from shardwright.errors import DoesNotFitError, InputError\n"
        "def work(n, report):\n"
        "    if n == 0: raise InputError('wrong', where='here', do='that')\n"
        "    if n == 1: raise DoesNotFitError('large', least_bytes=3.0, limit_bytes=2.0)\n"
        "    return 1 // 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = dict(run_tasks([Task("thrower:work", n) for n in range(3)], workers=1))
    assert found[0] == Failure("input", "wrong", "here", "that")
    assert (found[1].kind, found[1].least_bytes, found[1].limit_bytes) == ("does-not-fit", 3.0, 2.0)
    assert found[2].kind == "internal"
    assert "ZeroDivisionError" in found[2].what


def test_a_process_that_dies_fails_its_own_task_only(monkeypatch, tmp_path):
    (tmp_path / "deadly.py").write_text(
        "import os, signal\n"
        "def work(n, report):\n"
        "    report(n)\n"
        "    if n == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return n * n\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen = []
    found = dict(
        run_tasks(
            [Task("deadly:work", n) for n in range(4)],
            workers=1,
            on_progress=lambda position, told: seen.append((position, told)),
        )
    )
    assert {n: found[n] for n in (0, 2, 3)} == {0: 0, 2: 4, 3: 9}
    assert isinstance(found[1], Failure)
    assert found[1].kind == "crashed"
    assert "signal 9" in found[1].what
    assert (3, 3) in seen


def test_a_payload_that_does_not_pickle_fails_its_own_task_only(monkeypatch, tmp_path):
    (tmp_path / "sizer.py").write_text("def work(n, report):\n    return str(n)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tasks = [Task("sizer:work", lambda: 0), Task("sizer:work", 1)]
    found = dict(run_tasks(tasks, workers=1))
    assert found[0].kind == "internal"
    assert "pickle" in found[0].what
    assert found[1] == "1"


def test_prints_of_a_task_do_not_harm_its_result(monkeypatch, tmp_path):
    (tmp_path / "talker.py").write_text("def work(n, report):\n    print('hello')\n    return n\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert dict(run_tasks([Task("talker:work", 5)])) == {0: 5}


def test_closing_early_ends_the_processes(monkeypatch, tmp_path):
    (tmp_path / "sleeper.py").write_text(
        "import os, time\ndef work(n, report):\n    if n: time.sleep(600)\n    return os.getpid()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = run_tasks([Task("sleeper:work", n) for n in (0, 1)], workers=1)
    _, pid = next(results)
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# -- the command ---------------------------------------------------------------------------------

SMALL = [f"--set={k}={v}" for k, v in {"features": 256, "hidden": 512, "classes": 64}.items()]


def test_the_command_writes_table_and_plans(tmp_path, capsys):
    prices = tmp_path / "prices.toml"
    prices.write_text("[chip_hour]\nv5e = 1\nv6e = 100\n")
    code = main(
        [
            *("compare", "mlp", "--batch=1024", "--layers=2", *SMALL, "-t", "v5e:2x2,v6e:2x2"),
            *("--prices", str(prices), "--target-tokens", "1B", "--deadline", "30d"),
            *("--time-limit=1", "-o", str(tmp_path / "table.json")),
            *("--save-plans", str(tmp_path / "plans")),
        ]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    table = json.loads((tmp_path / "table.json").read_text())
    # One v6e chip costs a hundred of v5e, and is not a hundred times as fast.
    assert table["winners"]["cost"] == table["winners"]["goal"] == "v5e:2x2"
    assert table["unit"] == "examples"
    assert "examples/s" in out
    assert "The cheapest slice for 1.00 B examples in 30 d is v5e:2x2" in out
    assert "2 of 2: " in err
    plan = sw.Plan.load(tmp_path / "plans" / "v5e-2x2.json")
    (row,) = [row for row in table["rows"] if row["topology"] == "v5e:2x2"]
    assert plan.estimate.step_time_s == row["step_time_s"]


def test_the_command_writes_a_page_with_the_rows(tmp_path, capsys):
    page = tmp_path / "page.html"
    code = main(
        [
            *("compare", "mlp", "--batch=1024", *SMALL, "-t", "v5e:2x2,v6e:2x2"),
            *("--time-limit=1", "-o", str(page), "-q"),
        ]
    )
    assert code == 0
    text = page.read_text()
    assert text.startswith("<!")
    assert "v5e:2x2" in text
    assert "v6e:2x2" in text
    assert "https://" not in text.partition("<body")[2].partition("<script")[0]


@pytest.mark.parametrize(
    ("model", "unit"), [("gpt2-124m", "tokens"), ("mlp", "examples"), ("resnet-50", "images")]
)
def test_what_a_step_works_on_is_called_by_its_name(model, unit):
    assert load_target(model, None, (), {}).unit == unit


def test_the_command_says_where_nothing_fits(capsys):
    code = main(["compare", "gpt2-124m", "-t", "v5e:1x1", "--time-limit=1", "--quiet"])
    out, err = capsys.readouterr()
    assert code == 3
    assert "No plan" in out
    assert "fits on none" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-t", "v5e:2x2", "--deadline", "soon"], "not a duration"),
        (["-t", "v5e:2x2", "--target-tokens", "lots"], "not a count"),
        (["-t", "v5e:2x2", "--deadline", "1d"], "its size is not given"),
        (["-t", "v5e:2x2", "--budget", "5", "--target-tokens", "1B"], "needs prices"),
        (["-t", "v5e:2x2", "--prices", "nowhere.toml"], "cannot be read"),
        (["-t", "v9:*"], "no legal slice"),
        (["-t", "v5e:2x2", "-o", "table.xlsx"], "no form of comparison"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments, words, capsys):
    code = main(["compare", "mlp", *arguments])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
