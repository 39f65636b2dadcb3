"""Bad input ends with one line on stderr that says what was wrong, and the right exit code."""

import contextlib
import io
import json
import os
import subprocess
import sys

import pytest

from shardwright import Plan, cli
from shardwright.cli import main

MLP = ["mlp", "-t", "v5e:2x2", "--set=features=256", "--set=hidden=512", "--batch=1024"]
STEP = ["trainer:step", "-t", "v5e:2x2", "--args=trainer:arguments"]

TRAINER = """
import jax
import jax.numpy as jnp

def step(w, x):
    return w + x.T @ x, x.sum()

def crooked(w, x):
    wide = w @ w
    return wide @ jnp.ones((3, 3))

def arguments():
    return jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)

listed = [1, 2]

def failing():
    raise ValueError("the data set is gone\\nsecond line")
"""
PROGRAM = (
    "module { func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> { return %a : tensor<8xf32> } }"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with the files that the cases name."""
    files = {
        "trainer.py": TRAINER,
        "without.py": "import a_package_that_is_missing\n",
        "typo.py": "def step(:\n",
        "script.py": "import sys\nsys.exit(3)\n",
        "garbage.mlir": "module { garbage",
        "headless.mlir": PROGRAM.replace("@main", "@other"),
        "program.mlir": PROGRAM,
        "empty.mlir": "",
        "foreign.json": '{"answer": 42}',
        "list.json": "[1, 2]",
        "cut.json": '{"schema_version": 1, "program": {"name": "st',
        "damaged.json": '{"schema_version": 1, "program": {"name": "step"}}',
        "future.json": '{"schema_version": 999}',
        "specs.toml": '"[9]*" = "data"\n',
        "cut.toml": '"[9]*" = ',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)) * 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("trainer", "without", "typo", "script"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


BAD = {
    "no target": (["plan", "-t", "v5e:2x2"], ["nothing to plan", "llama3-8b"]),
    "no topology": (["plan", "mlp"], ["--topology v5e:16x16", "shardwright hardware"]),
    "unknown option": (["plan", *MLP, "--fast"], ["--fast"]),
    "unknown command": (["paln"], ["paln"]),
    "unknown slice": (["plan", "mlp", "-t", "v5e:16x17"], ["v5e:16x17", "v5e:16x16"]),
    "unknown chip": (["plan", "mlp", "-t", "v9:2x2"], ["v9", "v5e", "tpu7x"]),
    "unknown model": (["plan", "llama9", "-t", "v5e:2x2"], ["llama9", "llama3-8b"]),
    "unknown model option": (["plan", *MLP, "--set=depth=3"], ["'depth'", "hidden"]),
    "model option of another model": (["plan", *MLP, "--sequence=3"], ["'sequence'"]),
    "wrong value of a model option": (["plan", *MLP, "--set=layers=many"], ["'layers'"]),
    "setting without a value": (["plan", *MLP, "--set=layers"], ["--set", "layers"]),
    "model option for a function": (["plan", *STEP, "--batch=8"], ["function", "batch=8"]),
    "arguments for a model": (["plan", *MLP, "--args=trainer:arguments"], ["--args"]),
    "donation for a file": (["plan", "program.mlir", "-t", "v5e:2x2", "--donate=0"], ["--donate"]),
    "no arguments": (["plan", "trainer:step", "-t", "v5e:2x2"], ["trainer:step", "--args"]),
    "arguments in a list": (["plan", *STEP, "--args=trainer:listed"], ["list", "tuple"]),
    "arguments that raise": (["plan", *STEP, "--args=trainer:failing"], ["the data set is gone"]),
    "function that is missing": (["plan", "trainer:stap", *STEP[1:]], ["stap", "step"]),
    "missing function without arguments": (
        ["plan", "trainer:stap", "-t", "v5e:2x2"],
        ["there is no 'stap'", "step"],
    ),
    "function that is none": (["plan", "trainer:listed", *STEP[1:]], ["list", "function"]),
    "function that does not trace": (["plan", "trainer:crooked", *STEP[1:]], ["(trainer.py:10)"]),
    "donation out of range": (["plan", *STEP, "--donate=7"], ["7"]),
    "module that is missing": (["plan", "trianer:step", *STEP[1:]], ["No module named 'trianer'"]),
    "module that does not import": (["plan", "without:step", *STEP[1:]], ["(without.py:1)"]),
    "module with a syntax error": (["plan", "typo:step", *STEP[1:]], ["typo.py", "line 1"]),
    "module that exits": (["plan", "script:step", *STEP[1:]], ["SystemExit", "script.py:2"]),
    "python file": (["plan", "trainer.py:step", *STEP[1:]], ["trainer.py", "module"]),
    "no module and name": (["plan", *STEP, "--args=trainer:"], ["'trainer:'"]),
    "missing file": (["plan", "missing.mlir", "-t", "v5e:2x2"], ["missing.mlir", "no such file"]),
    "directory": (["plan", "./", "-t", "v5e:2x2"], ["directory"]),
    "text that is no StableHLO": (["plan", "garbage.mlir", "-t", "v5e:2x2"], ["garbage.mlir"]),
    "module without main": (["plan", "headless.mlir", "-t", "v5e:2x2"], ["main"]),
    "empty file": (["plan", "empty.mlir", "-t", "v5e:2x2"], ["empty.mlir", "empty"]),
    "bytes that are nothing": (["plan", "noise.bin", "-t", "v5e:2x2"], ["noise.bin"]),
    "plan instead of a program": (["plan", "cut.json", "-t", "v5e:2x2"], ["show cut.json"]),
    "missing plan": (["show", "missing.json"], ["missing.json"]),
    "truncated plan": (["show", "cut.json"], ["cut.json", "not whole JSON"]),
    "damaged plan": (["show", "damaged.json"], ["damaged.json", "program.fingerprint"]),
    "plan of another version": (["show", "future.json"], ["999"]),
    "foreign JSON": (["show", "foreign.json"], ["foreign.json", "not a Shardwright plan"]),
    "foreign JSON list": (["show", "list.json"], ["list.json", "not a Shardwright plan"]),
    "bytes instead of a plan": (["show", "noise.bin"], ["noise.bin"]),
    "mesh of a wrong product": (["plan", *MLP, "--mesh=data=3,model=2"], ["6 devices", "has 4"]),
    "mesh that is none": (["plan", *MLP, "--mesh=data"], ["--mesh", "'data'"]),
    "pin without a mesh": (["plan", *STEP, "--pin=[0]=data"], ["mesh"]),
    "pin that is none": (["plan", *STEP, "--mesh=data=4", "--pin=data"], ["--pin"]),
    "pins that disagree": (
        ["plan", *STEP, "--mesh=data=4", "--pin=[0]=data", "--pin=[0]=None,data"],
        ["--pin", "[0] is pinned to two shardings"],
    ),
    "no time limit to explain": (
        ["explain", "plan.json", "w", "--time-limit=nan"],
        ["--time-limit", "Give more than 0"],
    ),
    "endless time limit": (["plan", *STEP, "--time-limit=inf"], ["--time-limit"]),
    "pin of no argument": (["plan", *STEP, "--mesh=data=4", "--pin=[7]=data"], ["[7]", "[0]"]),
    "pin to no axis": (["plan", *STEP, "--mesh=data=4", "--pin=[0]=model"], ["'model'", "data"]),
    "pin that does not divide": (
        ["plan", "mlp", "-t", "v5e:2x2", "--batch=6", "--mesh=data=4", "--pin=[1]['labels']=data"],
        ["[1]['labels']", "6", "4 parts"],
    ),
    "memory fraction above 1": (["plan", *MLP, "--memory-fraction=1.5"], ["1.5", "up to 1"]),
    "memory fraction of 0": (["plan", *MLP, "--memory-fraction=0"], ["--memory-fraction"]),
    "no time": (["plan", *MLP, "--time-limit=0"], ["--time-limit"]),
    "foreign chip": (["plan", *MLP, "--chip=foreign.json"], ["foreign.json", "Field required"]),
    "missing chip": (["plan", *MLP, "--chip=missing.json"], ["missing.json"]),
    "output in no directory": (["plan", *MLP, "-o", "no/plan.json"], ["no/plan.json"]),
    "output that is a directory": (["plan", *MLP, "-o", "."], ["directory"]),
    "specs that match nothing": (
        ["evaluate", *STEP, "--mesh=data=4", "--spec=specs.toml"],
        ["[9]*", "[0]"],
    ),
    "specs that are no TOML": (["evaluate", *STEP, "--mesh=data=4", "--spec=cut.toml"], ["TOML"]),
    "missing specs": (
        ["evaluate", *STEP, "--mesh=data=4", "--spec=missing.toml"],
        ["missing.toml"],
    ),
    "unknown chip to show": (["hardware", "v9"], ["'v9'", "v5e"]),
    "unknown model to show": (["models", "gpt9"], ["'gpt9'", "gpt2-124m"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_line(name, here):
    arguments, parts = BAD[name]
    quiet = ["--quiet"] if arguments[0] in ("plan", "evaluate") else []
    code, out, err = run(*arguments, *quiet)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


def test_program_that_does_not_fit_has_an_exit_code_of_its_own(here):
    # 620.8M parameters, two moments, f32: 7.4 GB over 4 devices of 17.2 GB, of which 0.86 GB may
    # be used: 1.9 GB of state alone.
    code, out, err = run("plan", "mlp", "-t", "v5e:2x2", "--memory-fraction=0.05", "--quiet")
    assert (code, out) == (3, "")
    (line,) = err.splitlines()
    assert line.startswith("error: v5e:2x2") and "858.99 MB" in line


def test_sharding_that_does_not_fit_is_priced_and_has_that_exit_code(here):
    (here / "replicated.toml").write_text('"*" = ""\n', "utf-8")
    evaluate = ["evaluate", *MLP, "--mesh=a=2,b=2", "--spec=replicated.toml"]
    code, out, _ = run(*evaluate)
    assert code == 0 and "90 % allowed" in out and "does not fit" not in " ".join(out.split())
    # Three 512 x 512 weights in f32 with gradient and two moments are 12.6 MB.
    code, out, err = run(*evaluate, "--memory-fraction=0.0002")
    assert code == 3 and "does not fit" in " ".join(out.split())
    assert err.splitlines()[-1].startswith("error: ") and "3.44 MB may be used" in err


def test_what_no_time_would_make_fit_is_not_advised_more_time(here):
    _, _, err = run(
        "plan", "mlp", "-t", "v5e:2x2", "--memory-fraction=0.05", "--quiet", "--time-limit=0.1"
    )
    assert "time" not in err.partition(". ")[2]
    # The state alone, 1.9 GB a device, is over the limit.
    assert "smaller batch does not help" in err


def test_bad_output_is_told_before_any_work(here, monkeypatch):
    def fail(*_):
        raise AssertionError("loaded the target first")

    monkeypatch.setattr(cli.inputs, "load_target", fail)
    code, _, err = run("plan", *MLP, "-o", "no/plan.json")
    assert code == 2
    assert err.startswith("error: no/plan.json")


def test_plan_that_failed_leaves_the_old_file(here):
    (here / "plan.json").write_text("the old plan", "utf-8")
    code, _, _ = run("plan", "trainer:crooked", *STEP[1:], "-o", "plan.json")
    assert code == 2
    assert (here / "plan.json").read_text("utf-8") == "the old plan"


def test_chip_of_the_users_own_is_planned_for(here):
    _, text, _ = run("hardware", "v5e", "--json")
    profile = json.loads(text)
    profile["name"] = "mine"
    profile["hbm_bandwidth"]["value"] /= 2
    (here / "mine.json").write_text(json.dumps(profile), "utf-8")
    plans = []
    for topology, chip in (("v5e:2x2", []), ("mine:2x2", ["--chip=mine.json"])):
        code, out, err = run("plan", *STEP, "-t", topology, *chip, "--mesh=a=2,b=2", "--json")
        assert code == 0, err
        plans.append(Plan.from_json(out))
    assert plans[1].data.topology == "mine:2x2"
    assert plans[1].estimate.compute_time_s > plans[0].estimate.compute_time_s


def test_fault_of_the_program_itself_is_one_line_unless_asked(here, monkeypatch):
    def fail(*_):
        raise KeyError("axis")

    monkeypatch.setattr(cli.inputs, "load_target", fail)
    monkeypatch.delenv("SHARDWRIGHT_DEBUG", raising=False)
    code, _, err = run("plan", *MLP, "--quiet")
    assert code == 1
    assert err == "error: a fault of Shardwright itself: KeyError: 'axis'\n"
    monkeypatch.setenv("SHARDWRIGHT_DEBUG", "1")
    assert "Traceback" in run("plan", *MLP, "--quiet")[2]


def test_process_ends_with_the_exit_code_and_no_traceback(here):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    script = "import sys; from shardwright.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", "trainer:crooked", *STEP[1:], "--quiet"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: crooked")
