"""Sources and targets of models that turn one sequence of tokens into another."""

from __future__ import annotations

import jax

from shardwright.models.options import LstmOptions
from shardwright.models.training import Batch
from shardwright.models.transformer_options import EncoderDecoderOptions


def make_batch(options: EncoderDecoderOptions | LstmOptions, key: jax.Array) -> Batch:
    """Random sources and targets, and as labels the tokens that follow in the target."""
    source_key, target_key = jax.random.split(key)
    source_shape = (options.batch, options.sequence)
    target_shape = (options.batch, options.target_length + 1)
    target = jax.random.randint(target_key, target_shape, 0, options.vocab)
    return {
        "source": jax.random.randint(source_key, source_shape, 0, options.vocab),
        "tokens": target[:, :-1],
        "labels": target[:, 1:],
    }
