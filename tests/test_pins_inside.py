"""Pins of what a program makes inside, of results, and of a part of the dimensions."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.fixed import fixed_strategies
from shardwright.planner.pins import checked_pins, resolved_pins
from shardwright.planner.plan_diff import reasons
from shardwright.planner.prepared import prepare
from shardwright.planner.problem import sharding_of
from shardwright.planner.solver import solve
from shardwright.planner.spec_patterns import partial_spec

MESH = {"x": 2, "y": 4}
FILE = "test_pins_inside.py"


def layer(h: jax.Array, w: jax.Array) -> Any:
    return jnp.tanh(h @ w), None


def step(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        h, _ = lax.scan(jax.checkpoint(layer), x, w)
        return (h * h).sum()

    return w - 0.1 * jax.grad(loss)(w), x.sum()


def at(function: Any, offset: int) -> str:
    return f"{FILE}:{function.__code__.co_firstlineno + offset}"


PRODUCT = at(layer, 1)
W = np.asarray(jax.random.normal(jax.random.key(0), (3, 32, 32))) * 0.1
X = np.asarray(jax.random.normal(jax.random.key(1), (16, 32)))
TINY = {"topology": "v5e:2x4", "mesh": MESH, "donate_argnums": 0, "time_limit_s": 1.0}


def planned(pinned: dict[str, Any], **options: Any) -> sw.Plan:
    return sw.plan(step, W, X, pinned=pinned, **{**TINY, **options})


def made_at(plan: sw.Plan, line: str) -> list[list[list[str]]]:
    """What the plan says of the tensors that a line makes, forward and recomputed."""
    found = []
    for c in plan.data.constraints:
        location = c.site.location or ""
        derivative = location.startswith("checkpoint/") and "rematted" not in location
        if f"/{c.source}".endswith(f"/{line}") and not derivative:
            found.append(c.made)
    return found


def test_a_line_in_a_loop_is_pinned_in_every_pass_and_where_it_is_recomputed() -> None:
    plan = planned({PRODUCT: P("x", "y")})
    made = made_at(plan, PRODUCT)
    assert made == [[["x"], ["y"]]] * 3  # product and tanh, and the product recomputed
    weight, loss = plan.jit(step)(W.copy(), X)
    expected = step(W, X)
    np.testing.assert_allclose(weight, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, expected[1], rtol=1e-4, atol=1e-4)


def test_an_open_dimension_is_left_to_the_planner() -> None:
    closed, open_ = (planned({PRODUCT: spec}) for spec in (P("x", None), P("x", P.UNCONSTRAINED)))
    assert all(made == [["x"], []] for made in made_at(closed, PRODUCT))
    assert all(rows == ["x"] for rows, _ in made_at(open_, PRODUCT))
    assert open_.estimate.step_time_s <= closed.estimate.step_time_s * (1 + 1e-9)
    assert open_.data.options.pinned == {PRODUCT: [["x"], ["?"]]}


def test_more_axes_of_an_open_dimension_come_behind_those_that_are_named() -> None:
    for wanted, given in {("y",): "y+?", ("x", "y"): "x+?"}.items():
        plan = planned({"[1]": [given.split("+"), []]})
        rows = plan.data.program.inputs[1].spec[0]
        assert tuple(rows) in ({wanted[:1], wanted} if given == "x+?" else {wanted})


def test_a_pattern_pins_every_argument_that_it_matches() -> None:
    plan = planned({"[*": ""})
    assert plan.in_specs == (P(), P())
    assert list(plan.data.options.pinned) == ["[0]", "[1]"]


def test_a_result_is_pinned_by_its_path() -> None:
    def double(x: jax.Array) -> dict[str, jax.Array]:
        return {"y": x * 2}

    plan = sw.plan(double, X, topology="v5e:2x4", mesh=MESH, pinned={"result['y']": "x,y"})
    assert plan.out_specs == {"y": P("x", "y")}
    np.testing.assert_allclose(plan.jit(double)(X)["y"], X * 2)


def test_a_number_pins_one_operation_of_a_line_as_explain_counts_them() -> None:
    plan = planned({f"{PRODUCT}#1": P("x", "y")})
    assert plan.explain(f"{PRODUCT}#1", resolve=0).spec == [["x"], ["y"]]
    assert plan.explain(f"{PRODUCT}#1", resolve=0).pinned == f"{PRODUCT}#1 as x,y"


def test_a_pin_that_keeps_everything_whole_needs_no_mesh() -> None:
    plan = planned({"[1]": "None,None"}, mesh=None)
    assert plan.in_specs[1] == P()


def test_the_pins_that_differ_are_told_where_plans_are_compared() -> None:
    one, other = planned({"[1]": "x,?"}), planned({"[1]": "x,?", "[0]": ""})
    found = reasons(one.data, other.data)
    assert "the option pinned: none -> [0] as None,None,None" in found


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no such line": ({f"{FILE}:2": "x,y"}, rf"makes no tensor at this line. Use .*{FILE}:\d+"),
    "no such file": ({"other.py:9": "x,y"}, r"makes no tensor at this line. Use a line that does"),
    "too few entries": ({PRODUCT: "x"}, r"has 1 entries, .*#1 dot_general f32\[16, 32\]"),
    "no such number": ({f"{PRODUCT}#99": "x,y"}, "there is no number 99"),
    "open before an axis": ({"[1]": "?+x"}, "comes last in a dimension"),
    "two pins of one tensor": ({"[1]": "x", "[1*": "y"}, r"\[1\] is pinned to x,None by \[1\] and"),
    "an argument and what it becomes": (
        {"[0]": "?,x,?", "result[0]": "?,y,?"}, r"result\[0\] and the pin of \[0\] contradict|"
        r"\[0\] and the pin of result\[0\] contradict",
    ),
    "two open pins of one tensor": (
        {f"{PRODUCT}": "x,None", f"{PRODUCT}#2": "None,?"}, "contradict each other",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_mistake_in_a_pin_is_told_in_one_line(what: str) -> None:
    pinned, message = MISTAKES[what]
    with pytest.raises(sw.InputError, match=message) as caught:
        planned(pinned)
    assert str(caught.value).startswith("pinned") and "\n" not in str(caught.value)


def test_what_a_shard_map_holds_is_not_pinned() -> None:
    def local(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    def mapped(x: jax.Array) -> jax.Array:
        return jax.shard_map(local, in_specs=P("x"), out_specs=P("x"))(x)

    with pytest.raises(sw.InputError, match="local to a shard_map"):
        sw.plan(mapped, X, topology="v5e:2x4", mesh=MESH, pinned={at(local, 1): "x,?"})


def two_products(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    h = x @ v
    return h @ w


@pytest.mark.parametrize(
    "pinned", [{}, {"[0]": "x,?"}, {at(two_products, 1): "?,y"}, {"[1]": "?,x", "result": "y,?"}]
)
def test_what_is_left_open_is_completed_as_enumeration_does(pinned: dict[str, str]) -> None:
    """Every strategy of the pinned problem, filtered by the pin from those of the free problem."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 64), (64, 128), (128, 64))]
    program = sw.Program.trace(two_products, *shapes)
    prepared = prepare(program)
    (mesh, *_) = meshes_for_shape(parse_slice("v5e:2x2"), {"x": 2, "y": 2})
    specs = {name: partial_spec(text, name) for name, text in pinned.items()}
    pins = resolved_pins(program, prepared.nodes, checked_pins(program, specs, mesh.shape))
    free = prepared.problem(mesh, {})
    rows_of = [range(len(rows)) for rows in free.strategies]
    for pin in pins:
        for port in pin.ports:
            rows_of[port.node] = [  # type: ignore[call-overload]
                row
                for row in rows_of[port.node]
                if _obeys(
                    sharding_of(free.strategies[port.node][row], port.dims, tuple(mesh.shape)),
                    pin.spec,
                )
            ]
    weighed = free.weighed(0.5, 1e12)
    best = min(
        sum(float(cost[row]) for cost, row in zip(weighed.costs, rows, strict=True))
        + sum(float(edge.cost[rows[edge.a], rows[edge.b]]) for edge in weighed.edges)
        for rows in itertools.product(*rows_of)
    )
    problem = prepared.problem(mesh, fixed_strategies(prepared.nodes, pins, mesh))
    found = solve(problem.weighed(0.5, 1e12), time_limit_s=20, gap=1e-9)
    assert found.cost == pytest.approx(best, rel=1e-4)


def _obeys(sharding: Any, spec: tuple[tuple[str, ...], ...]) -> bool:
    for axes, wanted in zip(sharding, spec, strict=True):
        names = tuple(axis.name for axis in axes)
        named = tuple(name for name in wanted if name != "?")
        if names[: len(named)] != named or ("?" not in wanted and names != named):
            return False
    return True
