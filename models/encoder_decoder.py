"""An encoder-decoder Transformer: T5 and translation models.

The encoder reads the source without a mask; each layer of the decoder attends to the target so
far, then to what the encoder made of the source. Source and target share one embedding table.
Layers are those of `decoder`: they normalise before each block, and scores are scaled.

Source: Vaswani et al., Attention Is All You Need (2017), figure 1; Raffel et al., Exploring the
  Limits of Transfer Learning with a Unified Text-to-Text Transformer (2020), section 2.1.
"""

import functools

import jax

from shardwright.models import decoder, translation
from shardwright.models.decoder import Context
from shardwright.models.positions import relative_bias
from shardwright.models.training import Batch, PyTree, cross_entropy
from shardwright.models.transformer_options import EncoderDecoderOptions


def init_params(options: EncoderDecoderOptions, key: jax.Array) -> PyTree:
    """Parameters: as the decoder's, with "cross" attention in the layers of "decoder"."""
    shared_key, head_key, encoder_key, decoder_key = jax.random.split(key, 4)
    embedding_key, positions_key = jax.random.split(shared_key)
    params = {
        "embedding": decoder.normal(options, embedding_key, (options.vocab, options.d_model)),
        "encoder": _init_stack(options, encoder_key, options.encoder_depth, crosses=False),
        "decoder": _init_stack(options, decoder_key, options.layers, crosses=True),
    }
    if options.positions == "learned":
        shape = (options.position_rows, options.d_model)
        params["positions"] = decoder.normal(options, positions_key, shape)
    if not options.tied_embedding:
        params["head"] = decoder.normal(options, head_key, (options.d_model, options.vocab))
    return params


def _init_stack(
    options: EncoderDecoderOptions, key: jax.Array, layers: int, *, crosses: bool
) -> PyTree:
    relative_key, layers_key = jax.random.split(key)
    init_one = functools.partial(_init_layer, options, crosses=crosses)
    layer_keys = jax.random.split(layers_key, layers)
    stack = {
        "layers": jax.vmap(init_one)(layer_keys)
        if options.scan_layers
        else [init_one(layer_key) for layer_key in layer_keys],
        **decoder.init_norm(options, "final_norm"),
    }
    if options.positions == "relative":
        stack["relative"] = decoder.init_relative(options, relative_key)
    return stack


def _init_layer(options: EncoderDecoderOptions, key: jax.Array, *, crosses: bool) -> PyTree:
    layer_key, cross_key = jax.random.split(key)
    layer = decoder.init_layer(options, layer_key)
    return layer | {"cross": decoder.init_attention(options, cross_key)} if crosses else layer


def apply(
    options: EncoderDecoderOptions, params: PyTree, source: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Logits [batch, target_sequence, vocab] of what follows each token.

    Args:
      source: tokens [batch, sequence].
      tokens: of the target [batch, target_sequence].
    """
    encoded = encode(options, params, source)
    x, context = _embed(options, params, "decoder", tokens, bidirectional=False)
    layers = params["decoder"]["layers"]
    block = functools.partial(_decoder_layer, options)
    x, _ = decoder.run_layers(options, layers, x, block, encoded, context)
    return decoder.unembed(
        options, params, decoder.normalize(options, params["decoder"], "final_norm", x)
    )


def encode(options: EncoderDecoderOptions, params: PyTree, source: jax.Array) -> jax.Array:
    """What the encoder makes of the source, [batch, sequence, d_model], normalised."""
    x, context = _embed(options, params, "encoder", source, bidirectional=True)
    block = functools.partial(_encoder_layer, options)
    x, _ = decoder.run_layers(options, params["encoder"]["layers"], x, block, context)
    return decoder.normalize(options, params["encoder"], "final_norm", x)


def _embed(
    options: EncoderDecoderOptions,
    params: PyTree,
    stack: str,
    tokens: jax.Array,
    *,
    bidirectional: bool,
) -> tuple[jax.Array, Context]:
    x, context = decoder.embed(options, params, tokens)
    if options.positions == "relative":
        table, length = params[stack]["relative"], tokens.shape[1]
        bias = relative_bias(table, length, bidirectional=bidirectional)
        context = context._replace(bias=bias)
    return x, context


def _encoder_layer(
    options: EncoderDecoderOptions, weights: PyTree, x: jax.Array, context: Context
) -> tuple[jax.Array, None]:
    x = x + _attention(options, weights, x, context, causal=False)
    y = decoder.normalize(options, weights, "mlp_norm", x)
    return x + decoder.feed_forward(options, weights, y), None


def _decoder_layer(
    options: EncoderDecoderOptions,
    weights: PyTree,
    x: jax.Array,
    encoded: jax.Array,
    context: Context,
) -> tuple[jax.Array, None]:
    x = x + _attention(options, weights, x, context, causal=True)
    # Between source and target there is no distance.
    x = x + _attention(options, weights["cross"], x, Context(), causal=False, source=encoded)
    y = decoder.normalize(options, weights, "mlp_norm", x)
    return x + decoder.feed_forward(options, weights, y), None


def _attention(
    options: EncoderDecoderOptions,
    weights: PyTree,
    x: jax.Array,
    context: Context,
    *,
    causal: bool,
    source: jax.Array | None = None,
) -> jax.Array:
    """What attention to `source`, or to x itself, adds to the residual stream."""
    y = decoder.normalize(options, weights, "attention_norm", x)
    return decoder.attend(
        options, weights, y, y if source is None else source, context, causal=causal
    )


def loss(options: EncoderDecoderOptions, params: PyTree, batch: Batch) -> jax.Array:
    """Mean cross-entropy of batch["labels"], [batch, target_sequence], given the source."""
    logits = apply(options, params, batch["source"], batch["tokens"])
    return cross_entropy(logits, batch["labels"])


make_batch = translation.make_batch


def model_flops(options: EncoderDecoderOptions) -> int:
    """Matmul FLOPs that one step needs, as `decoder.model_flops` counts them.

    Keys and values of cross attention are made once a token of the source, its queries and
    outputs once a token of the target.
    """
    d, width = options.d_model, options.head_width
    queries, keys = 2 * d * width * options.heads, 2 * d * width * options.key_value_heads
    mlp = d * options.d_ff * options.mlp_matrices
    source, target = options.sequence, options.target_length
    encoder = options.encoder_depth * (source * (queries + keys + mlp))
    decode = options.layers * (target * (2 * queries + keys + mlp) + source * keys)
    weights = encoder + decode + target * d * options.vocab
    pairs = options.encoder_depth * source**2 + options.layers * (target**2 + source * target)
    return options.batch * (6 * weights + 12 * options.heads * width * pairs)
