"""The worked examples of docs/extending.md do what the page says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.errors import InputError
from shardwright.planner import kernel_ops

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    """The names that the page's Python defines, run from top to bottom."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    yield names
    del kernel_ops._REGISTERED["lapack_spotrf_ffi"]


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
