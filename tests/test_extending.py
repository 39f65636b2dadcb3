"""The worked examples of docs/extending.md do what the page says."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cli import main
from shardwright.cost_models.algorithms import unregister_collective
from shardwright.cost_models.collectives import chosen_algorithm, collective_seconds
from shardwright.errors import InputError
from shardwright.hardware_profiles import (
    enumerate_meshes,
    load_chip,
    meshes_for_shape,
    parse_slice,
    unregister_chip,
)
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.planner import kernel_ops

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the files of the page that have names."""
    path = tmp_path_factory.mktemp("extending")
    for name, text in re.findall(r"```toml\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (path / name).write_text(text)
    return path


@pytest.fixture(scope="module")
def example(folder: Path) -> Iterator[dict[str, Any]]:
    """The names that the page's Python defines, run from top to bottom."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    with contextlib.chdir(folder):
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    yield names
    del kernel_ops._REGISTERED["lapack_spotrf_ffi"]
    unregister_chip("next")
    unregister_collective("one-shot", "all_reduce")


def test_planned_example_equals_plain_jax(example: dict[str, Any]) -> None:
    arrays = [
        jnp.asarray(np.random.default_rng(i).standard_normal(shape.shape), jnp.float32)
        for i, shape in enumerate(example["shapes"])
    ]
    plan = sw.plan(
        example["step"], *example["shapes"], topology="v5e:2x4", mesh={"data": 2, "model": 4},
        pinned={"[2]": P("data")},
    )  # fmt: skip
    plain = jax.value_and_grad(
        lambda scale, weights, x: jnp.mean(
            jnp.tanh(example["plain_norm"](x, scale) @ weights) ** 2
        ),
        argnums=(0, 1),
    )
    ours, theirs = plan.jit(example["step"])(*arrays), plain(*arrays)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_rows_of_the_example_are_sharded_and_their_sums_added_up(example: dict[str, Any]) -> None:
    kernels = {k.name: k for k in example["plan"].data.kernels}
    forward, scale = kernels["norm"], kernels["plain_scale_gradient"]
    assert forward.in_specs[0][0] == scale.in_specs[0][0] == scale.summed != []
    assert forward.in_specs[1] == [[]]


def test_pallas_kernel_of_the_example_lowers_for_tpu(example: dict[str, Any]) -> None:
    x, scale = jnp.ones((512, 128)), jnp.ones(128)
    lowered = jax.jit(example["forward"]).trace(x, scale).lower(lowering_platforms=("tpu",))
    assert "@tpu_custom_call" in lowered.as_text()


def test_registered_custom_call_runs_on_shards(example: dict[str, Any]) -> None:
    x = np.random.default_rng(0).standard_normal((8, 16, 16)).astype(np.float32)
    x = x @ x.transpose(0, 2, 1) + 16 * np.eye(16, dtype=np.float32)
    plain, cholesky = jnp.linalg.cholesky(x), example["cholesky"]
    plan = sw.plan(
        cholesky, x, topology="v5e:2x4", mesh={"data": 2, "model": 4}, pinned={"[0]": P("data")}
    )
    (kernel,) = plan.data.kernels
    assert (kernel.name, kernel.in_specs[0][1:]) == ("lapack_spotrf_ffi", [[], []])
    assert "data" in kernel.in_specs[0][0]
    assert plan.estimate.matrix_flops == pytest.approx(8 * 16**3 / 3)
    assert plan.data.replicated_ops == []
    np.testing.assert_allclose(plan.jit(cholesky)(x), plain, rtol=1e-4, atol=1e-4)
    assert "all-gather" not in plan.compile(cholesky, x).as_text()


@pytest.mark.usefixtures("example")
def test_a_program_of_which_another_platform_alone_has_the_call_runs() -> None:
    """JAX's own Cholesky is that custom call on CPU, and something else on TPU."""
    x = 16 * np.eye(16, dtype=np.float32) + np.ones((8, 16, 16), np.float32)
    plan = sw.plan(jnp.linalg.cholesky, x, topology="v5e:2x4")
    assert plan.data.kernels == []
    np.testing.assert_allclose(plan.jit(jnp.linalg.cholesky)(x), jnp.linalg.cholesky(x), rtol=1e-5)


def test_calls_with_arrays_of_other_ranks_are_not_meant(example: dict[str, Any]) -> None:
    one = 2 * np.eye(4, dtype=np.float32)
    plan = sw.plan(lambda x: example["cholesky"](x[None])[0], one, topology="v5e:2x4")
    assert len(plan.data.kernels) == 1
    results = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", results)
    plan = sw.plan(lambda x: call(x, uplo=np.uint8(76))[0], one, topology="v5e:2x4")
    assert plan.data.kernels == []
    assert len(plan.data.replicated_ops) == 1


def test_a_pallas_kernel_cannot_be_registered_as_it_is() -> None:
    with pytest.raises(InputError, match=r"compiled for the size .* sw.kernel"):
        sw.register_op("tpu_custom_call", rule="n -> n", flops=0)


def test_derived_chip_differs_from_its_base_by_the_values_given(example: dict[str, Any]) -> None:
    ours, base = load_chip("next"), load_chip("v5p")
    assert ours.hbm_bandwidth.value == 2 * base.hbm_bandwidth.value
    assert "a guess" in ours.hbm_bandwidth.source
    assert ours.hbm_bytes == base.hbm_bytes
    plan = example["on_next"]
    assert plan.data.topology == "next:2x2x2"
    assert plan.data.chip["ici_link_bandwidth"]["value"] == 1.35e11


def test_command_of_the_page_plans_for_the_chip(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (command,) = re.findall(r"^shardwright (plan .*next\.toml)$", PAGE.read_text(), re.M)
    small = ["--layers=2", "--batch=16", "--time-limit=1", "-q"]
    assert main([*shlex.split(command), *small]) == 0
    assert "next:2x2x2" in capsys.readouterr().out


def test_every_field_of_a_chip_is_on_the_page() -> None:
    told = set(re.findall(r"`(\w+)`", PAGE.read_text().partition("## A chip\n")[2]))
    named = {
        "name",
        "like",
        "calibration",
        "device_kinds",
        "libtpu_chip_config",
        "product_prefixes",
        "product_counts",
    }
    assert ChipProfile.model_fields.keys() - named <= told


def test_registered_algorithm_is_used_where_it_is_cheaper(example: dict[str, Any]) -> None:
    """The gradient of a scale of 128 floats over 16 chips: latency alone."""
    kinds = {(c.kind, c.algorithm) for c in example["small"].estimate.collectives}
    assert ("all_reduce", "one-shot") in kinds


EXTENSION = """
import shardwright as sw

def register():
    sw.register_chip({"name": "installed", "base": "v5e", "source": "a test",
                      "values": {"hbm_bandwidth": 1e12}})
    sw.register_collective("nothing", "all_gather", lambda group: sw.Line(0.0, 0.0))
"""


def test_installed_extension_is_known_on_the_command_line_and_in_workers(tmp_path: Path) -> None:
    (tmp_path / "extra.py").write_text(EXTENSION)
    facts = tmp_path / "extra-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[shardwright.extensions]\nx = extra:register\n")
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-c",
                "import sys; from shardwright.cli import main; sys.exit(main())",
            ),
            *("compare", "mlp", "-t", "installed:2x2"),
            *("--set=hidden=512", "--batch=64", "--json", "-q", "--time-limit=0.5"),
        ],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["topology"], row["status"]) == ("installed:2x2", "planned")


BAD_CHIPS = {
    "unknown field": ({"values": {"hbm_speed": 1e12}}, "has no hbm_speed.*hbm_bandwidth"),
    "wrong value": ({"values": {"hbm_bandwidth": -1}}, "hbm_bandwidth.value: .*greater than"),
    "unknown base": ({"base": "v9"}, "no chip called 'v9'"),
    "known name": ({"name": "v5p"}, "name or product prefix of the known chip v5p"),
    "no source": ({"source": ""}, "source: "),
}


@pytest.mark.parametrize("name", BAD_CHIPS)
def test_chip_that_cannot_be_is_refused_with_what_is_wrong(name: str) -> None:
    changes, message = BAD_CHIPS[name]
    given = {"name": "own", "base": "v5e", "source": "a test", "values": {"hbm_bytes": 1 << 30}}
    with pytest.raises(InputError, match=message):
        sw.register_chip(given | changes)


def test_formula_that_is_no_line_is_told_by_the_name_of_its_algorithm() -> None:
    mesh = enumerate_meshes(parse_slice("v5e:4x4"), 2)[0]
    sw.register_collective("odd", "all_to_all", lambda group: -1.0)
    try:
        with pytest.raises(InputError, match=r"algorithm odd for all_to_all.*returned -1.0"):
            collective_seconds("all_to_all", 1e6, list(mesh.shape), mesh)
    finally:
        unregister_collective("odd", "all_to_all")


def test_cheapest_algorithm_counts_for_each_number_of_bytes() -> None:
    mesh = meshes_for_shape(parse_slice("v5e:4x4"), {"x": 4, "y": 4})[0]
    sizes = np.array([1e3, 1e5, 1e7])
    usual = collective_seconds("all_gather", sizes, ["x"], mesh)
    fixed = mesh.slice.chip.collective_overhead_s.value
    sw.register_collective("flat", "all_gather", lambda group: sw.Line(float(usual[1]), 0.0))
    try:
        now = collective_seconds("all_gather", sizes, ["x"], mesh)
        assert now == pytest.approx(np.minimum(usual, usual[1] + fixed))
        names = [chosen_algorithm("all_gather", float(n), ["x"], mesh) for n in sizes]
        assert names == ["", "", "flat"]
    finally:
        unregister_collective("flat", "all_gather")
    assert collective_seconds("all_gather", sizes, ["x"], mesh) == pytest.approx(usual)
