"""Sweeps over a grid: saved point by point, resumed, written as tables."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import psutil
import pytest
from pyarrow import parquet

from shardwright.batch.grid import grid
from shardwright.batch.journal import open_journal
from shardwright.batch.sweep import run_sweep
from shardwright.batch.tables import flat
from shardwright.cli import main
from shardwright.errors import InputError
from shardwright.planner.workers import Failure

TINY = {"layers": [1], "features": [128], "hidden": [128], "classes": [128]}
ENVIRONMENT = os.environ | {"RAY_AUTH_MODE": "disabled"}  # no token in the home directory
POINTS = 40
RAY_POINTS = 16


def command(output, points, *more):
    """The real command, for so many points of one tiny layer."""
    batches = ",".join(str(8 * n) for n in range(1, points + 1))
    sizes = [f"--set={name}={values[0]}" for name, values in TINY.items()]
    arguments = ["sweep", "-m", "mlp", "-t", "v5e:1x1", "--batch", batches, *sizes]
    code = "import sys; from shardwright.cli import main; sys.exit(main())"
    arguments += ["--time-limit=0.5", "-o", str(output), *more]
    return [sys.executable, "-c", code, *arguments]


def lines(journal):
    return journal.read_text().splitlines() if journal.exists() else []


def kill_after(process, journal, count):
    """Kills a sweep and its terminal once so many points are finished."""
    deadline = time.monotonic() + 300
    while len(lines(journal)) < count:
        assert process.poll() is None, "the sweep ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    return children


def check_resumed(tmp_path, points, *more):
    output, journal = tmp_path / "table.csv", tmp_path / "table.csv.jsonl"
    process = subprocess.Popen(
        command(output, points, *more), stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    children = kill_after(process, journal, points // 3)
    _, alive = psutil.wait_procs(children, timeout=20)
    left = [child.pid for child in alive]
    for child in alive:
        child.kill()
    data = journal.read_bytes()
    first = data[: data.rfind(b"\n") + 1].decode().splitlines()
    assert points // 3 <= len(first) < points
    found = subprocess.run(
        command(output, points, *more),
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
        env=ENVIRONMENT,
    )
    both = lines(journal)
    assert both[: len(first)] == first
    keys = [json.loads(line)["key"] for line in both]
    assert len(keys) == len(set(keys)) == points
    assert found.stderr.count(" of ") >= points - len(first)
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["option_batch"]) for row in rows] == [8 * n for n in range(1, points + 1)]
    assert all(row["status"] == "planned" for row in rows)
    return left


def test_a_killed_sweep_goes_on_without_repeating_a_point(tmp_path):
    assert check_resumed(tmp_path, POINTS) == []


def test_a_killed_sweep_on_ray_goes_on_without_repeating_a_point(tmp_path):
    # The agents of Ray's own node may outlive it for a while.
    check_resumed(tmp_path, RAY_POINTS, "--ray", "local")


# -- without planning ----------------------------------------------------------------------------


def failing_runner(kind):
    """Fails every point, and remembers which it was given."""
    given = []

    def run(work):
        given.extend(one.point for one in work)
        for position, _ in enumerate(work):
            yield position, Failure(kind, "no")

    return run, given


def test_what_does_not_fit_is_finished_and_what_crashed_is_tried_again(tmp_path):
    points = grid(["mlp"], ["v5e:1x1", "v5e:2x2"])
    for kind, again in (("does-not-fit", 0), ("input", 0), ("crashed", 2)):
        run, given = failing_runner(kind)
        run_sweep(points, tmp_path / f"{kind}.jsonl", runner=run)
        records = run_sweep(points, tmp_path / f"{kind}.jsonl", runner=run)
        assert len(given) == 2 + again
        assert [record.row.status for record in records] == [kind] * 2


def test_a_line_that_was_cut_off_is_planned_again(tmp_path):
    points, journal = grid(["mlp"], ["v5e:1x1", "v5e:2x2"]), tmp_path / "j.jsonl"
    run, given = failing_runner("input")
    run_sweep(points, journal, runner=run)
    journal.write_bytes(journal.read_bytes()[:-30])
    given.clear()
    run_sweep(points, journal, runner=run)
    assert given == points[1:]
    assert len(lines(journal)) == 2


def test_a_larger_grid_plans_only_its_new_points(tmp_path):
    run, given = failing_runner("input")
    run_sweep(grid(["mlp"], ["v5e:1x1"]), tmp_path / "j.jsonl", runner=run)
    given.clear()
    wider = grid(["mlp"], ["v5e:1x1", "v5e:2x2"])
    records = run_sweep(wider, tmp_path / "j.jsonl", runner=run)
    assert [point.topology for point in given] == ["v5e:2x2"]
    assert [record.point for record in records] == wider


def test_two_sweeps_cannot_write_one_journal(tmp_path):
    with (
        open_journal(tmp_path / "j.jsonl"),
        pytest.raises(InputError, match="another sweep"),
        open_journal(tmp_path / "j.jsonl"),
    ):
        pass


def test_a_foreign_journal_is_refused(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_text('{"hello": 1}\n')
    with pytest.raises(InputError, match="line 1 is no finished point"), open_journal(path):
        pass
    assert path.read_text() == '{"hello": 1}\n'


def test_a_grid_is_every_combination_with_programs_together():
    points = grid(["a", "b"], ["v5e:1x1", "v5e:2x2"], {"batch": [1, 2], "remat": ["none", "full"]})
    assert len(points) == len({point.key for point in points}) == 16
    programs = [(point.target, tuple(point.options.items())) for point in points]
    changes = sum(a != b for a, b in pairwise(programs))
    assert changes == len(set(programs)) - 1


def test_a_point_has_a_key_of_its_own_for_every_option():
    base = grid(["mlp"], ["v5e:1x1"])[0]
    others = [
        grid(["mlp"], ["v5e:1x1"], {"batch": [1]})[0],
        grid(["mlp"], ["v5e:2x2"])[0],
        grid(["mlp"], ["v5e:1x1"], seed=1)[0],
        grid(["mlp"], ["v5e:1x1"], memory_fraction=0.8)[0],
    ]
    assert len({base.key, *(point.key for point in others)}) == 5


# -- tables --------------------------------------------------------------------------------------


def sweep(*arguments):
    sizes = [f"--set={name}={values[0]}" for name, values in TINY.items()]
    return main(["sweep", "-m", "mlp", *sizes, "--time-limit=0.5", "-q", *map(str, arguments)])


def test_all_forms_of_table_say_the_same(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[chip_hour]\nv5e = 1\n")
    tables = [tmp_path / f"t{suffix}" for suffix in (".parquet", ".csv", ".json")]
    for table in tables:
        # One journal for the three: only the first plans anything.
        journal = tables[0].with_name(tables[0].name + ".jsonl")
        if table != tables[0]:
            os.link(journal, table.with_name(table.name + ".jsonl"))
        code = sweep("--batch", "8,16", "-t", "v5e:1x1,v5e:2x2", "--prices", prices, "-o", table)
        assert code == 0
    from_parquet = parquet.read_table(tables[0]).to_pylist()
    from_json = json.loads(tables[2].read_text())
    with tables[1].open() as file:
        from_csv = list(csv.DictReader(file))
    assert from_parquet == from_json
    assert len(from_json) == len(from_csv) == 4
    for row, text in zip(from_json, from_csv, strict=True):
        assert text == {k: "" if v is None else str(v) for k, v in row.items()}
    assert {(row["option_batch"], row["topology"]) for row in from_json} == {
        (batch, on) for batch in (8, 16) for on in ("v5e:1x1", "v5e:2x2")
    }
    assert all(row["cost_per_step"] > 0 for row in from_json)


def test_columns_are_the_same_for_every_point(tmp_path):
    run, _ = failing_runner("input")
    points = grid(["a"], ["v5e:1x1"], {"batch": [1]}) + grid(["b"], ["v5e:1x1"])
    rows = flat(run_sweep(points, tmp_path / "j.jsonl", runner=run))
    assert rows[0].keys() == rows[1].keys()
    assert [row["option_batch"] for row in rows] == [1, None]


def test_microbatches_take_less_memory(tmp_path):
    table = tmp_path / "t.json"
    sizes = ["--layers=2", "--batch=64", "--microbatches=1,4", "-t", "v5e:2x2"]
    code = main(["sweep", "-m", "gpt2-124m", *sizes, "--time-limit=1", "-q", "-o", str(table)])
    assert code == 0
    whole, parts = json.loads(table.read_text())
    assert (whole["option_microbatches"], parts["option_microbatches"]) == (1, 4)
    assert parts["peak_memory_bytes"] < whole["peak_memory_bytes"]


def test_wrong_options_are_points_that_say_so(tmp_path):
    assert sweep("--set", "colour=1,2", "-t", "v5e:1x1", "-o", tmp_path / "t.json") == 0
    rows = json.loads((tmp_path / "t.json").read_text())
    assert [row["status"] for row in rows] == ["input", "input"]
    assert "unknown option 'colour'" in rows[0]["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-t", "v5e:1x1", "-o", "t.xlsx"], "no form of table"),
        (["-t", "v5e:1x1", "-o", "t.csv", "--set", "batch"], "not key=values"),
        (["-t", "v5e:1x1", "-o", "t.csv", "--batch", ","], "batch has no values"),
        (["-t", "v5e:1x1", "-o", "no/t.csv"], "cannot be written"),
        (["-t", "v5e:9x9", "-o", "t.csv"], "nearest first"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert sweep(*arguments) == 2
    err = capsys.readouterr()[1]
    assert words in err
    assert err.count("\n") == 1


def test_an_interrupted_sweep_leaves_no_process(tmp_path):
    output = tmp_path / "table.csv"
    process = subprocess.Popen(command(output, 50), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not lines(tmp_path / "table.csv.jsonl"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
