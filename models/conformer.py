"""Conformer: a speech encoder of attention and convolution, trained with CTC.

Two convolutions of stride 2 shorten the frames fourfold. A block is half a feed-forward step,
attention with relative positions, a convolution over time of each channel, and another half step.

Source: Gulati et al., Conformer (2020), figures 1 to 4, with the CTC loss (Graves et al.,
  Connectionist Temporal Classification, 2006) in place of its transducer, so that there is no
  decoder; its batch norms are kept. Attention: Dai et al., Transformer-XL (2019), section 3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import ceil

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shardwright.models.convolution import (
    batch_norm,
    convolve,
    init_batch_norm,
    init_convolution,
)
from shardwright.models.options import ConformerOptions
from shardwright.models.positions import sinusoids
from shardwright.models.training import Batch, PyTree

_EPSILON = 1e-5
_STRIDE = 2
_WINDOW = 3
_INIT_STDDEV = 0.02


def init_params(options: ConformerOptions, key: jax.Array) -> PyTree:
    """Parameters; those of the blocks are stacked."""
    d, dtype = options.d_model, options.param_dtype
    first_key, second_key, project_key, head_key, blocks_key = jax.random.split(key, 5)
    window = (_WINDOW, _WINDOW)
    block_keys = jax.random.split(blocks_key, options.layers)
    return {
        "subsampling": {
            "first": init_convolution(first_key, window, 1, d, dtype),
            "second": init_convolution(second_key, window, d, d, dtype),
            "first_bias": jnp.zeros(d, dtype),
            "second_bias": jnp.zeros(d, dtype),
            "project": _normal(options, project_key, (_shortened(options.features), d, d)),
            "project_bias": jnp.zeros(d, dtype),
        },
        "blocks": jax.vmap(functools.partial(_init_block, options))(block_keys),
        "head": {
            "w": _normal(options, head_key, (d, options.classes)),
            "b": jnp.zeros(options.classes, dtype),
        },
    }


def _shortened(size: int) -> int:
    """What two strides leave of a size."""
    return ceil(ceil(size / _STRIDE) / _STRIDE)


def _normal(options: ConformerOptions, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return _INIT_STDDEV * jax.random.normal(key, shape, options.param_dtype)


def _init_block(options: ConformerOptions, key: jax.Array) -> PyTree:
    keys = iter(jax.random.split(key, 14))
    d, h, dtype = options.d_model, options.heads, options.param_dtype
    width = d // h

    def normal(*shape: int) -> jax.Array:
        return _normal(options, next(keys), shape)

    def layer_norm() -> PyTree:
        return {"scale": jnp.ones(d, dtype), "bias": jnp.zeros(d, dtype)}

    def feed_forward() -> PyTree:
        inner = options.feed_forward_width
        weights = {"w_up": normal(d, inner), "w_down": normal(inner, d)}
        biases = {"b_up": jnp.zeros(inner, dtype), "b_down": jnp.zeros(d, dtype)}
        return weights | biases | {"before": layer_norm()}

    return {
        "first": feed_forward(),
        "attention": {
            "before": layer_norm(),
            **{name: normal(d, h, width) for name in ("wq", "wk", "wv", "w_position")},
            "wo": normal(h, width, d),
            **{name: jnp.zeros((h, width), dtype) for name in ("bq", "bk", "bv")},
            "bo": jnp.zeros(d, dtype),
            **{name: normal(h, width) for name in ("content_bias", "position_bias")},
        },
        "convolution": {
            "before": layer_norm(),
            "w_in": normal(d, 2, d),
            "b_in": jnp.zeros((2, d), dtype),
            "depthwise": normal(options.kernel, 1, d),
            "norm": init_batch_norm(d, dtype),
            "w_out": normal(d, d),
            "b_out": jnp.zeros(d, dtype),
        },
        "second": feed_forward(),
        "after": layer_norm(),
    }


def apply(
    options: ConformerOptions, params: PyTree, statistics: PyTree, frames: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Logits [batch, frames / 4, classes] of frames [batch, frames, features], new statistics."""
    x = _subsample(params["subsampling"], frames.astype(options.compute_dtype))
    length = x.shape[1]
    # From the farthest key after a query to the farthest before it.
    distance = length - 1 - lax.iota(jnp.float32, 2 * length - 1)
    positions = sinusoids(distance, options.d_model).astype(x.dtype)
    block: Callable[..., tuple[jax.Array, PyTree]] = functools.partial(_block, options)
    if options.remat == "full":
        policy = jax.checkpoint_policies.nothing_saveable
        block = jax.checkpoint(block, policy=policy, prevent_cse=False)

    def next_residual(x: jax.Array, stacked: PyTree) -> tuple[jax.Array, PyTree]:
        return block(*stacked, x, positions)

    stacked = (params["blocks"], statistics["blocks"])
    x, new = lax.scan(next_residual, x, stacked)
    head = params["head"]
    logits = jnp.einsum("btd,dc->btc", x, head["w"].astype(x.dtype)) + head["b"].astype(x.dtype)
    return logits, {"blocks": new}


def _subsample(weights: PyTree, frames: jax.Array) -> jax.Array:
    """The residual stream [batch, frames / 4, d_model]."""
    x = frames[..., None]
    for name in ("first", "second"):
        bias = weights[f"{name}_bias"].astype(x.dtype)
        x = jax.nn.relu(convolve(x, weights[name], _STRIDE) + bias)
    x = jnp.einsum("btfc,fcd->btd", x, weights["project"].astype(x.dtype))
    return jnp.add(x, weights["project_bias"].astype(x.dtype))


def _block(
    options: ConformerOptions,
    weights: PyTree,
    statistics: PyTree,
    x: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, PyTree]:
    x = x + 0.5 * _feed_forward(weights["first"], x)
    x = x + _attention(weights["attention"], x, positions)
    old = statistics["convolution"]
    convolved, new = _convolution(options, weights["convolution"], old, x)
    x = x + convolved
    x = x + 0.5 * _feed_forward(weights["second"], x)
    return _layer_norm(weights["after"], x), {"convolution": new}


def _layer_norm(weights: PyTree, x: jax.Array) -> jax.Array:
    """Source: Ba et al., Layer Normalization (2016), equation 4; taken in float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + _EPSILON)
    y = y * weights["scale"].astype(jnp.float32) + weights["bias"].astype(jnp.float32)
    normed: jax.Array = y.astype(x.dtype)
    return normed


def _feed_forward(weights: PyTree, x: jax.Array) -> jax.Array:
    y = _layer_norm(weights["before"], x)
    w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), weights)
    hidden = jax.nn.silu(jnp.einsum("btd,df->btf", y, w["w_up"]) + w["b_up"])
    return jnp.add(jnp.einsum("btf,fd->btd", hidden, w["w_down"]), w["b_down"])


def _attention(weights: PyTree, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention to all frames, by content and by distance; positions [2 frames - 1, d_model].

    Source: Dai et al., Transformer-XL (2019), section 3.3, the equation of A^rel.
    """
    w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), weights)
    y = _layer_norm(weights["before"], x)
    q, k, v = (
        jnp.einsum("btd,dhk->bthk", y, w[f"w{name}"]) + w[f"b{name}"] for name in ("q", "k", "v")
    )
    distances = jnp.einsum("pd,dhk->phk", positions, w["w_position"])
    by_content = jnp.einsum("bthk,bshk->bhts", q + w["content_bias"], k)
    by_distance = jnp.einsum("bthk,phk->bhtp", q + w["position_bias"], distances)
    scores = (by_content + _relative_shift(by_distance)).astype(jnp.float32)
    mix = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhts,bshk->bthk", mix, v)
    return jnp.add(jnp.einsum("bthk,hkd->btd", mixed, w["wo"]), w["bo"])


def _relative_shift(scores: jax.Array) -> jax.Array:
    """Scores [..., queries, distances] as [..., queries, keys]: row t begins at distance t.

    Distances run from queries - 1 down to 1 - queries, so that key s of query t is column
    queries - 1 - t + s. Rows of one column more are read as rows of one column less.

    Source: Dai et al., Transformer-XL (2019), appendix B.
    """
    *outer, queries, distances = scores.shape
    padded = jnp.pad(scores, [(0, 0)] * len(outer) + [(0, 0), (1, 0)])
    turned = padded.reshape(*outer, distances + 1, queries)[..., 1:, :]
    return turned.reshape(*outer, queries, distances)[..., :queries]


def _convolution(
    options: ConformerOptions, weights: PyTree, statistics: PyTree, x: jax.Array
) -> tuple[jax.Array, PyTree]:
    """A gated projection, a convolution over time of each channel, and a projection.

    Source: Gulati et al., Conformer (2020), figure 2; Dauphin et al., Language Modeling with Gated
      Convolutional Networks (2016), equation 1 (the gate).
    """
    y = _layer_norm(weights["before"], x)
    w_in, b_in = weights["w_in"].astype(x.dtype), weights["b_in"].astype(x.dtype)
    both = jnp.einsum("btd,dgc->btgc", y, w_in) + b_in
    y = both[:, :, 0] * jax.nn.sigmoid(both[:, :, 1])
    y = lax.conv_general_dilated(
        y, weights["depthwise"].astype(x.dtype), (1,), "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=options.d_model,
    )  # fmt: skip
    y, new = batch_norm(weights["norm"], statistics, y, options.norm_groups)
    y = jax.nn.silu(y)
    w_out, b_out = weights["w_out"].astype(x.dtype), weights["b_out"].astype(x.dtype)
    return jnp.einsum("btc,cd->btd", y, w_out) + b_out, new


def loss(
    options: ConformerOptions, params: PyTree, statistics: PyTree, batch: Batch
) -> tuple[jax.Array, PyTree]:
    """Mean CTC loss of batch["frames"] with batch["labels"] [batch, labels], new statistics."""
    logits, new = apply(options, params, statistics, batch["frames"])
    labels = batch["labels"]
    none_padded = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
    losses = optax.ctc_loss(logits.astype(jnp.float32), none_padded[0], labels, none_padded[1])
    return jnp.mean(losses), new


def make_batch(options: ConformerOptions, key: jax.Array) -> Batch:
    """Random frames and labels; class 0 is the blank."""
    frames_key, labels_key = jax.random.split(key)
    shape = (options.batch, options.frames, options.features)
    labels_shape = (options.batch, options.labels)
    return {
        "frames": jax.random.normal(frames_key, shape),
        "labels": jax.random.randint(labels_key, labels_shape, 1, options.classes),
    }


def model_flops(options: ConformerOptions) -> int:
    """FLOPs of a step's convolutions and products: three times those of a forward pass.

    The loss does not count.
    """
    d, frames, features = options.d_model, options.frames, options.features
    half = ceil(frames / _STRIDE), ceil(features / _STRIDE)
    length, bands = _shortened(frames), _shortened(features)
    taps = _WINDOW**2
    subsampling = half[0] * half[1] * taps * d + length * bands * (taps * d * d + d * d)
    projections = 4 * d * d + 4 * d * options.feed_forward_width + 3 * d * d
    attention = length * (length + length + 2 * length - 1) * d
    block = length * (projections + options.kernel * d) + attention + (2 * length - 1) * d * d
    # The projection of positions is the same for the whole batch, and is counted as if it were not.
    macs: int = subsampling + options.layers * block + length * d * options.classes
    return 6 * options.batch * macs
