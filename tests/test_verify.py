"""Plans judged by a compiler: the CPU one here, which also runs the program."""

import json
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cli import main
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner import compiling

MESH = {"x": 4, "y": 2}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A linear model whose weight is updated."""
    loss, gradient = jax.value_and_grad(lambda v: jnp.mean((x @ v) ** 2))(w)
    return w - 0.1 * gradient, loss


ARGUMENTS = (f32(64, 32), f32(1 << 14, 64))
"""The batch is large beside the weight, so that gathering it does not pay."""


@pytest.fixture(scope="module")
def data_parallel() -> sw.Plan:
    return sw.plan(
        step, *ARGUMENTS, topology="v5e:2x4", mesh=MESH, donate_argnums=(0,),
        pinned={"[0]": P(), "[1]": P("x")},
    )  # fmt: skip


@pytest.fixture(scope="module")
def verified(data_parallel: sw.Plan) -> Any:
    return sw.verify(data_parallel, step, *ARGUMENTS, compiler="cpu")


def test_planned_program_computes_what_one_device_does(verified: Any) -> None:
    assert [output.path for output in verified.outputs] == ["[0]", "[1]"]
    assert verified.largest_difference < 1e-5


def test_gradient_of_data_parallelism_is_reduced_over_the_batch_axis(verified: Any) -> None:
    """The 64 x 32 gradient in float32, and the loss."""
    reduced = [row for row in verified.collectives if row.kind == "all_reduce"]
    assert {tuple(row.axes) for row in reduced} == {("x",)}
    assert sum(row.compiled_bytes for row in reduced) == 64 * 32 * 4 + 4
    assert sum(row.predicted_bytes for row in reduced) == 64 * 32 * 4 + 4


def test_arrays_that_are_given_are_what_the_program_is_run_with(data_parallel: sw.Plan) -> None:
    w, x = jnp.zeros((64, 32)), jnp.full((1 << 14, 64), jnp.nan)
    found = sw.verify(data_parallel, step, w, x, compiler="cpu")
    # Both compute NaN, which is no difference.
    assert found.largest_difference == 0.0


def test_wrong_numbers_are_told() -> None:
    from shardwright.planner.compile_child import _difference

    assert _difference(np.array([1.0, 3.9]), np.array([1.0, 4.0])) == pytest.approx(0.025)
    assert _difference(np.array([np.nan]), np.array([1.0])) == np.inf
    assert _difference(np.array([True]), np.array([False])) > 0.5


def test_plan_of_another_program_is_refused(data_parallel: sw.Plan) -> None:
    with pytest.raises(sw.InputError, match="another program"):
        sw.verify(data_parallel, lambda w, x: (w, x.sum()), *ARGUMENTS, compiler="cpu")


def test_program_too_large_for_the_cpu_is_refused() -> None:
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    big = f32(1 << 16, 1 << 10)
    plan = sw.plan(double, big, topology="v5e:2x4", mesh=MESH)
    with pytest.raises(sw.InputError, match="run on CPU"):
        sw.verify(plan, double, big, compiler="cpu")


def test_unknown_compiler_is_refused(data_parallel: sw.Plan) -> None:
    with pytest.raises(sw.InputError, match='Use "tpu" or "cpu"'):
        sw.verify(data_parallel, step, *ARGUMENTS, compiler="gpu")  # type: ignore[arg-type]


def test_missing_libtpu_is_told(data_parallel: sw.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(sw.InputError, match=r"pip install 'shardwright\[tpu\]'"):
        sw.verify(data_parallel, step, *ARGUMENTS)


class Child:
    """Stands for the process that compiles."""

    def __init__(self, returncode: int, stderr: str) -> None:
        self.returncode, self.stderr = returncode, stderr

    def __call__(self, *args: Any, **kwargs: Any) -> "Child":
        return self


def test_compiler_that_ends_its_process_is_told(
    data_parallel: sw.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = Child(-6, "start\nF0000 Check failed: shape.rank() == 2\n*** trace")
    monkeypatch.setattr(subprocess, "run", aborted)
    with pytest.raises(sw.ShardwrightError, match=r"SIGABRT.*Check failed: shape.rank\(\) == 2"):
        sw.verify(data_parallel, step, *ARGUMENTS, compiler="cpu")


@pytest.mark.parametrize(
    "said",
    [
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out "
        "of memory in memory space hbm. Used 20.00G of 15.75G hbm. Exceeded hbm capacity by 4.25G.",
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total "
        "memory required for HLO temporaries (20.00G) exceeds available HBM (15.75G).",
    ],
    ids=["by allocation", "before"],
)
def test_compiler_that_finds_no_room_gives_a_verdict(
    data_parallel: sw.Plan, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(subprocess, "run", Child(1, said))
    found = sw.verify(data_parallel, step, *ARGUMENTS, compiler="cpu")
    assert not found.fits
    assert found.memory.compiled_used == 20 * 2**30
    assert "Used 20.00G of 15.75G hbm" in found.problem


@pytest.mark.parametrize(
    ("topology", "host"),
    [("v5e:1x1", [1, 1, 1]), ("v5e:2x4", [2, 2, 1]), ("tpu7x:1x1x1", [1, 1, 1])],
)
def test_slices_of_less_than_a_host_are_compiled_for_a_smaller_host(
    data_parallel: sw.Plan, topology: str, host: list[int]
) -> None:
    # libtpu: "Topology layout is not divisible by the given (or default) chips_per_host_bounds".
    assert compiling.tpu_job(data_parallel, parse_slice(topology))["host"] == host


def test_command_prints_what_was_compared(
    data_parallel: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "linear.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def step(w, x):\n"
        "    loss, g = jax.value_and_grad(lambda v: jnp.mean((x @ v) ** 2))(w)\n"
        "    return w - 0.1 * g, loss\n"
        "args = (jax.ShapeDtypeStruct((64, 32), 'float32'), "
        "jax.ShapeDtypeStruct((1 << 14, 64), 'float32'))\n"
    )
    path = tmp_path / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        target = ["linear:step", "--args", "linear:args"]
        planned = ["plan", *target, "-t", "v5e:2x4", "--mesh", "x=4,y=2", "--donate", "0"]
        pins = ["--pin", "[0]=None,None", "--pin", "[1]=x,None"]
        assert main([*planned, *pins, "-o", str(path), "-q"]) == 0
        capsys.readouterr()
        assert main(["verify", str(path), *target, "--compiler", "cpu", "-q"]) == 0
        shown = capsys.readouterr().out
        assert "step on v5e:2x4, mesh x 4 x y 2" in shown
        assert "2 results differ from one device's by at most" in shown
        assert main(["verify", str(path), *target, "--compiler", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["collectives"][0]["kind"] == "all_reduce"
