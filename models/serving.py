"""Serving steps of a dense decoder: prefill of prompts, and decoding of one token a sequence.

Both read and write a cache of keys and values [layers, batch, kv_heads, context, head_dim], whose
memory the new one takes over. All sequences are at the same position, as in a batch that starts
together; the layers are those of `decoder`.

Source: Pope et al., Efficiently Scaling Transformer Inference (2022), sections 2 and 3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.models import decoder
from shardwright.models.flash_attention import flash_attention
from shardwright.models.options import DecoderOptions, ServingOptions, Transformer
from shardwright.models.quantized import Quantized, product, quantize, take_rows
from shardwright.models.training import PyTree

_CONTRACTED = {
    "embedding": (1,), "head": (0,), "wq": (0,), "wk": (0,), "wv": (0,), "wo": (0, 1),
    "w_up": (0,), "w_gate": (0,), "w_down": (0,),
}  # fmt: skip
"""Weights that are quantised, and the dimensions that their products sum over."""

State = dict[str, jax.Array]


def init_params(options: ServingOptions, key: jax.Array) -> PyTree:
    """Parameters of the decoder in the type they are served in."""
    sizes = options.model_dump(include=set(Transformer.model_fields))
    trained = DecoderOptions(**sizes, batch=options.batch, sequence=options.context)
    return served(options, decoder.init_params(trained, key))


def served(options: ServingOptions, params: PyTree) -> PyTree:
    """Trained parameters (stacked layers, as `scan_layers` has them) as they are served."""

    def convert(name: str, weight: Any, stacked: int) -> Any:
        if options.weights != "int8":
            return weight.astype(options.weights)
        if name not in _CONTRACTED:
            return weight.astype(options.compute_dtype)
        return quantize(weight, tuple(dim + stacked for dim in _CONTRACTED[name]))

    layers = {name: convert(name, weight, 1) for name, weight in params["layers"].items()}
    rest = {name: convert(name, leaf, 0) for name, leaf in params.items() if name != "layers"}
    return rest | {"layers": layers}


def init_state(options: ServingOptions) -> State:
    """An empty cache; decoding starts at its last position, where a step costs most."""
    shape = (
        options.layers, options.batch, options.key_value_heads, options.context,
        options.head_width,
    )  # fmt: skip
    cache = jnp.zeros(shape, options.cache_type)
    start = 0 if options.step == "prefill" else options.context - 1
    return {"keys": cache, "values": jnp.zeros_like(cache), "position": jnp.int32(start)}


def make_tokens(options: ServingOptions, key: jax.Array) -> jax.Array:
    """Random tokens [batch, tokens of a step]."""
    return jax.random.randint(key, (options.batch, options.step_tokens), 0, options.vocab)


def serve(
    options: ServingOptions, params: PyTree, state: State, tokens: jax.Array
) -> tuple[State, jax.Array]:
    """The cache with the keys and values of tokens, and the likeliest next ones [batch, 1]."""
    state, logits = forward(options, params, state, tokens)
    return state, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def forward(
    options: ServingOptions, params: PyTree, state: State, tokens: jax.Array
) -> tuple[State, jax.Array]:
    """The next cache, and the logits [batch, 1, vocab] of what follows the last of tokens.

    Args:
      state: "keys" and "values" [layers, batch, kv_heads, context, head_dim], and "position", how
        many of their positions are filled; the tokens' go there.
      tokens: [batch, tokens]: one a sequence in decoding, a prompt from position 0 in prefill.
    """
    positions = state["position"] + lax.iota(jnp.int32, tokens.shape[1])
    x = take_rows(params["embedding"], tokens).astype(options.compute_dtype)
    if options.positions == "learned":
        x = x + jnp.take(params["positions"], positions, axis=0).astype(x.dtype)
    x, context = decoder.place(options, x, positions)

    def layer(carry: Any, stacked: Any) -> tuple[Any, None]:
        x, keys, values = carry
        weights, index = stacked
        y = decoder.normalize(options, weights, "attention_norm", x)
        q, k, v = decoder.project_heads(weights, y, y, context.rope)
        at = (index, 0, 0, state["position"], 0)
        keys = lax.dynamic_update_slice(keys, _cached(k, keys), at)
        values = lax.dynamic_update_slice(values, _cached(v, values), at)
        if options.step == "prefill":
            attend = flash_attention if options.attention == "flash" else decoder.dot_attention
            mixed = attend(q, k, v)
        else:
            mixed = _attend_cache(q, keys[index], values[index], state["position"])
        x = x + product("bshk,hkd->bsd", mixed, weights["wo"], weights.get("bo"))
        y = decoder.normalize(options, weights, "mlp_norm", x)
        return (x + decoder.feed_forward(options, weights, y), keys, values), None

    stacked = (params["layers"], lax.iota(jnp.int32, options.layers))
    carry, _ = lax.scan(layer, (x, state["keys"], state["values"]), stacked)
    x, keys, values = carry
    x = decoder.normalize(options, params, "final_norm", x[:, -1:])
    position = state["position"] + tokens.shape[1]
    return {"keys": keys, "values": values, "position": position}, decoder.unembed(
        options, params, x
    )


def _cached(x: jax.Array, cache: jax.Array) -> jax.Array:
    """Keys or values [batch, tokens, kv_heads, head_dim] as the cache has them."""
    return jnp.swapaxes(x, 1, 2)[None].astype(cache.dtype)


def _attend_cache(
    q: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array
) -> jax.Array:
    """Attention of one query a sequence, [batch, 1, heads, head_dim], to positions up to its own.

    Args:
      keys: [batch, kv_heads, context, head_dim].
      values: like `keys`.
      position: of the queries.
    """
    batch, _, heads, width = q.shape
    kv_heads, length = keys.shape[1:3]
    q = q.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bkgd,bktd->bkgt", q, keys.astype(q.dtype)).astype(jnp.float32)
    visible = lax.broadcasted_iota(jnp.int32, (length,), 0) <= position
    scores = jnp.where(visible, scores * width**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    mixed = jnp.einsum("bkgt,bktd->bkgd", weights, values.astype(q.dtype))
    return mixed.reshape(batch, 1, heads, width)


def model_flops(options: ServingOptions) -> int:
    """Matmul FLOPs that one step needs: 2 a weight and token, 4 a pair of positions and unit.

    A token of decoding attends to the whole context. Logits are made of each last token.

    Source: Pope et al., Efficiently Scaling Transformer Inference (2022), section 2.
    """
    d, width, tokens = options.d_model, options.head_width, options.step_tokens
    attention_weights = d * width * 2 * (options.heads + options.key_value_heads)
    weights = options.layers * (attention_weights + d * options.d_ff * options.mlp_matrices)
    seen = options.context if options.step == "decode" else tokens
    attention = 4 * options.layers * options.heads * width * seen
    return options.batch * (tokens * (2 * weights + attention) + 2 * d * options.vocab)


def weight_count(params: PyTree) -> int:
    """Parameters, scales of quantised ones apart."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return sum((leaf.values if isinstance(leaf, Quantized) else leaf).size for leaf in leaves)
