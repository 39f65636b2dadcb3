"""Shardings that users fix, and how a mistake in one is told."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwright as sw

MESH = {"x": 2, "y": 4}
STATE = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((16, 64), jnp.float32)
UNEVEN = jax.ShapeDtypeStruct((6,), jnp.float32)


def step(state: dict[str, jax.Array], batch: jax.Array) -> Any:
    y = batch @ state["w"]
    return {"w": state["w"] - batch.T @ y}, y.sum()


def planned(pinned: dict[str, P], fn: Callable[..., Any] = step, **options: Any) -> sw.Plan:
    asked = {"topology": "v5e:2x4", "mesh": MESH, "donate_argnums": 0, **options}
    return sw.plan(fn, STATE, BATCH, pinned=pinned, **asked)


PINS = [P(), P("x"), P("x", "y"), P(None, ("x", "y")), P(("x", "y"))]


@pytest.mark.parametrize("spec", PINS, ids=str)
def test_pinned_argument_keeps_its_sharding_and_so_does_the_result_it_is_donated_to(
    spec: P,
) -> None:
    plan = planned({"[0]['w']": spec})
    assert plan.in_specs[0]["w"] == spec
    assert plan.out_specs[0]["w"] == spec


def test_a_pin_in_text_is_the_same_pin() -> None:
    plan = planned({"[0]['w']": "None,x+y"})  # type: ignore[dict-item]
    assert plan.in_specs[0]["w"] == P(None, ("x", "y"))
    with pytest.raises(sw.InputError, match=r"pinned \[1\]: .*not a PartitionSpec"):
        planned({"[1]": "x,,y"})  # type: ignore[dict-item]


def test_arguments_that_are_not_pinned_are_chosen_around_the_pins() -> None:
    plan = planned({"[1]": P(("x", "y"))})
    assert plan.in_specs[1] == P(("x", "y"))


def test_pins_are_written_in_the_plan() -> None:
    plan = planned({"[1]": P("x")})
    assert plan.data.options.pinned == {"[1]": [["x"], []]}


def test_a_pin_wins_over_a_constraint_of_the_program_on_the_argument() -> None:
    def constrained(state: dict[str, jax.Array], batch: jax.Array) -> Any:
        w = lax.with_sharding_constraint(state["w"], P("y", "x"))
        return {"w": w * 2}, batch.sum()

    plan = planned({"[0]['w']": P("x")}, constrained)
    assert plan.in_specs[0]["w"] == P("x")
    own = [c for c in plan.data.constraints if c.site.op == "sdy.sharding_constraint"]
    assert [c.made for c in own] == [[["y"], ["x"]]]


MISTAKES: dict[str, tuple[dict[str, P], dict[str, Any], str]] = {
    "no mesh": ({"[1]": P("x")}, {"mesh": None}, "no mesh is given. Pass mesh="),
    "no such argument": ({"[0]['v']": P("x")}, {}, r"no argument \[0\]\['v'\].*\[0\]\['w'\]"),
    "no such axis": ({"[1]": P("z")}, {}, "'z' .* is not in the mesh. Use each of x, y once"),
    "an axis twice": ({"[1]": P("x", "x")}, {}, "'x' .* is used twice"),
    "too many entries": ({"[1]": P(None, None, "x")}, {}, "3 entries and the tensor 2 dimensions"),
    "another order than the mesh": ({"[1]": P(("y", "x"))}, {}, "another order than the mesh"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistake_in_a_pin_is_told_in_one_line(what: str) -> None:
    pinned, options, message = MISTAKES[what]
    with pytest.raises(sw.InputError, match=message) as caught:
        planned(pinned, **options)
    assert str(caught.value).startswith("pinned") and "\n" not in str(caught.value)


def test_pin_that_does_not_divide_is_told() -> None:
    with pytest.raises(sw.InputError, match="cuts a dimension of 6 in 4 parts"):
        sw.plan(jnp.sin, UNEVEN, topology="v5e:2x4", mesh=MESH, pinned={"[0]": P("y")})


def test_mesh_other_than_the_program_s_own_is_told() -> None:
    text = """sdy.mesh @mesh = <["a"=8]>
    func.func @main(%x: tensor<16xf32>) -> tensor<16xf32> {
      %0 = sdy.sharding_constraint %x <@mesh, [{"a"}]> : tensor<16xf32>
      return %0 : tensor<16xf32>
    }"""
    program = sw.Program.from_stablehlo(text)
    assert program.mesh_axes == {"a": 8}
    assert sw.plan(program, topology="v5e:2x4").mesh_axes == {"a": 8}
    with pytest.raises(sw.InputError, match="own shardings are for the mesh"):
        sw.plan(program, topology="v5e:2x4", mesh=MESH)
