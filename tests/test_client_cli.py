"""`shardwright plan --server` is `shardwright plan`: the same output, files and exit codes."""

import contextlib
import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service_fixtures import Service, bare_environment

import shardwright as sw
from shardwright.cli import main

MLP = [
    "plan", "mlp", "-t", "v5e-4", "--mesh", "data=4", "--time-limit", "300", "--set", "layers=2",
    "--set", "features=256", "--set", "hidden=512", "--set", "classes=64", "--batch", "1024",
]  # fmt: skip
TRAINER = """
import jax
import jax.numpy as jnp

def step(w, x):
    return w - (x.T @ jnp.tanh(x @ w)), (x @ w).sum()

def huge(w, x):
    return w * 2 + (x @ w).sum(), x

def arguments():
    return jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)

def too_much():
    return (jax.ShapeDtypeStruct((1 << 17, 1 << 17), jnp.float32),) * 2
"""
STEP = [
    "plan", "trainer:step", "--args", "trainer:arguments", "--donate", "0", "-t", "v5e:2x2",
    "--mesh", "data=2,model=2", "--pin", "[1]=data,None", "--time-limit", "300",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user")
    (path / "trainer.py").write_text(TRAINER)
    return path


def command(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for name, value in environment.items():
            patch.setenv(name, value)
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def without_durations(text: str) -> str:
    """What is printed but for how long planning took."""
    return re.sub(r"planned in [\d.]+ \w+", "planned", text)


def without_seconds(path: Path) -> dict[str, Any]:
    plan = json.loads(path.read_text())
    assert plan["solver"].pop("wall_time_s") >= 0
    return plan  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", [MLP, STEP], ids=["model", "function"])
def test_same_output_and_file_as_a_local_plan(
    service: Service, folder: Path, tmp_path: Path, what: list[str]
) -> None:
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    local = command(folder, *what, "-o", str(here))
    remote = command(folder, *what, "-o", str(there), "--server", service.url)
    assert local[0] == remote[0] == 0, remote[2]
    assert without_durations(remote[1]) == without_durations(local[1])
    assert without_seconds(there) == without_seconds(here)
    last = [err.strip().splitlines()[-1] for _, _, err in (local, remote)]
    assert last == [f"written to {here}", f"written to {there}"]


def test_same_json_as_a_local_plan(service: Service, folder: Path) -> None:
    texts = [command(folder, *STEP, "--json", *more)[1] for more in ([], ["--server", service.url])]
    local, remote = ({**json.loads(text), "solver": None} for text in texts)
    assert remote == local


def test_file_is_planned_as_here(service: Service, folder: Path, tmp_path: Path) -> None:
    text = "module { func.func @main(%a: tensor<64x8xf32>) -> tensor<64x8xf32> { return %a : "
    (tmp_path / "program.mlir").write_text(text + "tensor<64x8xf32> } }")
    what = ["plan", str(tmp_path / "program.mlir"), "-t", "v5e:2x2"]
    codes, texts, errors = zip(
        *(command(folder, *what, "-q", *more) for more in ([], ["--server", service.url])),
        strict=True,
    )
    assert codes == (0, 0) and errors == ("", "")
    assert "program.mlir on v5e:2x2" in texts[0]
    assert without_durations(texts[1]) == without_durations(texts[0])


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_same_price_of_a_sharding_as_here(
    service: Service, folder: Path, tmp_path: Path, form: list[str]
) -> None:
    (tmp_path / "mine.toml").write_text('"[0]*[\'w\']" = "None,model"\n"[1]*" = "data"\n')
    what = ["evaluate", "mlp", "-t", "v5e:2x2", "--mesh", "data=2,model=2"]
    what += ["--spec", str(tmp_path / "mine.toml"), *form]
    local = command(folder, *what)
    assert command(folder, *what, "--server", service.url) == local
    assert local[0] == 0 and local[1]


def test_same_comparison_as_here(service: Service, folder: Path) -> None:
    what = ["compare", "mlp", "-t", "v5e:2x2,v5e:1x1", "--set", "hidden=24576", "--batch=64"]
    what += ["--json", "-q"]
    local, remote = (command(folder, *what, *more) for more in ([], ["--server", service.url]))
    assert remote[0] == local[0] == 0, remote[2]
    rows = [
        [(row["topology"], row["status"], row["step_time_s"]) for row in json.loads(out)["rows"]]
        for out in (local[1], remote[1])
    ]
    assert rows[0] == rows[1]
    assert {status for _, status, _ in rows[0]} == {"planned", "does-not-fit"}


WRONG: dict[str, list[str]] = {
    "slice": ["plan", "mlp", "-t", "v5e:3x3"],
    "option": ["plan", "mlp", "-t", "v5e:2x2", "--set", "color=red"],
    "pin": ["plan", "mlp", "-t", "v5e:2x2", "--mesh", "data=4", "--pin", "nowhere=data"],
    "model": ["plan", "no-such-model", "-t", "v5e:2x2"],
    "what does not fit": ["plan", "trainer:huge", "--args", "trainer:too_much", "-t", "v5e:2x2"],
}


@pytest.mark.parametrize("name", WRONG)
def test_same_error_and_exit_code_as_a_local_plan(
    service: Service, folder: Path, name: str
) -> None:
    local = command(folder, *WRONG[name], "-q")
    assert command(folder, *WRONG[name], "-q", "--server", service.url) == local
    assert local[0] in (2, 3) and local[1] == ""


def test_progress_of_the_server_is_shown(service: Service, folder: Path) -> None:
    _, _, err = command(folder, *MLP, "--seed", "7", "--server", service.url)
    lines = err.splitlines()
    assert lines[:3] == ["loading", "tracing the program", "waiting for the server"]
    # Events are thinned out, so that any of these may be missing.
    stages = ("reading the", "building", "searching", "polishing", "annotating", "writing the")
    assert lines[3].startswith(stages) and lines[-1].startswith("not saved")


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_server_that_is_not_there_is_one_line_and_a_code_of_its_own(folder: Path) -> None:
    code, out, err = command(folder, *MLP, "-q", "--server", f"http://127.0.0.1:{closed_port()}")
    assert (code, out) == (4, "")
    assert re.fullmatch(r"error: http://\S+: no server answers .*`shardwright serve`.*\.\n", err)


def test_url_that_is_none_is_bad_input(folder: Path) -> None:
    code, out, err = command(folder, *MLP, "--server", "planner")
    assert (code, out) == (2, "")
    assert err.startswith("error: server: 'planner' is not the URL of a server")


def test_key_comes_from_the_environment_or_the_option(
    service_factory: Callable[..., Service], folder: Path
) -> None:
    service = service_factory(started=False)
    key = service.make_key("ada")
    service.start()
    what = [*MLP, "-q", "--server", service.url]
    assert command(folder, *what, SHARDWRIGHT_API_KEY=key)[0] == 0
    assert command(folder, *what, "--api-key", key)[0] == 0
    code, _, err = command(folder, *what, SHARDWRIGHT_API_KEY=key[:-3] + "xyz")
    assert code == 4 and err.count("\n") == 1 and key[:-3] not in err


def test_interrupt_ends_the_command_and_the_job(service: Service, folder: Path) -> None:
    code = "import sys; from shardwright.cli import main; sys.exit(main())"
    what = ["plan", "llama3-8b", "-t", "v5p:8x8x8", "--layers", "8", "--set", "scan_layers=false"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *what, "--server", service.url],
        env=bare_environment(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    with sw.Client(service.url) as client:
        deadline = time.monotonic() + 100
        while not ((jobs := client.list(model="llama3-8b").items) and jobs[0].status in RUNNING):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "Traceback" not in err
        assert client.get(jobs[0].id).status == "cancelled"


RUNNING = ("queued", "running")
