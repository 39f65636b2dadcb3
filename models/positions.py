"""How attention knows of positions: sinusoids, rotary pairs, and biases by distance."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

Rope = tuple[jax.Array, jax.Array]
"""Cosines and sines, [positions, head_dim / 2] each."""

_FARTHEST = 128


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Sines, then cosines, of position times frequency: [positions, width] in float32.

    Pair i turns by 10000^(-2i / width) a position.

    Source: Vaswani et al., Attention Is All You Need (2017), section 3.5 (which interleaves them).
    """
    cos, sin = rope_tables(positions, width, 10_000.0)
    return jnp.concatenate([sin, cos], axis=-1)


def relative_bias(table: jax.Array, length: int, *, bidirectional: bool) -> jax.Array:
    """The bias [heads, length, length] of attention scores in float32, by distance.

    Half of the buckets are of one distance each; the others grow up to a distance of 128, and
    all beyond share the last. An encoder has half of them for keys that follow.

    Args:
      table: [buckets, heads].

    Source: Raffel et al., Exploring the Limits of Transfer Learning (2020), section 2.1; the
      buckets: google-research/text-to-text-transfer-transformer, `_relative_position_bucket`.
    """
    buckets = table.shape[0]
    query = jax.lax.broadcasted_iota(jnp.int32, (length, length), 0)
    key = jax.lax.broadcasted_iota(jnp.int32, (length, length), 1)
    distance, start = query - key, jnp.zeros((), jnp.int32)
    if bidirectional:
        buckets //= 2
        start = jnp.where(distance < 0, buckets, 0)
        distance = jnp.abs(distance)
    distance = jnp.maximum(distance, 0)
    exact = buckets // 2
    growth = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(_FARTHEST / exact)
    far = exact + (growth * (buckets - exact)).astype(jnp.int32)
    bucket = start + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))
    return jnp.moveaxis(table.astype(jnp.float32)[bucket], -1, 0)


def rope_tables(positions: jax.Array, head_dim: int, theta: float) -> Rope:
    """Cosines and sines [positions, head_dim / 2] of position times frequency.

    Pair i turns by theta^(-2i / head_dim) a position.

    Source: Su et al., RoFormer (2021), section 3.2.2.
    """
    pair = jax.lax.iota(jnp.float32, head_dim // 2)
    frequency = theta ** (-2 * pair / head_dim)
    angle = positions.astype(jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates the pairs (i, i + head_dim / 2) of x [batch, sequence, heads, head_dim]."""
    cos, sin = (table[:, None, :] for table in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
