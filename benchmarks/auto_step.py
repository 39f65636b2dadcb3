"""A train step in plain JAX: two transformer layers with Adam, for planners to shard."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LAYERS, VOCAB, WIDTH, HEADS, HIDDEN, BATCH, SEQUENCE = 2, 8192, 1024, 8, 4096, 32, 512


def example_args() -> tuple[Any, Any]:
    """Shapes of the state and the batch."""

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    head = WIDTH // HEADS
    layer = {
        "qkv": weight(WIDTH, 3, HEADS, head),
        "out": weight(HEADS, head, WIDTH),
        "up": weight(WIDTH, HIDDEN),
        "down": weight(HIDDEN, WIDTH),
    }
    params = {"embedding": weight(VOCAB, WIDTH), "layers": [layer] * LAYERS}
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    return {"params": params, "m": params, "v": params}, {"tokens": tokens, "labels": tokens}


def _loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    x = params["embedding"][batch["tokens"]].astype(jnp.bfloat16)
    for layer in params["layers"]:
        w = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layer)
        q, k, v = jnp.einsum("bsd,dchk->cbshk", x, w["qkv"])
        scores = jnp.einsum("bshk,bthk->bhst", q, k) * q.shape[-1] ** -0.5
        mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bshk,hkd->bsd", mixed, w["out"])
        x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
    logits = (x @ params["embedding"].T.astype(x.dtype)).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)
    return -picked.mean()


def train_step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    """One step of Adam (Kingma and Ba, 2015) without its bias corrections."""
    loss, grads = jax.value_and_grad(_loss)(state["params"], batch)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], grads)
    params = jax.tree.map(
        lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), state["params"], m, v
    )
    return {"params": params, "m": m, "v": v}, loss
