"""The worked examples of docs/extending.md do what the page says."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names that the page's Python defines, run from top to bottom."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    return names


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
