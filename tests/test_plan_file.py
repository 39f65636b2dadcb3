"""Plans as files: what is kept, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw

SHAPES = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 16)))


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(
        product, *SHAPES, topology="v5e:2x4", mesh={"data": 2, "model": 4},
        pinned={"[0]": P("data"), "[1]": P(None, "model")},
    )  # fmt: skip


def test_saved_plan_loads_equal_and_runs(plan: sw.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert loaded.data == plan.data
    assert loaded.in_specs == (P("data"), P(None, "model"))
    x, w = jnp.ones((64, 32)), jnp.ones((32, 16)) / 64
    y = loaded.jit(product)(x, w)
    assert jnp.allclose(y, product(x, w), rtol=1e-6)
    assert y.sharding.spec == loaded.out_specs


def _broken(change: Any) -> Any:
    def make(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return make


BAD_FILES = {
    "truncated": (lambda text: text[: len(text) // 2], "not whole JSON"),
    "not JSON": (lambda text: "hello", "not whole JSON"),
    "foreign": (lambda text: '{"a": 1}', "not a Shardwright plan"),
    "a list": (lambda text: "[]", "not a Shardwright plan"),
    "another schema": (_broken(lambda d: d.update(schema_version=99)), "schema version 99"),
    "a field missing": (_broken(lambda d: d.pop("estimate")), "damaged at estimate"),
    "another slice": (_broken(lambda d: d.update(topology="v4:2x2x2")), "damaged at topology"),
    "an index out of range": (
        _broken(lambda d: d["constraints"][0]["site"].update(index=10**30)),
        r"damaged at constraints\.0\.site\.index",
    ),
    "a field of another kind": (_broken(lambda d: d.update(mesh_axes=3)), "damaged at mesh_axes"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused_in_one_line(plan: sw.Plan, tmp_path: Path, name: str) -> None:
    change, expected = BAD_FILES[name]
    path = tmp_path / "bad.json"
    path.write_text(change(plan.to_json()))
    with pytest.raises(sw.InputError, match=expected) as caught:
        sw.Plan.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_file_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(sw.InputError, match=r"none\.json"):
        sw.Plan.load(tmp_path / "none.json")


def test_arguments_of_other_shapes_are_refused(plan: sw.Plan) -> None:
    with pytest.raises(sw.InputError, match=r"argument \[0\].*f32\[32, 32\].*f32\[64, 32\]"):
        plan.lower(product, jnp.ones((32, 32)), jnp.ones((32, 16)))


def test_fewer_arguments_are_refused(plan: sw.Plan) -> None:
    with pytest.raises(sw.InputError, match="1 arrays are given and 2 were planned"):
        plan.lower(product, jnp.ones((64, 32)))


def test_another_program_of_the_same_shapes_is_refused(plan: sw.Plan) -> None:
    other = lambda x, w: jnp.sort(x, axis=0)[:, :16] + w.sum()  # noqa: E731
    with pytest.raises(sw.InputError):
        plan.lower(other, *(jnp.ones(s.shape) for s in SHAPES))


def test_other_number_of_devices_is_refused(plan: sw.Plan) -> None:
    with pytest.raises(sw.InputError, match=r"8 devices .* there are 4"):
        plan.make_mesh(jax.devices()[:4])
