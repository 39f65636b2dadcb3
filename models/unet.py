"""U-Net for the segmentation of images of two or three dimensions.

Source: Ronneberger et al., U-Net (2015), figure 1, and Cicek et al., 3D U-Net (2016), figure 2.
  Both crop what unpadded convolutions lose at the borders; here convolutions keep the size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.models.convolution import (
    batch_norm,
    convolve,
    init_batch_norm,
    init_convolution,
    max_pool,
    upsample,
)
from shardwright.models.options import UNetOptions
from shardwright.models.training import Batch, PyTree, cross_entropy


def init_params(options: UNetOptions, key: jax.Array) -> PyTree:
    """Parameters: two convolutions a level on the way down and up, an upsampling between levels."""
    dtype, space = options.param_dtype, (3,) * options.dimensions
    keys = iter(jax.random.split(key, 5 * len(options.filters)))
    params: PyTree = {}
    channels = options.channels
    for level, (first, second) in enumerate(options.filters):
        params[f"down{level}"] = [
            _init_unit(next(keys), space, channels, first, dtype),
            _init_unit(next(keys), space, first, second, dtype),
        ]
        channels = second
    for level in reversed(range(len(options.filters) - 1)):
        skipped = options.filters[level][1]
        risen = channels // 2 if options.halve else channels
        params[f"rise{level}"] = init_convolution(
            next(keys), (2,) * options.dimensions, channels, risen, dtype
        )
        params[f"up{level}"] = [
            _init_unit(next(keys), space, skipped + risen, skipped, dtype),
            _init_unit(next(keys), space, skipped, skipped, dtype),
        ]
        channels = skipped
    params["head"] = init_convolution(
        next(keys), (1,) * options.dimensions, channels, options.classes, dtype
    )
    return params


def _init_unit(
    key: jax.Array, space: tuple[int, ...], channels: int, filters: int, dtype: str
) -> PyTree:
    return {
        "kernel": init_convolution(key, space, channels, filters, dtype),
        "norm": init_batch_norm(filters, dtype),
    }


def apply(
    options: UNetOptions, params: PyTree, statistics: PyTree, images: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Logits [batch, *space, classes] of images [batch, *space, channels], and new statistics."""
    new: PyTree = {}

    def units(x: jax.Array, name: str) -> jax.Array:
        new[name] = []
        for weights, old in zip(params[name], statistics[name], strict=True):
            y = convolve(x, weights["kernel"])
            y, seen = batch_norm(weights["norm"], old, y, options.norm_groups)
            x = jax.nn.relu(y)
            new[name].append(seen)
        return x

    x = images.astype(options.compute_dtype)
    bottom = len(options.filters) - 1
    skipped = []
    for level in range(bottom):
        x = units(x, f"down{level}")
        skipped.append(x)
        x = max_pool(x, 2, 2)
    x = units(x, f"down{bottom}")
    for level in reversed(range(bottom)):
        risen = upsample(x, params[f"rise{level}"])
        x = units(jnp.concatenate([skipped[level], risen], axis=-1), f"up{level}")
    return convolve(x, params["head"]), new


def loss(
    options: UNetOptions, params: PyTree, statistics: PyTree, batch: Batch
) -> tuple[jax.Array, PyTree]:
    """Mean cross-entropy over all pixels, and the new statistics."""
    logits, new = apply(options, params, statistics, batch["images"])
    return cross_entropy(logits, batch["labels"]), new


def make_batch(options: UNetOptions, key: jax.Array) -> Batch:
    """Random images [batch, *space, channels] and labels [batch, *space]."""
    images_key, labels_key = jax.random.split(key)
    shape = (options.batch, *(options.image,) * options.dimensions)
    return {
        "images": jax.random.normal(images_key, (*shape, options.channels)),
        "labels": jax.random.randint(labels_key, shape, 0, options.classes),
    }


def model_flops(options: UNetOptions) -> int:
    """FLOPs of a step's convolutions: three times those of a forward pass."""
    dims: int = options.dimensions
    taps = 3**dims
    macs: int = 0
    channels = options.channels
    bottom = len(options.filters) - 1
    for level, (first, second) in enumerate(options.filters):
        points = (options.image // 2**level) ** dims
        macs += points * taps * (channels * first + first * second)
        channels = second
    for level in reversed(range(bottom)):
        points, skipped = (options.image // 2**level) ** dims, options.filters[level][1]
        risen = channels // 2 if options.halve else channels
        # Each pixel of a transposed convolution of stride and size 2 has one tap.
        macs += points * channels * risen
        macs += points * taps * ((skipped + risen) * skipped + skipped**2)
        channels = skipped
    macs += options.image**dims * channels * options.classes
    return 6 * options.batch * macs
