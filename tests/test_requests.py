"""Every option of the wrong type or range is refused by name, before any work is done."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardwright as sw

TOPOLOGY = "v5e:2x4"
ARGS = (jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((8, 256), jnp.float32))


def forward(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w).sum()


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("topology", None, "topology is None"),
        ("topology", 8, "topology is 8"),
        ("mesh", ["x"], r"mesh is \['x'\]"),
        ("mesh", {}, "mesh is {}"),
        ("mesh", {"x": "8"}, r"mesh\['x'\] is '8'"),
        ("mesh", {"x": 8.0}, r"mesh\['x'\] is 8.0"),
        ("mesh", {"x": -8}, r"mesh\['x'\] is -8"),
        ("mesh", {1: 8}, r"mesh\[1\] is 1"),
        ("mesh", {"a b": 8}, "'a b' is not a name"),
        ("mesh", {"ä": 8}, "'ä' is not a name of letters from A to Z"),
        ("mesh", {"x": True}, r"mesh\['x'\] is True"),
        ("pinned", {"[0]": PartitionSpec("ä")}, "names of axes are of letters from A to Z"),
        ("pinned", [1], "pinned is"),
        ("pinned", {"[0]": 3}, r"pinned \[0\]: 3 is not a PartitionSpec"),
        ("pinned", {0: PartitionSpec("x")}, r"pinned\[0\] is 0"),
        ("memory_fraction", "0.9", "memory_fraction is '0.9'"),
        ("memory_fraction", float("nan"), "memory_fraction is nan"),
        ("memory_fraction", 1.5, "memory_fraction is 1.5"),
        ("time_limit_s", float("nan"), "time_limit_s is nan"),
        ("time_limit_s", float("inf"), "time_limit_s is inf"),
        ("time_limit_s", 0, "time_limit_s is 0"),
        ("time_limit_s", "5", "time_limit_s is '5'"),
        ("seed", "5", "seed is '5'"),
        ("seed", -1, "seed is -1"),
        ("model_flops", float("inf"), "model_flops is inf"),
        ("model_flops", -1.0, "model_flops is -1.0"),
        ("donate_argnums", "0", "donate_argnums is '0'"),
        ("on_progress", 3, "on_progress is 3"),
        ("chip", "v5e", "chip is 'v5e'"),
        ("topology", "99999*v5e:2x4", "99999 slices are more than a plan is made for"),
        ("logical_axes", {"*": ("embed",)}, "logical_axes say nothing of a free layout"),
    ],
)
def test_a_wrong_option_of_plan_is_named(option: str, value: Any, reason: str) -> None:
    options = {"topology": TOPOLOGY, "mesh": {"x": 8}, option: value}
    with pytest.raises(sw.InputError, match=reason):
        sw.plan(forward, *ARGS, **options)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("mesh", None, "mesh is None"),
        ("mesh", ["x"], r"mesh is \['x'\]"),
        ("in_specs", "x", r"in_specs \[0\]: 'x' is not a PartitionSpec"),
        ("in_specs", (PartitionSpec("x"),), "not a prefix of the pytree"),
    ],
)
def test_a_wrong_option_of_evaluate_is_named(option: str, value: Any, reason: str) -> None:
    options = {"topology": TOPOLOGY, "mesh": {"x": 8}, "in_specs": None, option: value}
    with pytest.raises(sw.InputError, match=reason):
        sw.evaluate(forward, *ARGS, **options)


def test_a_refused_mesh_leaves_later_plans_alone() -> None:
    """JAX caches by equality, and a mesh of 8.0 devices equals one of 8."""
    with pytest.raises(sw.InputError):
        sw.plan(forward, *ARGS, topology=TOPOLOGY, mesh={"y": 8.0})
    assert sw.plan(forward, *ARGS, topology=TOPOLOGY, mesh={"y": 8}).mesh_axes == {"y": 8}


def test_integers_of_numpy_are_integers() -> None:
    planned = sw.plan(
        lambda w, x: w + forward(w, x),
        *ARGS,
        topology=TOPOLOGY,
        mesh={"x": np.int64(8)},
        donate_argnums=[np.int32(0)],
    )
    assert planned.mesh_axes == {"x": 8}
