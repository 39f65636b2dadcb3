"""A dense decoder-only language model, written as plain functions of a parameter tree.

Attention weights are [d_model, heads, head_dim], so that heads are a dimension of their own and
can be partitioned. The causal mask and the rotary tables are computed from iota in the step: no
constant grows with the sequence.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardwright.models.flash_attention import flash_attention
from shardwright.models.positions import Rope, apply_rope, relative_bias, rope_tables, sinusoids
from shardwright.models.quantized import product
from shardwright.models.stages import run_stages
from shardwright.models.training import Batch, PyTree, cross_entropy
from shardwright.models.transformer_options import (
    DecoderOptions,
    MeshAxes,
    Transformer,
    TransformerOptions,
)

_INIT_STDDEV = 0.02
_BUCKETS = 32
_GATES = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}
"""Activations of gated feed-forward blocks. Source: Shazeer, GLU Variants (2020), equation 6."""

InitBlock = Callable[[jax.Array], PyTree]


class Context(NamedTuple):
    """What attention has to know of positions besides the residual stream.

    Attributes:
      rope: rotary tables, where positions are rotary.
      bias: added to the scores [heads, queries, keys], where positions are relative.
    """

    rope: Rope | None = None
    bias: jax.Array | None = None


Block = Callable[[PyTree, jax.Array, Context], tuple[jax.Array, Any]]
"""From weights, residual stream and positions to the next residual stream and what else there is
to return."""


def init_params(
    options: DecoderOptions,
    key: jax.Array,
    init_block: InitBlock | None = None,
    blocks: int | None = None,
) -> PyTree:
    """Parameters: normal with deviation 0.02, projections into the residual stream smaller.

    Args:
      init_block: makes the parameters of one block from a key; a dense layer's where None.
      blocks: how many there are; as many as layers where None.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3
      (residual projections scaled by the square root of the number of residual layers).
    """
    embedding_key, positions_key, head_key, layers_key = jax.random.split(key, 4)
    block_keys = jax.random.split(layers_key, blocks or options.layers)
    init = init_block or functools.partial(init_layer, options)
    params = {
        "embedding": normal(options, embedding_key, (options.vocab, options.d_model)),
        "layers": jax.vmap(init)(block_keys)
        if options.scan_layers
        else [init(block_key) for block_key in block_keys],
        **init_norm(options, "final_norm"),
    }
    if options.positions == "learned":
        shape = (options.position_rows, options.d_model)
        params["positions"] = normal(options, positions_key, shape)
    if options.positions == "relative":
        params["relative"] = init_relative(options, positions_key)
    if not options.tied_embedding:
        params["head"] = normal(options, head_key, (options.d_model, options.vocab))
    return params


def init_layer(options: TransformerOptions, key: jax.Array) -> PyTree:
    """Parameters of one dense layer."""
    attention_key, feed_forward_key = jax.random.split(key)
    feed_forward_params = init_feed_forward(options, options.d_ff, feed_forward_key)
    norm = init_norm(options, "mlp_norm")
    return init_attention(options, attention_key) | norm | feed_forward_params


def init_attention(options: TransformerOptions, key: jax.Array) -> PyTree:
    """Parameters of attention and of the norm before it."""
    d, h, k, width = options.d_model, options.heads, options.key_value_heads, options.head_width
    shapes = {"wq": (d, h, width), "wk": (d, k, width), "wv": (d, k, width), "wo": (h, width, d)}
    bias_shapes = {"bq": (h, width), "bk": (k, width), "bv": (k, width), "bo": (d,)}
    projections = _init_projections(options, key, shapes, "wo", bias_shapes)
    return projections | init_norm(options, "attention_norm")


def init_feed_forward(options: TransformerOptions, width: int, key: jax.Array) -> PyTree:
    """Parameters of a feed-forward block of a given width inside."""
    d = options.d_model
    shapes = {"w_up": (d, width), "w_down": (width, d)}
    if options.mlp in _GATES:
        shapes["w_gate"] = (d, width)
    return _init_projections(options, key, shapes, "w_down", {"b_up": (width,), "b_down": (d,)})


def _init_projections(
    options: TransformerOptions,
    key: jax.Array,
    shapes: Mapping[str, tuple[int, ...]],
    into_residual: str,
    bias_shapes: Mapping[str, tuple[int, ...]],
) -> PyTree:
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: normal(options, leaf_key, shape)
        for leaf_key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    weights[into_residual] *= (2 * options.layers) ** -0.5
    if options.biases:
        for name, shape in bias_shapes.items():
            weights[name] = jnp.zeros(shape, options.param_dtype)
    return weights


def init_relative(options: TransformerOptions, key: jax.Array) -> jax.Array:
    """Biases [buckets, heads] of attention scores by distance."""
    return normal(options, key, (_BUCKETS, options.heads))


def normal(options: TransformerOptions, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Weights with deviation 0.02."""
    return _INIT_STDDEV * jax.random.normal(key, shape, options.param_dtype)


def init_norm(options: TransformerOptions, name: str) -> dict[str, jax.Array]:
    """Parameters of a norm of the residual stream."""
    scale = {name: jnp.ones(options.d_model, options.param_dtype)}
    if options.norm == "rms":
        return scale
    return scale | {f"{name}_bias": jnp.zeros(options.d_model, options.param_dtype)}


def apply(options: DecoderOptions, params: PyTree, tokens: jax.Array) -> jax.Array:
    """Logits [batch, sequence, vocab], in the compute type, of tokens [batch, sequence]."""
    return forward(options, params, tokens, functools.partial(layer, options))[0]


def forward(
    options: DecoderOptions, params: PyTree, tokens: jax.Array, block: Block
) -> tuple[jax.Array, Any]:
    """Logits, and what the blocks return besides the residual stream, stacked over the blocks.

    In a pipeline, a second dimension of what is stacked is the microbatches.
    """
    x, context = embed(options, params, tokens)
    if options.positions == "relative":
        bias = relative_bias(params["relative"], x.shape[1], bidirectional=not options.causal)
        context = Context(bias=bias)
    if options.stages > 1:
        x, besides = run_stages(
            options, params["layers"], x, lambda weights, x: block(weights, x, context)
        )
    else:
        x, besides = run_layers(options, params["layers"], x, block, context)
    return unembed(options, params, normalize(options, params, "final_norm", x)), besides


def embed(options: TransformerOptions, params: PyTree, tokens: jax.Array) -> tuple[Any, Context]:
    """The residual stream of tokens, and what attention has to know of their positions."""
    positions = jax.lax.iota(jnp.int32, tokens.shape[1])
    x = jnp.take(params["embedding"], tokens, axis=0).astype(options.compute_dtype)
    if options.positions == "learned":
        x = x + params["positions"][: tokens.shape[1]].astype(x.dtype)
    return place(options, x, positions)


def place(options: Transformer, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, Context]:
    """Embedded tokens with what is computed of their positions, and what attention has to know."""
    if options.positions == "sinusoidal":
        x = x + sinusoids(positions, options.d_model).astype(x.dtype)
    rope = None
    if options.positions == "rope":
        rope = rope_tables(positions, options.head_width, options.rope_theta)
    return constrain(x, options.residual_axes), Context(rope)


def unembed(options: Transformer, params: PyTree, x: jax.Array) -> jax.Array:
    """Logits [batch, sequence, vocab] of a normalised residual stream."""
    if options.tied_embedding:
        return product("bsd,vd->bsv", x, params["embedding"])
    return product("bsd,dv->bsv", x, params["head"])


def run_layers(
    options: TransformerOptions, layers: PyTree, x: jax.Array, block: Any, *context: Any
) -> tuple[jax.Array, Any]:
    """The residual stream after all layers, and what they return besides, stacked.

    Args:
      layers: one stacked parameter tree where `options.scan_layers`, else a list.
      block: from weights, residual stream and context to the next residual stream and the rest.
      context: what every layer is given besides; differentiated, where it holds arrays.
    """
    rematerialized = _rematerialized(block, options)

    def next_residual(x: jax.Array, weights: PyTree) -> tuple[jax.Array, Any]:
        x, besides = rematerialized(weights, x, *context)
        return constrain(x, options.residual_axes), besides

    if options.scan_layers:
        return jax.lax.scan(next_residual, x, layers)
    each = []
    for weights in layers:
        x, one = next_residual(x, weights)
        each.append(one)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def _rematerialized(block: Any, options: TransformerOptions) -> Any:
    if options.remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy = {
        "full": policies.nothing_saveable,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "names": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=options.saved,
            names_which_can_be_offloaded=options.offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[options.remat]
    # A scan body is a loop of its own, in which XLA cannot undo the recomputation.
    return jax.checkpoint(block, policy=policy, prevent_cse=not options.scan_layers)


def constrain(x: jax.Array, axes: Sequence[MeshAxes] | None) -> jax.Array:
    """An array that is sharded over mesh axes, one entry a dimension; as it is where None."""
    if axes is None:
        return x
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
    return constrained


def layer(
    options: DecoderOptions, weights: PyTree, x: jax.Array, context: Context
) -> tuple[jax.Array, None]:
    """One dense layer; it returns nothing besides the residual stream."""
    x = checkpoint_name(x, "decoder_layer_input")
    x = x + attention(options, weights, x, context)
    y = normalize(options, weights, "mlp_norm", x)
    return x + feed_forward(options, weights, y), None


def attention(
    options: DecoderOptions, weights: PyTree, x: jax.Array, context: Context
) -> jax.Array:
    """What attention adds to the residual stream x [batch, sequence, d_model]."""
    y = normalize(options, weights, "attention_norm", x)
    return attend(options, weights, y, y, context, causal=options.causal)


def attend(
    options: TransformerOptions,
    weights: PyTree,
    y: jax.Array,
    source: jax.Array,
    context: Context,
    *,
    causal: bool,
) -> jax.Array:
    """What positions of y [batch, queries, d_model] take from source [batch, keys, d_model]."""
    q, k, v = project_heads(weights, y, source, context.rope)
    if options.attention == "flash":
        mixed = flash_attention(q, k, v, causal=causal)
    else:
        mixed = dot_attention(q, k, v, causal=causal, bias=context.bias)
        mixed = checkpoint_name(mixed, "context")
    added: jax.Array = checkpoint_name(
        product("bshk,hkd->bsd", mixed, weights["wo"], weights.get("bo")), "out_proj"
    )
    return added


def project_heads(
    weights: PyTree, y: jax.Array, source: jax.Array, rope: Rope | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries of y and keys and values of source, [batch, positions, heads, head_dim]."""
    q = product("bsd,dhk->bshk", y, weights["wq"], weights.get("bq"))
    k = product("bsd,dhk->bshk", source, weights["wk"], weights.get("bk"))
    v = product("bsd,dhk->bshk", source, weights["wv"], weights.get("bv"))
    if rope is not None:
        q, k = apply_rope(q, rope), apply_rope(k, rope)
    q, k = checkpoint_name(q, "query_proj"), checkpoint_name(k, "key_proj")
    return q, k, checkpoint_name(v, "value_proj")


def feed_forward(options: Transformer, weights: PyTree, y: jax.Array) -> jax.Array:
    """A feed-forward block of y [batch, sequence, d_model], which is normalised."""
    up = product("bsd,df->bsf", y, weights["w_up"], weights.get("b_up"))
    if options.mlp in _GATES:
        gate = checkpoint_name(product("bsd,df->bsf", y, weights["w_gate"]), "mlpwi_0")
        hidden = _GATES[options.mlp](gate) * checkpoint_name(up, "mlpwi_1")
    else:
        up = checkpoint_name(up, "mlpwi_0")
        hidden = jax.nn.relu(up) if options.mlp == "relu" else jax.nn.gelu(up)
    down = product("bsf,fd->bsd", hidden, weights["w_down"], weights.get("b_down"))
    added: jax.Array = checkpoint_name(down, "mlpwo")
    return added


def normalize(options: Transformer, weights: PyTree, name: str, x: jax.Array) -> jax.Array:
    """RMSNorm or LayerNorm over the last dimension, in float32.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019), equation 4; Ba et al.,
      Layer Normalization (2016), equation 4.
    """
    y = x.astype(jnp.float32)
    if options.norm == "layer":
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(mean_square + options.norm_epsilon)
    y = y * weights[name].astype(jnp.float32)
    if options.norm == "layer":
        y = y + weights[f"{name}_bias"].astype(jnp.float32)
    normed: jax.Array = y.astype(x.dtype)
    return normed


def dot_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention, to positions up to one's own or to all; query heads share key heads.

    Query head i reads key head i // (heads / kv_heads). The softmax is taken in float32.

    Args:
      q: [batch, queries, heads, head_dim].
      k: [batch, keys, kv_heads, head_dim].
      v: like `k`.
      causal: whether a position attends only to those up to it; queries and keys are then as many.
      bias: added to the scores, [heads, queries, keys].

    Returns:
      Like `q`.

    Source: Ainslie et al., GQA (2023), section 2.2.
    """
    batch, length, heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bqkgd,btkd->bkgqt", q, k).astype(jnp.float32) * width**-0.5
    if bias is not None:
        scores = scores + bias.reshape(kv_heads, heads // kv_heads, length, keys)
    if causal:
        query_position = jax.lax.broadcasted_iota(jnp.int32, (length, keys), 0)
        key_position = jax.lax.broadcasted_iota(jnp.int32, (length, keys), 1)
        visible = query_position >= key_position
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bkgqt,btkd->bqkgd", weights, v)
    return mixed.reshape(batch, length, heads, width)


def loss(options: DecoderOptions, params: PyTree, batch: Batch) -> jax.Array:
    """Mean cross-entropy of batch["tokens"] with batch["labels"], both [batch, sequence]."""
    return cross_entropy(apply(options, params, batch["tokens"]), batch["labels"])


def make_batch(options: DecoderOptions, key: jax.Array) -> Batch:
    """Random tokens, and as labels the tokens that follow them."""
    shape = (options.batch, options.sequence + 1)
    tokens = jax.random.randint(key, shape, 0, options.vocab)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def model_flops(options: DecoderOptions) -> int:
    """Matmul FLOPs that one step needs, recomputation not counted: what MFU is a fraction of.

    6 FLOPs a token for each weight that takes part in a matrix product (the embedding table only
    where it is also the output projection), and 12 x layers x heads x head_dim x sequence a token
    for the attention scores and their product with the values. The masked half of attention counts,
    as it does in the programs that are run and in most published MFU.

    Source: Chowdhery et al., PaLM (2022), appendix B.
    """
    d, width = options.d_model, options.head_width
    attention_weights = d * width * 2 * (options.heads + options.key_value_heads)
    mlp_weights = d * options.d_ff * options.mlp_matrices
    weights = options.layers * (attention_weights + mlp_weights) + d * options.vocab
    attention = 12 * options.layers * options.heads * width * options.sequence
    return options.batch * options.sequence * (6 * weights + attention)
