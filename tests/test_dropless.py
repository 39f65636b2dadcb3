"""Mixtures of experts without capacities."""

import jax
import jax.numpy as jnp
import pytest

from shardwright.errors import InputError
from shardwright.models import build, grouped_matmul
from shardwright.models.mixture import mix

SMALL = {
    **{"layers": 1, "d_model": 32, "heads": 2, "kv_heads": 2, "d_ff": 48, "vocab": 64},
    **{"sequence": 24, "batch": 2, "experts": 4, "compute_dtype": "float32"},
}


def mixed(weights, y, **options):
    return mix(build("mixtral-8x7b", **SMALL, **options).options, weights, y)


@pytest.mark.parametrize("each", [1, 2])
def test_it_is_a_mixture_whose_capacity_drops_nothing(each):
    state = build("mixtral-8x7b", **SMALL).init(0)
    weights = jax.tree.map(lambda x: 20 * x[0], state["params"]["layers"]["mixed"]["experts"])
    y = jax.random.normal(jax.random.key(1), (2, 24, 32))

    def total(weights, y, **options):
        made, balance = mixed(weights, y, experts_per_token=each, **options)
        return jnp.sum(jnp.sin(made)) + balance, made

    grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (_, one), one_grads = grads(weights, y, dispatch="dropless")
    (_, all_), all_grads = grads(weights, y, capacity_factor=4.0)
    assert jnp.abs(all_).max() > 0.1
    assert jnp.allclose(one, all_, atol=1e-4)
    for a, b in zip(jax.tree.leaves(one_grads), jax.tree.leaves(all_grads), strict=True):
        assert jnp.allclose(a, b, atol=1e-3 * float(jnp.abs(b).max()))


def test_shards_of_the_kernels_are_parts_of_the_whole():
    of_rows, of_made, of_weights = jax.random.split(jax.random.key(0), 3)
    rows, made = jax.random.normal(of_rows, (2, 12, 8)), jax.random.normal(of_made, (2, 12, 6))
    weights = jax.random.normal(of_weights, (3, 8, 6))
    sizes = jnp.array([[5, 0, 7], [4, 4, 4]])
    grouped_matmul._product.check(rows, weights, sizes)
    grouped_matmul._product_transposed.check(made, weights, sizes)
    grouped_matmul._weights_gradient.check(rows, made, sizes)


def test_biases_are_refused():
    with pytest.raises(InputError, match="biases"):
        build("mixtral-8x7b", **SMALL, dispatch="dropless", biases=True)
