"""The published instance format and the command."""

import gzip
import json
import subprocess
import sys

import pytest

from shardwright.errors import InputError
from shardwright.planner.solver.__main__ import main
from shardwright.planner.solver.instance_format import read_instance

# The shape of the example in the contest's description: google/iopddl, README.
INSTANCE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[40, 60], [0, 70], [30, 70], [60, 90], [10, 90]],
            "costs": [[100, 200], [0], [0, 0, 0], [40], [30, 40, 50]],
            "usages": [[10, 15], [25], [15, 20, 25], [10], [20, 25, 10]],
        },
        "edges": {
            "nodes": [[0, 2], [1, 2], [2, 3], [3, 4]],
            "costs": [
                [20, 30, 40, 10, 10, 10],
                [30, 20, 10],
                [10, 0, 10],
                [10**18, 30, 10],
            ],
        },
        "usage_limit": 100,
    }
}


def changed(path, value):
    document = json.loads(json.dumps(INSTANCE))
    place = document
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


@pytest.fixture
def instance(tmp_path):
    path = tmp_path / "example.json.gz"
    path.write_bytes(gzip.compress(json.dumps(INSTANCE).encode()))
    return path


def test_tables_are_read_row_by_row(instance):
    problem = read_instance(instance)
    assert problem.edges[0].cost.tolist() == [[20, 30, 40], [10, 10, 10]]
    assert problem.memory[1].usage.tolist() == [25]
    assert problem.memory_limit == 100


def test_time_is_the_points_at_which_an_interval_begins_or_ends(instance):
    problem = read_instance(instance)
    given = INSTANCE["problem"]["nodes"]["intervals"]
    points = sorted({time for interval in given for time in interval})
    assert [[points[t.start], points[t.end]] for t in problem.memory] == given


def test_plain_json_is_read_too(tmp_path):
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(INSTANCE))
    assert len(read_instance(path).costs) == 5


def test_the_command_prints_one_json_line_and_writes_the_choices(instance, tmp_path, capsys):
    output = tmp_path / "solution.json"
    assert main([str(instance), "--time-limit", "10", "--seed", "0", "-o", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    # By hand, over the strategies of nodes 0, 2 and 4: node 0 takes 0; then node 2 costs
    # 20+30+10=60, 30+20+0=50 or 40+10+10=60; node 4 (0 is forbidden) 40+30=70 or 50+10=60.
    assert line["status"] == "optimal"
    assert line["cost"] == line["bound"] == 100 + 40 + 50 + 60
    assert line["gap"] == 0
    # From 40 to 60 nodes 0, 1, 2 and 4 are live: 10 + 25 + 20 + 10.
    assert (line["peak"], line["limit"]) == (65, 100)
    assert json.loads(output.read_text()) == [0, 0, 1, 0, 2]


def test_an_instance_that_does_not_fit_says_how_much_would(tmp_path, capsys):
    path = tmp_path / "tight.json"
    path.write_text(json.dumps(changed(["problem", "usage_limit"], 50)))
    assert main([str(path), "--time-limit", "10"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["status"] == "infeasible"
    # The least of each allowed: 10 + 25 + 15 + 10.
    assert (line["least_peak"], line["least_peak_proven"]) == (60, True)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "lacks 'problem'"),
        ({"problem": []}, "published format"),
        (changed(["problem", "nodes", "costs"], None), "lacks 'costs'"),
        (changed(["problem", "nodes", "costs", 1], ["x"]), "costs of node 1.*whole numbers"),
        (changed(["problem", "nodes", "usages", 0], [1.5, 2]), "usages of node 0.*whole numbers"),
        (changed(["problem", "nodes", "costs", 1], [10**20]), "costs of node 1.*64 bits"),
        (changed(["problem", "nodes", "intervals", 0], [0.5, 2]), "interval of node 0.*whole"),
        (changed(["problem", "nodes", "intervals", 0], [-1, 2]), "interval of node 0.*-1"),
        (changed(["problem", "edges"], 7), "lacks 'edges'"),
        (changed(["problem", "edges", "nodes", 2], ["2", 3]), "edge 2.*whole numbers"),
        (changed(["problem", "usage_limit"], "much"), "usage_limit.*'much'"),
        (changed(["problem", "nodes", "usages", 0], [1]), "memory term 0"),
        (changed(["problem", "edges", "nodes", 2], [2, 9]), "edge 2: joins 2 and 9"),
        (changed(["problem", "edges", "costs", 1], [30]), "edge 1: 1 costs for 1 x 3"),
        (changed(["problem", "nodes", "intervals"], [[0, 1]]), "1 intervals for 5 nodes"),
    ],
)
def test_a_malformed_instance_is_one_clear_line(document, message, tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    with pytest.raises(InputError, match=message):
        read_instance(path)


def solved(nodes, edges, limit, tmp_path, capsys):
    """What the command says of (interval, costs, usages) of nodes."""
    intervals, costs, usages = zip(*nodes, strict=True)
    problem = {"nodes": {"intervals": intervals, "costs": costs, "usages": usages}}
    problem |= {"edges": edges, "usage_limit": limit}
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"problem": problem}))
    assert main([str(path), "--time-limit", "10"]) == 0
    return json.loads(capsys.readouterr().out)


NO_EDGES: dict[str, list[object]] = {"nodes": [], "costs": []}


def test_intervals_may_be_as_long_as_numbers_are(tmp_path, capsys):
    # They share the last moment of the first.
    nodes = [([0, 10**15], [5, 3], [1, 9]), ([10**15 - 1, 2 * 10**15], [4, 1], [2, 8])]
    told = solved(nodes, NO_EDGES, 9, tmp_path, capsys)
    assert (told["status"], told["cost"], told["peak"]) == ("optimal", 5 + 1, 1 + 8)


def test_usages_whose_sum_64_bits_do_not_hold_never_fit(tmp_path, capsys):
    told = solved([([0, 2], [1, 5], [5 * 10**18, 9])] * 3, NO_EDGES, 100, tmp_path, capsys)
    assert (told["status"], told["cost"], told["peak"]) == ("optimal", 15, 27)


def test_a_cycle_that_pairs_forbid_has_no_choice(tmp_path, capsys):
    apart = [10**18, 0, 0, 10**18]
    edges = {"nodes": [[0, 1], [1, 2], [0, 2]], "costs": [apart] * 3}
    told = solved([([0, 1], [0, 0], [1, 1])] * 3, edges, 9, tmp_path, capsys)
    assert told["status"] == "infeasible"
    assert told["least_peak"] is None and told["least_peak_proven"] is True


def test_the_bound_of_costs_beyond_what_floats_hold_is_not_above_the_cost(tmp_path, capsys):
    most = 10**18
    pair = {"nodes": [[0, 1]], "costs": [[most - 1, most - 2, most - 3, most - 4]]}
    nodes = [([0, 2], [most - 1, most - 2], [1, 9]), ([0, 2], [most - 1, most - 3], [3, 1])]
    told = solved(nodes, pair, 4, tmp_path, capsys)
    # The first strategy of the first node, and whichever of the second costs less with it.
    best = (most - 1) + (most - 3) + (most - 2)
    assert best <= told["cost"] <= best * (1 + 1e-9)
    assert told["bound"] <= told["cost"]


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8bnot gzip", b"\xff\xfe"])
def test_what_is_not_json_is_refused(content, tmp_path, capsys):
    path = tmp_path / "bad.json.gz"
    path.write_bytes(content)
    assert main([str(path)]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_command_runs_as_a_module_without_jax(instance):
    code = (
        "import sys, runpy; sys.argv = ['solver', sys.argv[1]]\n"
        "try: runpy.run_module('shardwright.planner.solver', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(instance)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "optimal"


def test_what_libraries_print_meanwhile_is_not_in_the_output():
    code = (
        "import os\n"
        "from shardwright.planner.solver.console import library_output_dropped\n"
        "with library_output_dropped(): os.write(1, b'note')\n"
        "print('answer')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("answer\n", "")
