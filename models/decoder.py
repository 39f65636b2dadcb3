"""A dense decoder-only language model, written as plain functions of a parameter tree.

Attention weights are [d_model, heads, head_dim], so that heads are a dimension of their own and
can be partitioned. The causal mask and the rotary tables are computed from iota in the step: no
constant grows with the sequence.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.models.flash_attention import flash_attention
from shardwright.models.options import DecoderOptions
from shardwright.models.training import Batch, PyTree, cross_entropy

_INIT_STDDEV = 0.02

Rope = tuple[jax.Array, jax.Array]
InitBlock = Callable[[jax.Array], PyTree]
Block = Callable[[PyTree, jax.Array, Rope | None], tuple[jax.Array, Any]]
"""From weights, residual stream and rotary tables to the next residual stream and what else there
is to return."""


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
        **_init_norm(options, "final_norm"),
    }
    if options.positions == "learned":
        shape = (options.position_rows, options.d_model)
        params["positions"] = normal(options, positions_key, shape)
    if not options.tied_embedding:
        params["head"] = normal(options, head_key, (options.d_model, options.vocab))
    return params


def init_layer(options: DecoderOptions, key: jax.Array) -> PyTree:
    """Parameters of one dense layer."""
    attention_key, feed_forward_key = jax.random.split(key)
    feed_forward_params = init_feed_forward(options, options.d_ff, feed_forward_key)
    return init_attention(options, attention_key) | feed_forward_params


def init_attention(options: DecoderOptions, key: jax.Array) -> PyTree:
    """Parameters of a layer's attention, and of both its norms."""
    d, h, k, width = options.d_model, options.heads, options.key_value_heads, options.head_width
    shapes = {"wq": (d, h, width), "wk": (d, k, width), "wv": (d, k, width), "wo": (h, width, d)}
    bias_shapes = {"bq": (h, width), "bk": (k, width), "bv": (k, width), "bo": (d,)}
    projections = _init_projections(options, key, shapes, "wo", bias_shapes)
    norms = _init_norm(options, "attention_norm") | _init_norm(options, "mlp_norm")
    return projections | norms


def init_feed_forward(options: DecoderOptions, width: int, key: jax.Array) -> PyTree:
    """Parameters of a feed-forward block of a given width inside."""
    d = options.d_model
    shapes = {"w_up": (d, width), "w_down": (width, d)}
    if options.mlp == "swiglu":
        shapes["w_gate"] = (d, width)
    return _init_projections(options, key, shapes, "w_down", {"b_up": (width,), "b_down": (d,)})


def _init_projections(
    options: DecoderOptions,
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


def normal(options: DecoderOptions, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Weights with deviation 0.02."""
    return _INIT_STDDEV * jax.random.normal(key, shape, options.param_dtype)


def _init_norm(options: DecoderOptions, name: str) -> dict[str, jax.Array]:
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
    """Logits, and what the blocks return besides the residual stream, stacked over the blocks."""
    dtype = options.compute_dtype
    length = tokens.shape[1]
    x = jnp.take(params["embedding"], tokens, axis=0).astype(dtype)
    if options.positions == "learned":
        x = x + params["positions"][:length].astype(dtype)
        rope = None
    else:
        rope = rope_tables(length, options.head_width, options.rope_theta)
    x = _constrain_residual(options, x)
    rematerialized = _rematerialized(block, options)

    def next_residual(x: jax.Array, weights: PyTree) -> tuple[jax.Array, Any]:
        x, besides = rematerialized(weights, x, rope)
        return _constrain_residual(options, x), besides

    if options.scan_layers:
        x, besides = jax.lax.scan(next_residual, x, params["layers"])
    else:
        each = []
        for weights in params["layers"]:
            x, one = next_residual(x, weights)
            each.append(one)
        besides = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    x = normalize(options, params, "final_norm", x)
    if options.tied_embedding:
        return jnp.einsum("bsd,vd->bsv", x, params["embedding"].astype(dtype)), besides
    return jnp.einsum("bsd,dv->bsv", x, params["head"].astype(dtype)), besides


def _rematerialized(block: Block, options: DecoderOptions) -> Block:
    if options.remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy = {
        "full": policies.nothing_saveable,
        "dots": policies.dots_with_no_batch_dims_saveable,
    }[options.remat]
    # A scan body is a loop of its own, in which XLA cannot undo the recomputation.
    return jax.checkpoint(block, policy=policy, prevent_cse=not options.scan_layers)


def _constrain_residual(options: DecoderOptions, x: jax.Array) -> jax.Array:
    if options.residual_axes is None:
        return x
    constrained: jax.Array = jax.lax.with_sharding_constraint(
        x, PartitionSpec(*options.residual_axes)
    )
    return constrained


def layer(
    options: DecoderOptions, weights: PyTree, x: jax.Array, rope: Rope | None
) -> tuple[jax.Array, None]:
    """One dense layer; it returns nothing besides the residual stream."""
    x = x + attention(options, weights, x, rope)
    y = normalize(options, weights, "mlp_norm", x)
    return x + feed_forward(options, weights, y), None


def attention(
    options: DecoderOptions, weights: PyTree, x: jax.Array, rope: Rope | None
) -> jax.Array:
    """What attention adds to the residual stream x [batch, sequence, d_model]."""
    w = _cast(weights, x.dtype, "wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo")
    y = normalize(options, weights, "attention_norm", x)
    q = _project("bsd,dhk->bshk", y, w["wq"], w.get("bq"))
    k = _project("bsd,dhk->bshk", y, w["wk"], w.get("bk"))
    v = _project("bsd,dhk->bshk", y, w["wv"], w.get("bv"))
    if rope is not None:
        q, k = apply_rope(q, rope), apply_rope(k, rope)
    attend = flash_attention if options.attention == "flash" else dot_attention
    mixed = attend(q, k, v, causal=options.causal)
    return _project("bshk,hkd->bsd", mixed, w["wo"], w.get("bo"))


def feed_forward(options: DecoderOptions, weights: PyTree, y: jax.Array) -> jax.Array:
    """A feed-forward block of y [batch, sequence, d_model], which is normalised."""
    w = _cast(weights, y.dtype, "w_up", "w_gate", "w_down", "b_up", "b_down")
    up = _project("bsd,df->bsf", y, w["w_up"], w.get("b_up"))
    if options.mlp == "swiglu":
        hidden = jax.nn.silu(jnp.einsum("bsd,df->bsf", y, w["w_gate"])) * up
    else:
        hidden = jax.nn.gelu(up)
    return _project("bsf,fd->bsd", hidden, w["w_down"], w.get("b_down"))


def _cast(weights: PyTree, dtype: Any, *names: str) -> dict[str, jax.Array]:
    return {name: weights[name].astype(dtype) for name in names if name in weights}


def _project(equation: str, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    y = jnp.einsum(equation, x, weight)
    return y if bias is None else y + bias


def normalize(options: DecoderOptions, weights: PyTree, name: str, x: jax.Array) -> jax.Array:
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


def dot_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True) -> jax.Array:
    """Softmax attention, to positions up to one's own or to all; query heads share key heads.

    Query head i reads key head i // (heads / kv_heads). The softmax is taken in float32.

    Args:
      q: [batch, sequence, heads, head_dim].
      k: [batch, sequence, kv_heads, head_dim].
      v: like `k`.
      causal: whether a position attends only to those up to it.

    Returns:
      Like `q`.

    Source: Ainslie et al., GQA (2023), section 2.2.
    """
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bqkgd,btkd->bkgqt", q, k).astype(jnp.float32) * width**-0.5
    if causal:
        query_position = jax.lax.broadcasted_iota(jnp.int32, (length, length), 0)
        key_position = jax.lax.broadcasted_iota(jnp.int32, (length, length), 1)
        visible = query_position >= key_position
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bkgqt,btkd->bqkgd", weights, v)
    return mixed.reshape(batch, length, heads, width)


def rope_tables(length: int, head_dim: int, theta: float) -> Rope:
    """Cosines and sines [length, head_dim / 2] of position times frequency.

    Pair i turns by theta^(-2i / head_dim) a position.

    Source: Su et al., RoFormer (2021), section 3.2.2.
    """
    pair = jax.lax.iota(jnp.float32, head_dim // 2)
    frequency = theta ** (-2 * pair / head_dim)
    angle = jax.lax.iota(jnp.float32, length)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates the pairs (i, i + head_dim / 2) of x [batch, sequence, heads, head_dim]."""
    cos, sin = (table[:, None, :] for table in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


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
    mlp_weights = d * options.d_ff * (3 if options.mlp == "swiglu" else 2)
    weights = options.layers * (attention_weights + mlp_weights) + d * options.vocab
    attention = 12 * options.layers * options.heads * width * options.sequence
    return options.batch * options.sequence * (6 * weights + attention)
