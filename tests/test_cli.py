"""The commands, run as a user runs them."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from shardwright import Plan
from shardwright.cli import main
from shardwright.hardware_profiles import chip_names, legal_slices, load_chip, parse_chip
from shardwright.models import build, model_names
from shardwright.version import VERSION

SIZES = {"features": 256, "hidden": 512, "layers": 2, "classes": 64, "batch": 1024}
MLP = ["mlp", "-t", "v5e:2x2", *(f"--set={key}={value}" for key, value in SIZES.items())]


def run(*arguments):
    """Exit code, stdout and stderr of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def run_process(*arguments, cwd, **options):
    """The same in a process of its own, without what this one has set."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "COLUMNS")}
    return subprocess.run(
        [sys.executable, "-c", "import sys; from shardwright.cli import main; sys.exit(main())"]
        + [str(argument) for argument in arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=environment,
        **options,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of a small reference model: its path and what was printed."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    code, out, err = run("plan", *MLP, "-o", path)
    assert code == 0, err
    return path, out, err


def spec_shown(text, path):
    """The sharding on the line of a tensor, as mesh axes of each dimension."""
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith(path)]
    entries = eval(re.search(r"P\(.*?\)(?=\s)", line)[0], {"P": lambda *entries: entries})
    return [[] if e is None else [e] if isinstance(e, str) else list(e) for e in entries]


def without_trailing_empty(spec):
    return spec[: max((i + 1 for i, axes in enumerate(spec) if axes), default=0)]


def test_plan_writes_a_plan_that_loads(planned):
    path, _, err = planned
    plan = Plan.load(path)
    assert plan.data.topology == "v5e:2x2"
    assert plan.data.program.donate_argnums == [0]
    assert f"written to {path}" in err


def test_plan_shows_the_shardings_of_its_file(planned):
    path, out, _ = planned
    inputs = {tensor.path: tensor for tensor in Plan.load(path).data.program.inputs}
    weight = inputs["[0]['params']['layers'][1]['w']"]
    shown = spec_shown(out, "[0]['params']['layers'][1]['w']")
    assert shown == without_trailing_empty(weight.spec)


def test_show_all_tells_the_sharding_of_every_argument(planned):
    path, _, _ = planned
    code, out, err = run("show", path, "--all")
    assert (code, err) == (0, "")
    for tensor in Plan.load(path).data.program.inputs:
        shardings = out[: out.index("Results")]
        assert spec_shown(shardings, tensor.path + " ") == without_trailing_empty(tensor.spec)


def test_plan_shows_mfu_and_examples_of_the_reference_model(planned):
    path, out, _ = planned
    estimate = Plan.load(path).estimate
    model = build("mlp", **SIZES)
    peak = 197e12 * 4
    mfu = 100 * model.model_flops_per_step / (peak * estimate.step_time_s)
    (line,) = [line for line in out.splitlines() if "examples/s" in line]
    assert f"{mfu:.1f} %" in line
    shown = re.search(r"([\d.,]+) ([MB])? ?examples/s", line)
    scale = {"M": 1e6, "B": 1e9, None: 1.0}[shown[2]]
    examples = float(shown[1].replace(",", "")) * scale
    assert examples == pytest.approx(1024 / estimate.step_time_s, rel=1e-2)


def test_plan_tells_its_stages_in_plain_lines_where_stderr_is_no_terminal(planned):
    _, _, err = planned
    assert err.index("tracing") < err.index("searching meshes: 0 of ") < err.index("written to")
    assert "\x1b" not in err


def test_show_prints_what_plan_printed(planned):
    path, out, _ = planned
    code, again, err = run("show", path)
    assert (code, err) == (0, "")
    # Plan knows the model by its name, the file knows the function.
    told, again = ([line for line in x.splitlines() if "MFU" not in line] for x in (out, again))
    assert again[1:] == told[1:]


def test_show_is_readable_where_stdout_is_ascii(planned):
    path, _, _ = planned
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(stream):
        assert main(["show", str(path)]) == 0
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")
    (line,) = [line for line in text.splitlines() if "step time" in line]
    assert line.count("#") + line.count("+") == 40
    assert "?" not in text


def test_show_json_is_the_plan(planned):
    path, _, _ = planned
    code, out, _ = run("show", path, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(path.read_text("utf-8"))


def test_json_of_plan_is_the_plan_alone_on_stdout_whatever_the_users_code_prints(tmp_path):
    (tmp_path / "chatty.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "print('imported')\n"
        "def step(w, x):\n"
        "    print('traced')\n"
        "    return w + (x.T @ x), (x @ w).sum()\n"
        "def arguments():\n"
        "    return (jax.ShapeDtypeStruct((64, 64), jnp.float32),\n"
        "            jax.ShapeDtypeStruct((32, 64), jnp.float32))\n",
        "utf-8",
    )
    done = run_process(
        "plan",
        "chatty:step",
        "--args=chatty:arguments",
        "--donate=0",
        "--topology=v5e:2x2",
        "--mesh=data=2,model=2",
        "--pin=[0]=None,model",
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout)
    pinned, batch = plan.data.program.inputs
    assert pinned.spec == [[], ["model"]]
    assert batch.shape == [32, 64]
    assert plan.data.program.aliases == [(0, 0)]
    # Only what the user's code printed; nothing of JAX or of a TPU that is not there.
    assert set(done.stderr.split()) == {"imported", "traced"}


def test_quiet_says_nothing_on_stderr_and_shows_the_plan():
    code, out, err = run("plan", *MLP, "--mesh=a=2,b=2", "--quiet")
    assert (code, err) == (0, "")
    assert "a=2 on x, b=2 on y" in out


def test_evaluate_prices_specs_and_says_what_they_leave_out(tmp_path):
    specs = tmp_path / "specs.toml"
    specs.write_text(""""[1]*" = "data"\n"[0]*[1]['w']" = ["None", "model"]\n""", "utf-8")
    options = [*MLP, "--mesh=data=2,model=2", "--spec", specs]
    code, out, err = run("evaluate", *options)
    assert code == 0, err
    assert "data=2, model=2" in out and "step time" in out
    assert "no pattern matches" in err and "replicated" in err
    code, out, _ = run("evaluate", *options, "--json")
    estimate = json.loads(out)
    assert estimate["step_time_s"] == pytest.approx(
        estimate["compute_time_s"] + estimate["exposed_collective_time_s"]
    )


def test_hardware_shows_every_generation():
    code, out, _ = run("hardware")
    assert code == 0
    assert out.split("\n")[0].split()[2:] == list(chip_names())
    (peaks,) = [line.split() for line in out.splitlines() if line.startswith("bf16 peak")]
    assert [float(peak.replace(",", "")) for peak in peaks[3:]] == pytest.approx(
        [load_chip(name).peak_flops["bf16"].value / 1e12 for name in chip_names()], abs=0.5
    )


def test_hardware_of_one_chip_gives_each_value_with_its_source_and_all_slices():
    code, out, _ = run("hardware", "v5e", "--all")
    chip = load_chip("v5e")
    assert code == 0
    values, _, sources = out.partition("Sources")
    assert re.search(r"HBM bandwidth +819 GB/s +\[\d+\]", values)
    number = re.search(r"clock +1,503 MHz +(\[\d+\])", values)[1]
    assert f"{number} Derived" in sources
    for one in legal_slices(chip):
        assert re.search(rf"\b{'x'.join(map(str, one.shape))}\b", values)


def test_hardware_json_is_every_profile():
    _, out, _ = run("hardware", "--json")
    assert [parse_chip(profile) for profile in json.loads(out)] == [
        load_chip(name) for name in chip_names()
    ]


def test_models_lists_every_model_with_its_parameters():
    code, out, _ = run("models")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert rows.keys() >= set(model_names())
    assert "8.03 B" in rows["llama3-8b"]


def test_models_of_one_shows_each_option_with_its_meaning():
    code, out, _ = run("models", "llama3-8b")
    assert code == 0
    for name in type(build("llama3-8b").options).model_fields:
        assert re.search(rf"^{name} +\S+ +\S", out, re.M), name
    assert re.search(r"remat +full +.*", out) and "dots" in out


def test_models_json_rebuilds_the_model():
    _, out, _ = run("models", "gpt2-124m", "--json")
    data = json.loads(out)
    assert data["parameters"] == 124439808
    assert build("gpt2-124m", **data["options"]).options == build("gpt2-124m").options


def test_version():
    assert run("--version") == (0, f"shardwright {VERSION}\n", "")


def test_help_names_every_command_and_exit_code():
    code, out, _ = run("--help")
    assert code == 0
    for word in ("plan", "show", "evaluate", "hardware", "models", "130"):
        assert word in out
    assert run()[1] == out


def test_help_of_plan_shows_brackets_of_paths_as_they_are():
    assert "[0]['w']=None,data" in run("plan", "--help")[1]


def test_help_imports_nothing_heavy(tmp_path):
    script = (
        "import sys; from shardwright.cli import main; main(['--help'])\n"
        "print('heavy:', {'jax', 'ortools', 'numba', 'numpy', 'networkx'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert "heavy: set()" in done.stdout


def test_reader_that_goes_away_leaves_no_traceback(planned):
    path, _, _ = planned
    script = "import sys; from shardwright.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", script, "show", str(path), "--all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) != 0


def test_interrupt_ends_planning_quietly(tmp_path):
    # A parent that runs in the background may have left interrupts ignored.
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from shardwright.cli import main; sys.exit(main())"
    )
    options = ["llama3-70b", "-t", "v5p:8x8x8", "--batch=512", "--sequence=2048"]
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script, "plan", *options, "-o", "plan.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        told = ""
        while "loading" not in told:
            told = process.stderr.readline()
            assert told, "ended before it began"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err and "error" not in err
    assert not (tmp_path / "plan.json").exists()
