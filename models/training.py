"""What the reference models' train steps share: state, AdamW, clipping, cross-entropy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwright.models.options import TrainOptions

PyTree = Any
State = dict[str, Any]
Batch = dict[str, jax.Array]
TrainStep = Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats.

    Args:
      logits: [..., classes], any floating type; the sum is taken in float32.
      labels: [...], integers below `classes`.
    """
    logits = logits.astype(jnp.float32)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(log_normalizer - label_logits)


def adamw(options: TrainOptions) -> optax.GradientTransformation:
    """AdamW with the betas that GPT-3 and Llama were trained with.

    Source: Brown et al. (2020), appendix B; Touvron et al., Llama 2 (2023), section 2.2.
    """
    return optax.adamw(
        options.learning_rate,
        b1=0.9,
        b2=0.95,
        weight_decay=options.weight_decay,
        mu_dtype=options.mu_dtype,
    )


def make_init(
    init_params: Callable[[jax.Array], PyTree], options: TrainOptions
) -> Callable[[jax.Array], State]:
    """A function from a PRNG key to the whole train state."""

    def init(key: jax.Array) -> State:
        params = init_params(key)
        return {
            "params": params,
            "opt_state": adamw(options).init(params),
            "step": jnp.zeros((), jnp.int32),
        }

    return init


def make_train_step(loss: Callable[[PyTree, Batch], jax.Array], options: TrainOptions) -> TrainStep:
    """A whole train step: loss, gradients, clipping, AdamW.

    The step takes and returns {"params", "opt_state", "step"}, and its metrics are "loss" and
    "grad_norm" (before clipping), float32 scalars.
    """
    optimizer = adamw(options)

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        loss_value, grads = jax.value_and_grad(loss)(state["params"], batch)
        grad_norm = optax.tree.norm(grads)
        if options.clip_norm is not None:
            scale = jnp.minimum(1.0, options.clip_norm / grad_norm)
            grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        new_state = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        return new_state, {"loss": loss_value, "grad_norm": grad_norm}

    return train_step
