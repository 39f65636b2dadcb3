"""A residual convolution net with its whole train step, as a program to plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.models.options import MlpOptions
from shardwright.models.training import (
    cross_entropy,
    make_init,
    make_train_step,
    without_statistics,
)

_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def convnet(
    batch: int, size: int = 64, width: int = 64, blocks: int = 2, classes: int = 1000
) -> tuple[Any, tuple[Any, Any], tuple[int, ...]]:
    """A train step, its example arguments, and which of them it takes over.

    A 7x7 stem, then three stages of `blocks` residual blocks of 3x3 convolutions with group
    normalisation, each stage half as large and twice as wide.
    """
    # AdamW and clipping are those of every reference model; the sizes are its own.
    options = MlpOptions(batch=batch, features=size, hidden=width, layers=blocks, classes=classes)
    widths = [width, 2 * width, 4 * width]

    def init_params(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 2 + len(widths) * (1 + 2 * blocks)))

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape) * 0.05

        params: dict[str, Any] = {"stem": normal(7, 7, 3, width), "stages": []}
        inside = width
        for outside in widths:
            stage = {
                "down": normal(3, 3, inside, outside),
                "blocks": [
                    {
                        "first": normal(3, 3, outside, outside),
                        "second": normal(3, 3, outside, outside),
                        "scale": jnp.ones(outside),
                    }
                    for _ in range(blocks)
                ],
            }
            params["stages"].append(stage)
            inside = outside
        params["head"] = normal(inside, classes)
        return params

    def loss(params: Any, data: dict[str, jax.Array]) -> jax.Array:
        x = _convolution(data["images"].astype(jnp.bfloat16), params["stem"], stride=2)
        for stage in params["stages"]:
            x = _convolution(x, stage["down"], stride=2)
            for block in stage["blocks"]:
                y = jax.nn.relu(_normalize(_convolution(x, block["first"]), block["scale"]))
                x = x + _convolution(y, block["second"])
        x = jnp.mean(x, (1, 2))
        return cross_entropy(x @ params["head"].astype(x.dtype), data["labels"])

    state = jax.eval_shape(make_init(init_params, options), jax.random.key(0))
    data = {
        "images": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return make_train_step(without_statistics(loss), options), (state, data), (0,)


def _convolution(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=_DIMENSIONS
    )


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalises each channel of each image, in float32."""
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, (1, 2), keepdims=True)
    variance = jnp.mean((y - mean) ** 2, (1, 2), keepdims=True)
    return ((y - mean) * lax.rsqrt(variance + 1e-5) * scale).astype(x.dtype)
