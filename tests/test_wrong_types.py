"""What is no plan's input at all, and plan files that someone edited: told in words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw

X = jax.ShapeDtypeStruct((16, 32), jnp.float32)
ON: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"x": 2, "y": 4}}


def step(x: Any) -> Any:
    return x @ x.T


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(step, X, time_limit_s=1, **ON)


CALLS: dict[str, tuple[Callable[[sw.Plan], Any], str]] = {
    "a list as mesh": (lambda p: sw.plan(step, X, topology="v5e:2x4", mesh=[2, 4]), r"mesh is \[2"),  # type: ignore[arg-type]
    "a text as mesh": (lambda p: sw.plan(step, X, topology="v5e:2x4", mesh="x=2"), "mesh is 'x=2'"),  # type: ignore[arg-type]
    "a text as argument": (lambda p: sw.plan(step, "x", **ON), "does not trace"),
    "an object as argument": (lambda p: sw.plan(step, object(), **ON), "does not trace"),
    "a list as pins": (lambda p: sw.plan(step, X, pinned=["x"], **ON), "pinned is"),
    "a number as pin": (lambda p: sw.plan(step, X, pinned={"[0]": 3}, **ON), "not a PartitionSpec"),
    "numbers as axes": (lambda p: sw.plan(step, X, pinned={"[0]": P(1)}, **ON), "not a Partit"),  # type: ignore[arg-type]
    "a number as function": (lambda p: sw.plan(3, X, **ON), "not callable"),
    "a text as donation": (lambda p: sw.plan(step, X, donate_argnums="0", **ON), "donate_argnums"),
    "a list as variants": (lambda p: sw.plan(variants=[step], **ON), "variants"),
    "a text as slices": (lambda p: sw.compare(step, X, topologies="v5e:2x4"), "no list of slices"),
    "a number as slice": (lambda p: sw.compare(step, X, topologies=[8]), "no list of slices"),
    "open dimensions to evaluate": (
        lambda p: sw.evaluate(step, X, in_specs=(P("x", P.UNCONSTRAINED),), **ON), "dimension open",
    ),
    "a text to a planned function": (lambda p: p.jit(step)("x"), "no array"),
    "a number as devices": (lambda p: p.compile(step, X, devices=3), "no list of devices"),
    "texts as devices": (lambda p: p.make_mesh(["a"] * 8), "no list of devices"),
    "a number to explain": (lambda p: p.explain(3), "names nothing"),
    "a number as path": (lambda p: sw.Plan.load(3), "cannot be read"),
    "nothing as JSON": (lambda p: sw.Plan.from_json(None), "not whole JSON"),
    "nothing as file": (lambda p: p.save(None), "cannot be written"),
    "a folder as file": (lambda p: p.save(Path("/")), "cannot be written"),
    "a text as plan": (lambda p: sw.verify("plan.json", step, X), "is no plan"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_wrong_type_is_told_in_words(what: str, plan: sw.Plan) -> None:
    call, message = CALLS[what]
    with pytest.raises(sw.InputError, match=message):
        call(plan)


ABSURD = (10**400, 1e308, float("inf"), -1, "zz", [])
EDITED = (
    ("mesh", "axes", 0, "segments", 0, "size"),
    ("mesh", "axes", 0, "segments", 0, "stride"),
    ("mesh", "axes", 0, "name"),
    ("mesh", "slice"),
    ("mesh_axes", "x"),
    ("program", "inputs", 0, "spec"),
    ("estimate", "compute_time_s"),
    ("estimate", "peak_memory_bytes"),
    ("estimate", "memory_capacity_bytes"),
)


@pytest.mark.parametrize("place", EDITED, ids=lambda place: ".".join(map(str, place)))
def test_absurd_number_in_a_plan_file_is_refused_or_shown(
    place: tuple[Any, ...], plan: sw.Plan
) -> None:
    from rich.console import Console

    from shardwright.cli_plan import plan_view

    for absurd in ABSURD:
        data = json.loads(plan.to_json())
        at = data
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = absurd
        try:
            edited = sw.Plan.from_json(json.dumps(data))
        except sw.InputError as error:
            assert "\n" not in str(error)
            continue
        repr((edited, edited.in_specs, edited.logical_mesh))
        with Console().capture():
            Console().print(plan_view(edited.data))
