"""ResNet: residual networks of bottleneck blocks with batch norm, version 1.5.

Version 1.5 strides in the 3x3 convolution of a block, not in the first 1x1 one.

Source: He et al., Deep Residual Learning for Image Recognition (2015), table 1; Goyal et al.,
  Accurate, Large Minibatch SGD (2017), section 5.1 (the stride, and the zero scale of each block's
  last batch norm).
"""

from __future__ import annotations

from math import ceil

import jax
import jax.numpy as jnp

from shardwright.models.convolution import (
    batch_norm,
    convolve,
    init_batch_norm,
    init_convolution,
    max_pool,
)
from shardwright.models.options import ResNetOptions
from shardwright.models.training import Batch, PyTree, cross_entropy

_EXPANSION = 4


def init_params(options: ResNetOptions, key: jax.Array) -> PyTree:
    """Parameters; blocks are named by stage and number."""
    dtype, channels = options.param_dtype, options.width
    stem_key, head_key, blocks_key = jax.random.split(key, 3)
    params = {"stem": _init_unit(stem_key, 7, 3, channels, dtype)}
    for name, filters, _ in _blocks(options):
        blocks_key, block_key = jax.random.split(blocks_key)
        params[name] = _init_block(block_key, channels, filters, _changes(name), dtype)
        channels = _EXPANSION * filters
    params["head"] = {
        "w": 0.01 * jax.random.normal(head_key, (channels, options.classes), dtype),
        "b": jnp.zeros(options.classes, dtype),
    }
    return params


def _blocks(options: ResNetOptions) -> list[tuple[str, int, int]]:
    """Name, filters inside and stride of every block."""
    return [
        (f"block{stage}_{number}", options.width * 2**stage, 2 if stage and not number else 1)
        for stage, depth in enumerate(options.depths)
        for number in range(depth)
    ]


def _changes(name: str) -> bool:
    """Whether a block changes the number of channels, so that its shortcut is a convolution."""
    return name.endswith("_0")


def _init_block(key: jax.Array, channels: int, filters: int, changes: bool, dtype: str) -> PyTree:
    keys = jax.random.split(key, 4)
    wide = _EXPANSION * filters
    block = {
        "reduce": _init_unit(keys[0], 1, channels, filters, dtype),
        "space": _init_unit(keys[1], 3, filters, filters, dtype),
        "expand": _init_unit(keys[2], 1, filters, wide, dtype, scale=0.0),
    }
    if changes:
        block["shortcut"] = _init_unit(keys[3], 1, channels, wide, dtype)
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
    x = images.astype(options.compute_dtype)
    new = {}

    def unit(x: jax.Array, weights: PyTree, old: PyTree, stride: int) -> tuple[jax.Array, PyTree]:
        y = convolve(x, weights["kernel"], stride)
        return batch_norm(weights["norm"], old, y, options.norm_groups)

    x, new["stem"] = unit(x, params["stem"], statistics["stem"], 2)
    x = max_pool(jax.nn.relu(x), 3, 2)
    for name, _, stride in _blocks(options):
        weights, old = params[name], statistics[name]
        block = {}
        y, block["reduce"] = unit(x, weights["reduce"], old["reduce"], 1)
        y, block["space"] = unit(jax.nn.relu(y), weights["space"], old["space"], stride)
        y, block["expand"] = unit(jax.nn.relu(y), weights["expand"], old["expand"], 1)
        if "shortcut" in weights:
            x, block["shortcut"] = unit(x, weights["shortcut"], old["shortcut"], stride)
        x, new[name] = jax.nn.relu(x + y), block
    x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
    head = params["head"]
    return x @ head["w"].astype(x.dtype) + head["b"].astype(x.dtype), new


def loss(
    options: ResNetOptions, params: PyTree, statistics: PyTree, batch: Batch
) -> tuple[jax.Array, PyTree]:
    """Mean cross-entropy of batch["images"] with batch["labels"], and the new statistics."""
    logits, new = apply(options, params, statistics, batch["images"])
    return cross_entropy(logits, batch["labels"]), new


def make_batch(options: ResNetOptions, key: jax.Array) -> Batch:
    """Random images and labels."""
    images_key, labels_key = jax.random.split(key)
    size = options.image
    return {
        "images": jax.random.normal(images_key, (options.batch, size, size, 3)),
        "labels": jax.random.randint(labels_key, (options.batch,), 0, options.classes),
    }


def model_flops(options: ResNetOptions) -> int:
    """FLOPs of a step's convolutions and products: three times those of a forward pass."""
    size, channels, macs = ceil(options.image / 2), options.width, 0
    macs += size**2 * 7 * 7 * 3 * channels
    size = ceil(size / 2)
    for name, filters, stride in _blocks(options):
        inner, size = size, ceil(size / stride)
        wide = _EXPANSION * filters
        macs += inner**2 * channels * filters + size**2 * (9 * filters**2 + filters * wide)
        macs += size**2 * channels * wide if _changes(name) else 0
        channels = wide
    macs += channels * options.classes
    return 6 * options.batch * macs
