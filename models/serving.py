"""Serving steps of a dense decoder: prefill of prompts, and decoding of one token a sequence.

Both read and write a cache of keys and values [batch, kv_heads, context, head_dim] of each layer,
whose memory the new one takes over; in eight bits where asked, with a scale for each position. All
sequences are at the same position, as in a batch that starts together. The layers are those of
`decoder`, one after the other without a loop: of a stack of caches the TPU compiler (libtpu 0.0.42)
makes copies in another layout, and takes each layer's out of it, where the cache of one layer is
updated and read in place.

Source: Pope et al., Efficiently Scaling Transformer Inference (2022), sections 2 and 3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.models import decoder
from shardwright.models.flash_attention import flash_attention
from shardwright.models.quantized import Quantized, Weight, product, quantize, take_rows
from shardwright.models.training import PyTree
from shardwright.models.transformer_options import DecoderOptions, ServingOptions, Transformer

_CONTRACTED = {
    "embedding": (1,), "head": (0,), "wq": (0,), "wk": (0,), "wv": (0,), "wo": (0, 1),
    "w_up": (0,), "w_gate": (0,), "w_down": (0,),
}  # fmt: skip
"""Weights that are quantised, and the dimensions that their products sum over."""

State = dict[str, Any]


def init_params(options: ServingOptions, key: jax.Array) -> PyTree:
    """Parameters of the decoder in the type they are served in."""
    sizes = options.model_dump(include=set(Transformer.model_fields))
    trained = DecoderOptions(
        **sizes, batch=options.batch, sequence=options.context, scan_layers=False
    )
    return served(options, decoder.init_params(trained, key))


def served(options: ServingOptions, params: PyTree) -> PyTree:
    """Trained parameters, a list of layers, in the types that they are served in."""

    def convert(weights: PyTree) -> PyTree:
        if isinstance(weights, list):
            return [convert(layer) for layer in weights]
        return {name: convert_one(name, weight) for name, weight in weights.items()}

    def convert_one(name: str, weight: Any) -> Any:
        if isinstance(weight, list):
            return convert(weight)
        if options.weights != "int8":
            return weight.astype(options.weights)
        if name not in _CONTRACTED:
            return weight.astype(options.compute_dtype)
        return quantize(weight, _CONTRACTED[name])

    return convert(params)


def init_state(options: ServingOptions) -> State:
    """Empty caches; decoding starts at their last position, where a step costs most."""
    shape = (options.batch, options.key_value_heads, options.context, options.head_width)

    def cache() -> Weight:
        values = jnp.zeros(shape, options.cache_type)
        return Quantized(values, jnp.zeros(shape[:-1])) if options.cache_type == "int8" else values

    def caches() -> list[Weight]:
        return [cache() for _ in range(options.layers)]

    start = 0 if options.step == "prefill" else options.context - 1
    return {"keys": caches(), "values": caches(), "position": jnp.int32(start)}


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
      state: "keys" and "values" of each layer [batch, kv_heads, context, head_dim], and "position",
        how many of their positions are filled; the tokens' go there.
      tokens: [batch, tokens]: one a sequence in decoding, a prompt from position 0 in prefill.
    """
    positions = state["position"] + lax.iota(jnp.int32, tokens.shape[1])
    x = take_rows(params["embedding"], tokens).astype(options.compute_dtype)
    if options.positions == "learned":
        x = x + jnp.take(params["positions"], positions, axis=0).astype(x.dtype)
    x, context = decoder.place(options, x, positions)

    keys, values = [], []
    caches = zip(params["layers"], state["keys"], state["values"], strict=True)
    for weights, old_keys, old_values in caches:
        y = decoder.normalize(options, weights, "attention_norm", x)
        q, k, v = decoder.project_heads(weights, y, y, context.rope)
        keys.append(_write(old_keys, k, state["position"]))
        values.append(_write(old_values, v, state["position"]))
        if options.step == "prefill":
            attend = flash_attention if options.attention == "flash" else decoder.dot_attention
            mixed = attend(q, k, v)
        else:
            mixed = _attend_cache(q, keys[-1], values[-1], state["position"])
        x = x + product("bshk,hkd->bsd", mixed, weights["wo"], weights.get("bo"))
        y = decoder.normalize(options, weights, "mlp_norm", x)
        x = x + decoder.feed_forward(options, weights, y)
    x = decoder.normalize(options, params, "final_norm", x[:, -1:])
    position = state["position"] + tokens.shape[1]
    new = {"keys": keys, "values": values, "position": position}
    return new, decoder.unembed(options, params, x)


def _write(cache: Weight, x: jax.Array, position: jax.Array) -> Weight:
    """The cache with keys or values [batch, tokens, kv_heads, head_dim] from a position on."""
    new = jnp.swapaxes(x, 1, 2)
    if isinstance(cache, Quantized):
        made = quantize(new, (3,))
        return Quantized(
            lax.dynamic_update_slice(cache.values, made.values, (0, 0, position, 0)),
            lax.dynamic_update_slice(cache.scale, made.scale, (0, 0, position)),
        )
    return lax.dynamic_update_slice(cache, new.astype(cache.dtype), (0, 0, position, 0))


def _attend_cache(q: jax.Array, keys: Weight, values: Weight, position: jax.Array) -> jax.Array:
    """Attention of one query a sequence, [batch, 1, heads, head_dim], to positions up to its own.

    Args:
      keys: [batch, kv_heads, context, head_dim]; of quantised ones the scores are scaled.
      values: like `keys`; of quantised ones the weights that add them up are scaled.
      position: of the queries.
    """
    batch, _, heads, width = q.shape
    kept, scale = _unscaled(keys)
    kv_heads, length = kept.shape[1:3]
    q = q.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bkgd,bktd->bkgt", q, kept.astype(q.dtype)).astype(jnp.float32) * scale
    visible = lax.broadcasted_iota(jnp.int32, (length,), 0) <= position
    scores = jnp.where(visible, scores * width**-0.5, -jnp.inf)
    kept, scale = _unscaled(values)
    weights = (jax.nn.softmax(scores, axis=-1) * scale).astype(q.dtype)
    mixed = jnp.einsum("bkgt,bktd->bkgd", weights, kept.astype(q.dtype))
    return mixed.reshape(batch, 1, heads, width)


def _unscaled(cache: Weight) -> tuple[jax.Array, jax.Array | float]:
    """A cache as it is kept, and its scales [batch, kv_heads, 1, context]; 1 where it has none."""
    return (cache.values, cache.scale[:, :, None]) if isinstance(cache, Quantized) else (cache, 1.0)


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
