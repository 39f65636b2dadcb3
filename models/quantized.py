"""Weights in eight bits with a scale for each output channel, and products with them.

Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic
  -Only Inference (2018), section 2.1, here symmetric, of weights only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.source_info_util import register_exclusion

_LARGEST = 127

# A product belongs to the line of the model that asks for it, which is what plans are to name.
register_exclusion(__file__)


class Quantized(NamedTuple):
    """A matrix of which an element is value times the scale of its channel.

    Attributes:
      values: int8, of the matrix's shape.
      scale: float32, of the dimensions that a product keeps.
    """

    values: jax.Array
    scale: jax.Array


Weight = jax.Array | Quantized


def quantize(weight: jax.Array, contracted: tuple[int, ...]) -> Quantized:
    """The nearest matrix in eight bits.

    Args:
      weight: any floating type.
      contracted: the dimensions that products sum over; one scale serves all of each sum.
    """
    weight = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weight), axis=contracted, keepdims=True) / _LARGEST
    values = jnp.round(weight / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
    return Quantized(values, jnp.squeeze(scale, contracted))


def product(
    equation: str, x: jax.Array, weight: Weight, bias: jax.Array | None = None
) -> jax.Array:
    """An einsum of x with a weight in the type of x, and the bias added.

    The scales of a quantised weight are those of the result's last dimensions, so that the values
    are read as they are and the result is scaled.
    """
    if isinstance(weight, Quantized):
        y = jnp.einsum(equation, x, weight.values.astype(x.dtype)) * weight.scale.astype(x.dtype)
    else:
        y = jnp.einsum(equation, x, weight.astype(x.dtype))
    return y if bias is None else y + bias.astype(y.dtype)


def take_rows(table: Weight, rows: jax.Array) -> jax.Array:
    """Rows of a table, whose scales are one a row; quantised ones in float32."""
    if isinstance(table, Quantized):
        scale = jnp.take(table.scale, rows, axis=0)[..., None]
        return jnp.take(table.values, rows, axis=0).astype(jnp.float32) * scale
    return jnp.take(table, rows, axis=0)
