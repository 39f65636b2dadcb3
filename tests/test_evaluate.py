"""Hand-made shardings priced: which collectives, of how many bytes, by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw

BATCH, WIDTH, HIDDEN = 4096, 1024, 8192
WEIGHTS = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
WEIGHT_BYTES = 4 * WIDTH * HIDDEN


def step(
    weights: dict[str, jax.Array], x: jax.Array, rows: P | None = None
) -> dict[str, jax.Array]:
    def keep(y: jax.Array) -> jax.Array:
        return y if rows is None else jax.lax.with_sharding_constraint(y, rows)

    def loss(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(keep(keep(jax.nn.relu(x @ w["up"])) @ w["down"])).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


ARGS = (
    {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in WEIGHTS.items()},
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)


def _collectives(mesh: dict[str, int], specs: Any, rows: P | None = None) -> set[Any]:
    estimate = sw.evaluate(
        functools.partial(step, rows=rows), *ARGS, topology="v5e:2x2", mesh=mesh, in_specs=specs,
        donate_argnums=(0,),
    )  # fmt: skip
    return {(c.kind, tuple(c.axes), c.nbytes) for c in estimate.collectives if c.nbytes > 1e3}


def test_data_parallel_sums_each_weight_gradient() -> None:
    found = _collectives({"data": 4}, ({"up": P(), "down": P()}, P("data")))
    assert found == {("all_reduce", ("data",), WEIGHT_BYTES)}


def test_fully_sharded_gathers_weights_and_scatters_gradients() -> None:
    specs = ({"up": P("data"), "down": P("data")}, P("data"))
    found = _collectives({"data": 4}, specs, rows=P("data"))
    assert {kind for kind, _, _ in found} == {"all_gather", "reduce_scatter"}
    assert {nbytes for _, _, nbytes in found} == {WEIGHT_BYTES}


def test_tensor_parallel_sums_activations() -> None:
    specs = ({"up": P(None, "model"), "down": P("model")}, P())
    found = _collectives({"model": 4}, specs)
    # The output of the second product, and nothing of the weights.
    assert found == {("all_reduce", ("model",), 4 * BATCH * WIDTH)}


def test_memory_of_a_replicated_program_is_that_of_its_arguments_and_more() -> None:
    estimate = sw.evaluate(
        step, *ARGS, topology="v5e:2x2", mesh={"data": 4}, in_specs=P(), donate_argnums=(0,)
    )
    assert estimate.peak_memory_bytes >= 2 * WEIGHT_BYTES + 4 * BATCH * WIDTH


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (({"up": P("tensor"), "down": P()}, P()), "axis 'tensor' .* is not in the mesh"),
        (({"up": P("data", "data"), "down": P()}, P()), "used twice"),
        (({"up": P(None, None, "data"), "down": P()}, P()), "3 entries"),
        (({"up": P()}, P()), "not a prefix"),
    ],
)
def test_bad_specs_are_told(specs: Any, message: str) -> None:
    with pytest.raises(sw.InputError, match=message):
        _collectives({"data": 4}, specs)


def test_spec_that_does_not_divide_is_told() -> None:
    with pytest.raises(sw.InputError, match="does not divide"):
        sw.evaluate(
            lambda x: x * 2, jax.ShapeDtypeStruct((6,), jnp.float32), topology="v5e:2x2",
            mesh={"data": 4}, in_specs=(P("data"),),
        )  # fmt: skip


def test_plan_is_at_least_as_good_as_the_same_sharding_by_hand() -> None:
    plan = sw.plan(step, *ARGS, topology="v5e:2x2", mesh={"data": 4}, donate_argnums=(0,))
    for specs in (
        ({"up": P(), "down": P()}, P("data")),
        ({"up": P("data"), "down": P("data")}, P("data")),
    ):
        by_hand = sw.evaluate(
            step, *ARGS, topology="v5e:2x2", mesh={"data": 4}, in_specs=specs, donate_argnums=(0,)
        )
        assert plan.estimate.step_time_s <= by_hand.step_time_s * (1 + 1e-3)
