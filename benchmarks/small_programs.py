"""Training steps of few operations, which the TPU compiler takes seconds for, of any size.

Each is a function of its sizes; `cut` names the mesh axes of the dimensions of its activations,
where they are constrained by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

Made = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
Loss = Callable[[Any, Any], jax.Array]
_F32, _BF16 = jnp.float32, jnp.bfloat16
_Shaped = jax.ShapeDtypeStruct
Cut = tuple[str | None, ...]


def _descent(loss: Loss) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), value

    return step


def _adam(loss: Loss) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)

        def moment(decay: float, m: jax.Array, g: jax.Array) -> jax.Array:
            return decay * m + (1 - decay) * g

        first = jax.tree.map(lambda m, g: moment(0.9, m, g), state["first"], gradients)
        second = jax.tree.map(lambda m, g: moment(0.99, m, g * g), state["second"], gradients)
        params = jax.tree.map(
            lambda p, m, v: p - 1e-3 * m * lax.rsqrt(v + 1e-8), state["params"], first, second
        )
        return {"params": params, "first": first, "second": second}, value

    return step


def _kept(x: jax.Array, cut: Cut) -> jax.Array:
    return lax.with_sharding_constraint(x, PartitionSpec(*cut)) if cut else x


def _block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + jax.nn.gelu(x @ w["up"].astype(_BF16)) @ w["down"].astype(_BF16)


def _block_weights(d: int, ff: int, *stack: int) -> dict[str, Any]:
    return {"up": _Shaped((*stack, d, ff), _F32), "down": _Shaped((*stack, ff, d), _F32)}


def _mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x.astype(_F32)))


def scanned(
    rows: int, *, layers: int = 8, d: int = 2048, ff: int = 8192, remat: bool = False, cut: Cut = ()
) -> Made:
    """Residual blocks in a loop; what the backward pass needs of each is stacked."""
    block = jax.checkpoint(_block) if remat else _block

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return _mean_square(lax.scan(lambda x, w: (_kept(block(x, w), cut), None), x, params)[0])

    args = (_block_weights(d, ff, layers), _Shaped((rows, d), _BF16))
    return _descent(loss), args, (0,)


def unrolled(rows: int, *, layers: int = 2, d: int = 2048, ff: int = 8192, cut: Cut = ()) -> Made:
    """Residual blocks one after the other."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = _kept(_block(x, w), cut)
        return _mean_square(x)

    args = ([_block_weights(d, ff) for _ in range(layers)], _Shaped((rows, d), _BF16))
    return _descent(loss), args, (0,)


def wide(features: int, *, rows: int = 4096) -> Made:
    """A block and Adam, whose state fills the memory."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return _mean_square(_block(x, params))

    weights = _block_weights(4096, features)
    state = {"params": weights, "first": weights, "second": weights}
    return _adam(loss), (state, _Shaped((rows, 4096), _BF16)), (0,)


def _attention(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    qkv = jnp.einsum("bsd,dhk->bhsk", x, w["qkv"].astype(_BF16))
    q, k, v = jnp.split(qkv, 3, axis=-1)
    scores = jnp.einsum("bhsk,bhtk->bhst", q, k).astype(_F32) / q.shape[-1] ** 0.5
    values = jnp.einsum("bhst,bhtk->bhsk", jax.nn.softmax(scores).astype(_BF16), v)
    return jnp.einsum("bhsk,hkd->bsd", values, w["out"].astype(_BF16))


def encoder(
    batch: int, *, sequence: int = 2048, d: int = 1024, heads: int = 8, cut: Cut = ()
) -> Made:
    """A layer of attention whose scores are kept for the backward pass."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return _mean_square(_kept(x + _attention(x, params), cut))

    size = d // heads
    weights = {
        "qkv": _Shaped((d, heads, 3 * size), _F32),
        "out": _Shaped((heads, size, d), _F32),
    }
    return _descent(loss), (weights, _Shaped((batch, sequence, d), _BF16)), (0,)


def vocabulary(
    batch: int, *, sequence: int = 1024, d: int = 1024, words: int = 32000, cut: Cut = ()
) -> Made:
    """Embedding and logits with their cross entropy."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = _kept(params["embedding"][tokens].astype(_BF16), cut)
        logits = (x @ params["head"].astype(_BF16)).astype(_F32)
        at_label = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - at_label)

    weights = {"embedding": _Shaped((words, d), _F32), "head": _Shaped((d, words), _F32)}
    return _descent(loss), (weights, _Shaped((batch, sequence), jnp.int32)), (0,)


def mixture(
    groups: int,
    *,
    tokens: int = 1024,
    experts: int = 8,
    d: int = 1024,
    cut: Cut = (),
    expert_cut: Cut = (),
) -> Made:
    """A mixture of experts with a capacity, its dispatch by one-hot products (GShard, 2020)."""
    capacity = 2 * tokens // experts

    def loss(params: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(jnp.einsum("gsd,de->gse", x.astype(_F32), params["router"]))
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = (jnp.cumsum(chosen, 1) - 1) * chosen
        slot = jax.nn.one_hot(jnp.sum(place, -1).astype(jnp.int32), capacity)
        combine = jnp.einsum("gse,gsc->gsec", chosen * gates, slot).astype(_BF16)
        dispatch = jnp.einsum("gsec,gsd->egcd", (combine > 0).astype(_BF16), x)
        dispatch = _kept(dispatch, expert_cut)
        hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", dispatch, params["up"].astype(_BF16)))
        made = jnp.einsum("egcf,efd->egcd", hidden, params["down"].astype(_BF16))
        made = _kept(made, expert_cut)
        return _mean_square(_kept(x + jnp.einsum("gsec,egcd->gsd", combine, made), cut))

    weights = {
        "router": _Shaped((d, experts), _F32),
        "up": _Shaped((experts, d, 4 * d), _F32),
        "down": _Shaped((experts, 4 * d, d), _F32),
    }
    return _descent(loss), (weights, _Shaped((groups, tokens, d), _BF16)), (0,)


def convolutions(batch: int, *, size: int = 64, width: int = 128, cut: Cut = ()) -> Made:
    """Three 3x3 convolutions of images, the second of a half the size."""

    def convolved(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
        strides, dimensions = (stride, stride), ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel.astype(_BF16), strides, "SAME", dimension_numbers=dimensions
        )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for kernel, stride in zip(params, (1, 2, 1), strict=True):
            x = _kept(jax.nn.relu(convolved(x, kernel, stride)), cut)
        return _mean_square(x)

    weights = [
        _Shaped((3, 3, inside, outside), _F32)
        for inside, outside in ((width, width), (width, 2 * width), (2 * width, 2 * width))
    ]
    return _descent(loss), (weights, _Shaped((batch, size, size, width), _BF16)), (0,)
