"""Products of rows with the weights of their experts, as planned kernels.

Rows that are sorted by expert are multiplied by that expert's weights, whatever their numbers: no
row is dropped and none is padded. On TPU JAX's own Pallas kernels run (megablox); elsewhere plain
JAX.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.planner.kernels import kernel

_TILES = (512, 1024, 1024)
"""Rows, contracted columns and result columns of a step of the kernels.

Source: AI-Hypercomputer/maxtext, configs/base.yml, `tile_batch_seq`, `tile_activation_dim` and
  `tile_weight_dim`.
"""


@jax.custom_vjp
def grouped_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
    """Rows times the weights of their expert, planned as one kernel; its gradients are two more.

    The batch can be sharded, and the columns of the weights; where the contracted dimension is,
    the results are partial sums.

    Args:
      rows: [batch, rows, d], along rows sorted by expert.
      weights: [experts, d, f].
      sizes: [batch, experts], how many of the rows are each expert's.

    Returns:
      [batch, rows, f].

    Source: Gale et al., MegaBlocks (2022), section 5.1.
    """
    return _product(rows, weights, sizes)


def _forward(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
    return _product(rows, weights, sizes), (rows, weights, sizes)


def _backward(saved: Any, gradient: jax.Array) -> Any:
    rows, weights, sizes = saved
    of_rows = _product_transposed(gradient, weights, sizes)
    return of_rows, _weights_gradient(rows, gradient, sizes), None


grouped_matmul.defvjp(_forward, _backward)


# -- on TPU --------------------------------------------------------------------------------------


def _by_expert(sizes: jax.Array, length: int) -> jax.Array:
    """Positions of the rows of all sequences, sorted by expert."""
    row = jnp.arange(length)
    find = functools.partial(jnp.searchsorted, side="right", method="compare_all")
    expert = jax.vmap(lambda ends: find(ends, row))(jnp.cumsum(sizes, axis=1))
    return jnp.argsort(expert.reshape(-1), stable=True)


def _multiply(transposed: bool, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    batch, length, width = rows.shape
    order = _by_expert(sizes, length)
    flat = rows.reshape(-1, width)[order]
    contracted, made_width = weights.shape[:0:-1] if transposed else weights.shape[1:]
    made = gmm(
        flat,
        weights,
        jnp.sum(sizes, axis=0),
        preferred_element_type=rows.dtype,
        tiling=tuple(map(min, _TILES, (batch * length, contracted, made_width))),
        transpose_rhs=transposed,
    )
    return made[jnp.argsort(order)].reshape(batch, length, -1)


def _sum_products(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    order = _by_expert(sizes, rows.shape[1])
    left, right = (x.reshape(-1, x.shape[-1])[order] for x in (rows, gradient))
    return tgmm(
        left.T,
        right,
        jnp.sum(sizes, axis=0),
        preferred_element_type=rows.dtype,
        tiling=tuple(map(min, _TILES, (left.shape[0], left.shape[1], right.shape[1]))),
    )


# -- elsewhere -----------------------------------------------------------------------------------


def _chosen(sizes: jax.Array, length: int, dtype: Any) -> jax.Array:
    """One-hot [batch, rows, experts]."""
    row = jnp.arange(length)[None, :, None]
    ends = jnp.cumsum(sizes, axis=1)[:, None, :]
    return ((row < ends) & (row >= ends - sizes[:, None, :])).astype(dtype)


def _plain(transposed: bool, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
    chosen = _chosen(sizes, rows.shape[1], rows.dtype)
    equation = "btf,bte,edf->btd" if transposed else "btd,bte,edf->btf"
    return jnp.einsum(equation, rows, chosen, weights)


def _plain_sum(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> Any:
    chosen = _chosen(sizes, rows.shape[1], rows.dtype)
    return jnp.einsum("btd,bte,btf->edf", rows, chosen, gradient)


# -- costs ---------------------------------------------------------------------------------------

# A tile in which one expert's rows end and another's begin is computed for both.
_FLOPS = f"2 * (b * t + {_TILES[0]} * e) * d * f"
# Rows are put in order and back: each is read and written once more.
_BYTES = "2 * (3 * b * t * (d + f) + e * d * f)"

_product = kernel(
    functools.partial(_multiply, False),
    reference=functools.partial(_plain, False),
    rule="b t d, e d f, b e -> b t f",
    whole="t",
    reduction="d",
    flops=_FLOPS,
    hbm_bytes=_BYTES,
    name="grouped_matmul",
)
_product_transposed = kernel(
    functools.partial(_multiply, True),
    reference=functools.partial(_plain, True),
    rule="b t f, e d f, b e -> b t d",
    whole="t",
    reduction="f",
    flops=_FLOPS,
    hbm_bytes=_BYTES,
    name="grouped_matmul_transposed",
)
_weights_gradient = kernel(
    _sum_products,
    reference=_plain_sum,
    rule="b t d, b t f, b e -> e d f",
    whole="t e",
    reduction="b",
    flops=_FLOPS,
    hbm_bytes=_BYTES,
    name="grouped_matmul_weights_gradient",
)
