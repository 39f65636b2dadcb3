"""ResNet: residual networks of bottleneck or basic blocks with batch norm, version 1.5.

Version 1.5 strides in the 3x3 convolution of a block, not in the first 1x1 one.

Source: He et al., Deep Residual Learning for Image Recognition (2015), table 1; Goyal et al.,
  Accurate, Large Minibatch SGD (2017), section 5.1 (the stride, and the zero scale of each block's
  last batch norm).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import jax
import jax.numpy as jnp

from shardwright.models.convolution import (
    batch_norm,
    convolve,
    init_batch_norm,
    init_convolution,
    labelled_images,
    max_pool,
    pooled_logits,
)
from shardwright.models.options import ResNetOptions
from shardwright.models.training import Batch, PyTree, cross_entropy

_EXPANSION = {"bottleneck": 4, "basic": 1}
"""Filters that a block makes, as a multiple of those inside."""
_MOST_UNITS = 4
"""Convolutions of a block."""


def init_params(options: ResNetOptions, key: jax.Array) -> PyTree:
    """Parameters; blocks are named by stage and number."""
    backbone_key, head_key = jax.random.split(key)
    channels = backbone_channels(options)
    head = 0.01 * jax.random.normal(head_key, (channels, options.classes), options.param_dtype)
    return init_backbone(options, backbone_key) | {
        "head": {"w": head, "b": jnp.zeros(options.classes, options.param_dtype)}
    }


def init_backbone(options: ResNetOptions, key: jax.Array) -> PyTree:
    """Parameters of all but the head."""
    dtype, channels = options.param_dtype, options.width
    # Split at once: of keys split from keys split from keys, XLA for CPU compiles very slowly.
    keys = iter(jax.random.split(key, 1 + _MOST_UNITS * sum(options.depths)))
    params = {"stem": _init_unit(next(keys), 7, 3, channels, dtype)}
    for name, filters, stride in _blocks(options):
        params[name] = _init_block(options, keys, channels, filters, stride)
        channels = _EXPANSION[options.block] * filters
    return params


def backbone_channels(options: ResNetOptions) -> int:
    """Channels of what the backbone makes."""
    return _EXPANSION[options.block] * options.width << (len(options.depths) - 1)


def _blocks(options: ResNetOptions) -> list[tuple[str, int, int]]:
    """Name, filters inside and stride of every block."""
    return [
        (f"block{stage}_{number}", options.width * 2**stage, 1 if number else stride)
        for stage, (depth, stride) in enumerate(zip(options.depths, options.strides, strict=True))
        for number in range(depth)
    ]


def _init_block(
    options: ResNetOptions, keys: Iterator[jax.Array], channels: int, filters: int, stride: int
) -> PyTree:
    dtype = options.param_dtype
    wide = _EXPANSION[options.block] * filters
    if options.block == "bottleneck":
        block = {
            "reduce": _init_unit(next(keys), 1, channels, filters, dtype),
            "space": _init_unit(next(keys), 3, filters, filters, dtype),
            "expand": _init_unit(next(keys), 1, filters, wide, dtype, scale=0.0),
        }
    else:
        block = {
            "space": _init_unit(next(keys), 3, channels, filters, dtype),
            "expand": _init_unit(next(keys), 3, filters, wide, dtype, scale=0.0),
        }
    if channels != wide or stride != 1:
        block["shortcut"] = _init_unit(next(keys), 1, channels, wide, dtype)
    return block


def _init_unit(
    key: jax.Array, size: int, channels: int, filters: int, dtype: str, scale: float = 1.0
) -> PyTree:
    return {
        "kernel": init_convolution(key, (size, size), channels, filters, dtype),
        "norm": init_batch_norm(filters, dtype, scale),
    }


def apply(
    options: ResNetOptions, params: PyTree, statistics: PyTree, images: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Logits [batch, classes] of images [batch, height, width, 3], and the new statistics."""
    x, new = features(options, params, statistics, images)
    return pooled_logits(params["head"], x), new


def features(
    options: ResNetOptions, params: PyTree, statistics: PyTree, images: jax.Array
) -> tuple[jax.Array, PyTree]:
    """What the backbone makes of images, [batch, height, width, channels], and new statistics."""
    x = images.astype(options.compute_dtype)
    new = {}

    def unit(x: jax.Array, weights: PyTree, old: PyTree, stride: int) -> tuple[jax.Array, PyTree]:
        y = convolve(x, weights["kernel"], stride)
        return batch_norm(weights["norm"], old, y, options.norm_groups)

    x, new["stem"] = unit(x, params["stem"], statistics["stem"], 2)
    x = max_pool(jax.nn.relu(x), 3, 2)
    for name, _, stride in _blocks(options):
        weights, old = params[name], statistics[name]
        block, y = {}, x
        if "reduce" in weights:
            y, block["reduce"] = unit(y, weights["reduce"], old["reduce"], 1)
            y = jax.nn.relu(y)
        y, block["space"] = unit(y, weights["space"], old["space"], stride)
        y, block["expand"] = unit(jax.nn.relu(y), weights["expand"], old["expand"], 1)
        if "shortcut" in weights:
            x, block["shortcut"] = unit(x, weights["shortcut"], old["shortcut"], stride)
        x, new[name] = jax.nn.relu(x + y), block
    return x, new


def loss(
    options: ResNetOptions, params: PyTree, statistics: PyTree, batch: Batch
) -> tuple[jax.Array, PyTree]:
    """Mean cross-entropy of batch["images"] with batch["labels"], and the new statistics."""
    logits, new = apply(options, params, statistics, batch["images"])
    return cross_entropy(logits, batch["labels"]), new


make_batch = labelled_images


def model_flops(options: ResNetOptions) -> int:
    """FLOPs of a step's convolutions and products: three times those of a forward pass."""
    head = backbone_channels(options) * options.classes
    return 6 * options.batch * (backbone_macs(options) + head)


def backbone_macs(options: ResNetOptions) -> int:
    """Multiply-adds of the backbone's convolutions for an image."""
    size, channels, macs = ceil(options.image / 2), options.width, 0
    macs += size**2 * 7 * 7 * 3 * channels
    size = ceil(size / 2)
    for _, filters, stride in _blocks(options):
        inner, size = size, ceil(size / stride)
        wide = _EXPANSION[options.block] * filters
        if options.block == "bottleneck":
            macs += inner**2 * channels * filters + size**2 * (9 * filters**2 + filters * wide)
        else:
            macs += size**2 * 9 * (channels * filters + filters * wide)
        macs += size**2 * channels * wide if channels != wide or stride != 1 else 0
        channels = wide
    return macs
