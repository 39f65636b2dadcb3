"""What the convolutional reference models share: convolutions and batch norms of images.

Images are [batch, *space, channels] with two or three dimensions of space.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.models.options import ImageOptions
from shardwright.models.training import Batch, PyTree

_EPSILON = 1e-5


def init_convolution(
    key: jax.Array, space: tuple[int, ...], channels: int, filters: int, dtype: str
) -> jax.Array:
    """A kernel [*space, channels, filters], normal with the deviation that keeps variances.

    Source: He et al., Delving Deep into Rectifiers (2015), equation 10.
    """
    deviation = (2 / (prod(space) * channels)) ** 0.5
    kernel: jax.Array = deviation * jax.random.normal(key, (*space, channels, filters), dtype)
    return kernel


def convolve(
    x: jax.Array, kernel: jax.Array, stride: int | tuple[int, ...] = 1, padding: str = "SAME"
) -> jax.Array:
    """A convolution that keeps the size of space, over the stride, unless padding is "VALID".

    Args:
      stride: of all dimensions of space, or one of each.
    """
    dims = x.ndim - 2
    strides = (stride,) * dims if isinstance(stride, int) else stride
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), strides, padding, dimension_numbers=_layout(dims)
    )


def upsample(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A transposed convolution of stride 2."""
    dims = x.ndim - 2
    return lax.conv_transpose(
        x, kernel.astype(x.dtype), (2,) * dims, "SAME", dimension_numbers=_layout(dims)
    )


def _layout(dims: int) -> tuple[str, str, str]:
    space = "DHW"[-dims:]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def max_pool(x: jax.Array, window: int, stride: int) -> jax.Array:
    """The greatest of each window of space, which keeps its size over the stride."""
    dims = x.ndim - 2
    windows, strides = (1, *(window,) * dims, 1), (1, *(stride,) * dims, 1)
    pooled: jax.Array = lax.reduce_window(x, -jnp.inf, lax.max, windows, strides, "SAME")
    return pooled


def average_pool(x: jax.Array, window: int, stride: int) -> jax.Array:
    """The mean of each window of space, without what lies beyond its borders."""
    dims = x.ndim - 2
    windows, strides = (1, *(window,) * dims, 1), (1, *(stride,) * dims, 1)
    total = lax.reduce_window(x, 0.0, lax.add, windows, strides, "SAME")
    ones = jnp.ones((1, *x.shape[1:-1], 1), x.dtype)
    averaged: jax.Array = total / lax.reduce_window(ones, 0.0, lax.add, windows, strides, "SAME")
    return averaged


def pooled_logits(head: PyTree, x: jax.Array) -> jax.Array:
    """Logits [batch, classes] of the mean over space of images [batch, height, width, channels]."""
    x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
    logits: jax.Array = x @ head["w"].astype(x.dtype) + head["b"].astype(x.dtype)
    return logits


def labelled_images(options: ImageOptions, key: jax.Array) -> Batch:
    """Random images [batch, height, width, 3] and the label of each."""
    images_key, labels_key = jax.random.split(key)
    size = options.image
    return {
        "images": jax.random.normal(images_key, (options.batch, size, size, 3)),
        "labels": jax.random.randint(labels_key, (options.batch,), 0, options.classes),
    }


def init_batch_norm(filters: int, dtype: str, scale: float = 1.0) -> PyTree:
    """Parameters of a batch norm."""
    return {"scale": jnp.full(filters, scale, dtype), "bias": jnp.zeros(filters, dtype)}


def batch_norm(
    weights: PyTree, statistics: PyTree, x: jax.Array, groups: int, momentum: float = 0.9
) -> tuple[jax.Array, PyTree]:
    """Normalises each channel over space and a group of the batch; statistics in float32.

    Args:
      groups: into how many groups of equal size the batch is divided.

    Returns:
      The normalised images, and the running statistics with those of all groups mixed in.

    Source: Ioffe and Szegedy, Batch Normalization (2015), algorithm 1; groups: Ying et al., Image
      Classification at Supercomputer Scale (2018), section 3.4 (distributed batch normalisation).
    """
    y = x.astype(jnp.float32).reshape(groups, x.shape[0] // groups, *x.shape[1:])
    over = tuple(range(1, y.ndim - 1))
    mean = jnp.mean(y, axis=over, keepdims=True)
    variance = jnp.mean(jnp.square(y - mean), axis=over, keepdims=True)
    y = (y - mean) * lax.rsqrt(variance + _EPSILON)
    y = y * weights["scale"].astype(jnp.float32) + weights["bias"].astype(jnp.float32)
    seen = {"mean": mean, "variance": variance}
    running = {
        name: momentum * old + (1 - momentum) * jnp.mean(seen[name].reshape(groups, -1), axis=0)
        for name, old in statistics.items()
    }
    return y.reshape(x.shape).astype(x.dtype), running
