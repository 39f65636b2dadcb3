"""LSTM sequence-to-sequence with attention: translation as GNMT does it.

Each layer is a loop over time; what does not depend on the loop, the products with the layer's
input, is computed before it. The first layer of the encoder reads both ways. The first layer of
the decoder attends to the encoder at every step, and all layers read what it found.

Source: Wu et al., Google's Neural Machine Translation System (2016), sections 3.1 to 3.3; the
  attention is that of Bahdanau et al., Neural Machine Translation by Jointly Learning to Align and
  Translate (2014), appendix A.1.2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.models import translation
from shardwright.models.options import LstmOptions
from shardwright.models.training import Batch, PyTree, cross_entropy

_RANGE = 0.04
_GATES = 4
_FIRST_RESIDUAL = 2
"""Layers from this one on add their input to their output (section 3.1, "from the third")."""

Carry = tuple[jax.Array, ...]


def init_params(options: LstmOptions, key: jax.Array) -> PyTree:
    """Parameters, uniform within 0.04.

    Source: Wu et al. (2016), section 8.3.
    """
    embed_key, head_key, attention_key, encoder_key, decoder_key = jax.random.split(key, 5)
    d, v = options.d_model, options.vocab
    encoder_keys = jax.random.split(encoder_key, options.encoder_depth + 1)
    decoder_keys = jax.random.split(decoder_key, options.layers)
    forward, backward, *rest = (
        _init_cell(options, cell_key, 2 * d if index == 2 else d)
        for index, cell_key in enumerate(encoder_keys)
    )
    query_key, memory_key, score_key = jax.random.split(attention_key, 3)
    return {
        "embedding": _uniform(options, embed_key, (v, d)),
        "encoder": {"forward": forward, "backward": backward, "layers": rest},
        "attention": {
            "w_query": _uniform(options, query_key, (d, d)),
            "w_memory": _uniform(options, memory_key, (d, d)),
            "score": _uniform(options, score_key, (d,)),
        },
        "decoder": [_init_cell(options, cell_key, 2 * d) for cell_key in decoder_keys],
        "head": {"w": _uniform(options, head_key, (d, v)), "b": jnp.zeros(v, options.param_dtype)},
    }


def _uniform(options: LstmOptions, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, options.param_dtype, -_RANGE, _RANGE)


def _init_cell(options: LstmOptions, key: jax.Array, features: int) -> PyTree:
    """Gates are a dimension of their own, so that units can be partitioned."""
    input_key, hidden_key = jax.random.split(key)
    d = options.d_model
    return {
        "w_input": _uniform(options, input_key, (features, _GATES, d)),
        "w_hidden": _uniform(options, hidden_key, (d, _GATES, d)),
        "bias": jnp.zeros((_GATES, d), options.param_dtype),
    }


def apply(options: LstmOptions, params: PyTree, source: jax.Array, tokens: jax.Array) -> jax.Array:
    """Logits [batch, target_sequence, vocab] of what follows each token.

    Args:
      source: tokens [batch, sequence].
      tokens: of the target [batch, target_sequence].
    """
    dtype = options.compute_dtype
    params = jax.tree.map(lambda w: w.astype(dtype), params)
    memory = _encode(options, params, source)
    x = jnp.take(params["embedding"], tokens, axis=0)
    first, *rest = params["decoder"]
    x, context = _attentive_layer(options, first, params["attention"], x, memory)
    for index, cell in enumerate(rest, 1):
        y = _layer(options, cell, jnp.concatenate([x, context], axis=-1))
        x = x + y if index >= _FIRST_RESIDUAL else y
    return jnp.add(jnp.einsum("btd,dv->btv", x, params["head"]["w"]), params["head"]["b"])


def _encode(options: LstmOptions, params: PyTree, source: jax.Array) -> jax.Array:
    """What the encoder makes of the source: [batch, sequence, d_model]."""
    x = jnp.take(params["embedding"], source, axis=0)
    encoder = params["encoder"]
    backward = jnp.flip(_layer(options, encoder["backward"], jnp.flip(x, 1)), 1)
    x = jnp.concatenate([_layer(options, encoder["forward"], x), backward], axis=-1)
    for index, cell in enumerate(encoder["layers"], 1):
        y = _layer(options, cell, x)
        x = x + y if index >= _FIRST_RESIDUAL else y
    return x


def _layer(options: LstmOptions, cell: PyTree, x: jax.Array) -> jax.Array:
    """Outputs [batch, time, d_model] of one layer for x [batch, time, features]."""

    def step(carry: Carry, gates: jax.Array) -> tuple[Carry, jax.Array]:
        hidden, memory = lstm_cell(gates + _recurrent(cell, carry[0]), carry[1])
        return (hidden, memory), hidden

    zeros = jnp.zeros((x.shape[0], options.d_model), x.dtype)
    inputs = jnp.einsum("btf,fgd->tbgd", x, cell["w_input"]) + cell["bias"]
    _, outputs = lax.scan(_rematerialized(options, step), (zeros, zeros), inputs)
    return jnp.swapaxes(outputs, 0, 1)


def _recurrent(cell: PyTree, hidden: jax.Array) -> jax.Array:
    return jnp.einsum("bh,hgd->bgd", hidden, cell["w_hidden"])


def lstm_cell(gates: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next hidden state and memory, [batch, units], from gates [batch, 4, units].

    The gates are input, forget, candidate and output, in this order.

    Source: Wu et al. (2016), equation 4; Hochreiter and Schmidhuber, Long Short-Term Memory (1997).
    """
    take, keep, candidate, show = (gates[:, index] for index in range(_GATES))
    memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(take) * jnp.tanh(candidate)
    return jax.nn.sigmoid(show) * jnp.tanh(memory), memory


def _attentive_layer(
    options: LstmOptions, cell: PyTree, attention: PyTree, x: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Outputs of the decoder's first layer and what it attends to, [batch, time, d_model] each.

    A step reads what the step before it attended to.
    """
    d = options.d_model
    from_token, from_context = cell["w_input"][:d], cell["w_input"][d:]
    keys = jnp.einsum("bsd,de->bse", memory, attention["w_memory"])

    def step(carry: Carry, gates: jax.Array) -> tuple[Carry, Carry]:
        hidden, state, context = carry
        gates = gates + _recurrent(cell, hidden)
        gates = gates + jnp.einsum("bd,dge->bge", context, from_context)
        hidden, state = lstm_cell(gates, state)
        query = hidden @ attention["w_query"]
        scores = jnp.tanh(query[:, None] + keys) @ attention["score"]
        weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
        context = jnp.einsum("bs,bsd->bd", weights, memory)
        return (hidden, state, context), (hidden, context)

    zeros = jnp.zeros((x.shape[0], d), x.dtype)
    inputs = jnp.einsum("btf,fgd->tbgd", x, from_token) + cell["bias"]
    _, (outputs, contexts) = lax.scan(_rematerialized(options, step), (zeros, zeros, zeros), inputs)
    return jnp.swapaxes(outputs, 0, 1), jnp.swapaxes(contexts, 0, 1)


def _rematerialized(options: LstmOptions, step: Any) -> Any:
    return jax.checkpoint(step, prevent_cse=False) if options.remat == "full" else step


def loss(options: LstmOptions, params: PyTree, batch: Batch) -> jax.Array:
    """Mean cross-entropy of batch["labels"], [batch, target_sequence], given the source."""
    logits = apply(options, params, batch["source"], batch["tokens"])
    return cross_entropy(logits, batch["labels"])


make_batch = translation.make_batch


def model_flops(options: LstmOptions) -> int:
    """Matmul FLOPs that one step needs: three times those of a forward pass."""
    d = options.d_model
    source, target = options.sequence, options.target_length
    cell, wide = 2 * _GATES * d * d, 3 * _GATES * d * d
    encoder = source * (2 * cell + (options.encoder_depth - 1) * cell + d * d)
    encoder += source * (wide - cell) if options.encoder_depth > 1 else 0
    decoder = target * (options.layers * wide + d * d + d * options.vocab)
    attention = target * source * 2 * d
    return 6 * options.batch * (encoder + decoder + attention)
