"""A mixture of experts without capacities: tokens are sorted by expert, and none is dropped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.models.grouped_matmul import grouped_matmul
from shardwright.models.training import PyTree
from shardwright.models.transformer_options import MixtureOptions


def mix_dropless(
    options: MixtureOptions, weights: PyTree, y: jax.Array, gates: jax.Array
) -> jax.Array:
    """The routed experts' output for y [batch, sequence, d_model].

    Args:
      weights: of the experts, "w_up", "w_down" and with a gate "w_gate", each [experts, ...].
      gates: [batch, sequence, experts], probabilities.

    Source: Gale et al., MegaBlocks (2022), section 4; as AI-Hypercomputer/maxtext,
      layers/moe.py, `sparse_matmul`.
    """
    batch, length, _ = y.shape
    each = options.experts_per_token
    gate, expert = jax.lax.top_k(gates, each)
    if each > 1:
        gate = gate / jnp.sum(gate, axis=-1, keepdims=True)
    expert = expert.reshape(batch, length * each)
    order = jnp.argsort(expert, axis=1, stable=True)
    back = jnp.argsort(order, axis=1)
    sizes = jnp.sum(jax.nn.one_hot(expert, options.experts, dtype=jnp.int32), axis=1)

    w = {name: weight.astype(y.dtype) for name, weight in weights.items()}
    rows = _rows_of(each, y, order, back)
    hidden = checkpoint_name(grouped_matmul(rows, w["w_up"], sizes), "mlpwi_1")
    if options.mlp == "swiglu":
        turned = checkpoint_name(grouped_matmul(rows, w["w_gate"], sizes), "mlpwi_0")
        hidden = jax.nn.silu(turned) * hidden
    else:
        hidden = jax.nn.gelu(hidden)
    made = checkpoint_name(grouped_matmul(hidden, w["w_down"], sizes), "mlpwo")
    tokens = _in_order(made, order, back).reshape(batch, length, each, -1)
    return jnp.sum(tokens * gate.astype(y.dtype)[..., None], axis=2)


def _taken(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of x [batch, rows, d] by their numbers [batch, rows]."""
    taken: jax.Array = jnp.take_along_axis(x, rows[..., None], axis=1)
    return taken


@jax.custom_vjp
def _in_order(x: jax.Array, order: jax.Array, back: jax.Array) -> Any:
    """Undoes a permutation; its gradient gathers, where that of a gather scatters."""
    return _taken(x, back)


_in_order.defvjp(
    lambda x, order, back: (_taken(x, back), order),
    lambda order, gradient: (_taken(gradient, order), None, None),
)


def _rows_of(each: int, y: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """The tokens y [batch, sequence, d], each as many times as it has experts, in order."""

    @jax.custom_vjp
    def rows(y: jax.Array, order: jax.Array, back: jax.Array) -> Any:
        return _taken(y, order // each)

    def backward(back: jax.Array, gradient: jax.Array) -> Any:
        batch, length, width = gradient.shape
        tokens = _taken(gradient, back).reshape(batch, length // each, each, width)
        return jnp.sum(tokens, axis=2), None, None

    rows.defvjp(lambda y, order, back: (_taken(y, order // each), back), backward)
    made: jax.Array = rows(y, order, back)
    return made
