"""Sizes that the mesh does not divide: what is found to go together, and what is advised."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardwright as sw
from shardwright.cli_plan import plan_view
from shardwright.planner.prepared import prepare
from shardwright.planner.sizes import program_sizes, resized

ON: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"model": 8}, "time_limit_s": 60.0}


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def language_model(embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    def loss(embedding: jax.Array) -> jax.Array:
        logits = embedding[tokens] @ embedding.T
        at = jnp.take_along_axis(logits, tokens[..., None], -1)
        return (jax.nn.logsumexp(logits, -1) - at[..., 0]).mean()

    return embedding - 0.1 * jax.grad(loss)(embedding)


def planned(vocabulary: int) -> sw.Plan:
    tokens = jax.ShapeDtypeStruct((4, 1024), jnp.int32)
    return sw.plan(language_model, f(vocabulary, 512), tokens, donate_argnums=0, **ON)


@pytest.fixture(scope="module")
def uneven() -> sw.Plan:
    return planned(50257)


def test_advised_size_is_faster_by_what_the_plan_of_it_takes(uneven: sw.Plan) -> None:
    (advice,) = uneven.data.size_advice
    assert (advice.size, advice.argument, advice.dimension) == (50257, "[0]", 0)
    assert advice.better % 8 == 0 and advice.better > 50257
    better = planned(advice.better)
    saved = uneven.estimate.step_time_s - better.estimate.step_time_s
    assert saved > 0
    assert advice.saved_s == pytest.approx(saved, rel=0.5)
    assert not better.data.size_advice


def test_advice_is_shown(uneven: sw.Plan) -> None:
    from rich.console import Console

    from shardwright.reports.facts import advice_texts

    (line,) = advice_texts(uneven.data)
    console = Console(width=120)
    with console.capture() as shown:
        console.print(plan_view(uneven.data))
    assert line.startswith("50257 to ") and line in shown.get()
    assert sw.Plan.from_json(uneven.to_json()).data.size_advice == uneven.data.size_advice


def test_a_size_that_divides_is_not_advised_on() -> None:
    plan = sw.plan(lambda x, w: x @ w, f(64, 512), f(512, 1024), **ON)
    assert not plan.data.size_advice


def shapes_at(fn: Any, args: tuple[Any, ...], place: tuple[int, int], size: int) -> Any:
    """The shapes of all values with another size at a dimension of an argument, or None."""
    graph = prepare(sw.Program.trace(fn, *args)).graph
    sizes = program_sizes(graph)
    (root,) = [
        root for root, dims in sizes.dims.items() if (graph.arguments[place[0]], place[1]) in dims
    ]
    other = resized(graph, sizes, root, size)
    return None if other is None else [value.shape for value in other.values]


def attention(x: jax.Array, w: jax.Array) -> jax.Array:
    q = jnp.einsum("td,dhk->thk", x, w)
    scores = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, q))
    return jnp.einsum("hts,shk->thk", scores, q).reshape(x.shape[0], -1)


def test_heads_change_with_all_that_is_made_of_them() -> None:
    """As the program traced at that size has them."""
    args = (f(16, 96), f(96, 12, 8))
    found = shapes_at(attention, args, (1, 1), 16)
    traced = prepare(sw.Program.trace(attention, f(16, 96), f(96, 16, 8))).graph
    assert found == [value.shape for value in traced.values]


def test_sizes_in_loops_change_together() -> None:
    def layers(x: jax.Array, w: jax.Array) -> Any:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w) @ w.T, c.sum()), x, w)

    found = shapes_at(layers, (f(16, 24), f(3, 24, 40)), (1, 1), 32)
    traced = prepare(sw.Program.trace(layers, f(16, 32), f(3, 32, 40))).graph
    assert found == [value.shape for value in traced.values]


def test_what_a_loop_counts_or_a_slice_cuts_is_bound() -> None:
    def layers(x: jax.Array, w: jax.Array) -> Any:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

    assert shapes_at(layers, (f(16, 24), f(3, 24, 24)), (1, 0), 4) is None
    assert shapes_at(lambda x: jnp.tanh(x)[2:], (f(15, 8),), (0, 0), 16) is None
