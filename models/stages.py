"""The layers of a decoder as the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardwright.models.pipeline import pipeline
from shardwright.models.training import PyTree
from shardwright.models.transformer_options import DecoderOptions

_WEIGHT_PRODUCTS = (
    "query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo",
)  # fmt: skip
"""What layers name of the results of matrix products with weights."""


def run_stages(
    options: DecoderOptions,
    blocks: PyTree,
    x: jax.Array,
    block: Callable[[PyTree, jax.Array], tuple[jax.Array, Any]],
) -> tuple[jax.Array, Any]:
    """The residual stream after all blocks, and what they return besides.

    Args:
      blocks: one stacked parameter tree.
      x: [batch, sequence, d_model].
      block: from weights and residual stream to the next residual stream and the rest.

    Returns:
      Like `x`, and a pytree of arrays [blocks, microbatches, ...], as `pipeline` returns it.
    """
    made: tuple[jax.Array, Any] = pipeline(
        block,
        blocks,
        x,
        stages=options.stages,
        microbatches=options.microbatches,
        repeats=options.repeats,
        replicas=options.replicas,
        remat=_remat(options),
        has_aux=True,
        stage_axis=options.stage_axis,
    )
    return made


def _remat(options: DecoderOptions) -> bool | Callable[..., bool]:
    """What a stage keeps of a microbatch: as a policy for layers says, of the whole stage.

    In a pipeline every product has the dimension of the stages, so that a policy cannot tell those
    with weights by their form, and goes by their names.
    """
    if options.remat in ("none", "full"):
        return options.remat == "full"
    policies = jax.checkpoint_policies
    policy: Callable[..., bool] = (
        policies.save_only_these_names(*_WEIGHT_PRODUCTS)
        if options.remat == "dots"
        else policies.save_and_offload_only_these_names(
            names_which_can_be_saved=options.saved,
            names_which_can_be_offloaded=options.offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    )
    return policy
