"""What the reference models' train steps share: state, optimizers, clipping, cross-entropy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwright.models.options import TrainOptions

PyTree = Any
State = dict[str, Any]
Batch = dict[str, jax.Array]
Loss = Callable[[PyTree, PyTree, Batch], tuple[jax.Array, PyTree]]
"""From parameters, running statistics and a batch to the loss and the new statistics."""
TrainStep = Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats; arguments are those of `cross_entropies`."""
    return jnp.mean(cross_entropies(logits, labels))


def cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy in nats of each label.

    Args:
      logits: [..., classes], any floating type; the sum is taken in float32.
      labels: [...], integers below `classes`.
    """
    logits = logits.astype(jnp.float32)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return log_normalizer - label_logits


def init_statistics(params: PyTree) -> PyTree:
    """Running means and variances, in float32, of every "norm" in a tree of parameters."""
    if isinstance(params, list):
        return [init_statistics(part) for part in params]
    if not isinstance(params, dict):
        return {}
    if "norm" in params:
        shape = params["norm"]["scale"].shape
        return {"mean": jnp.zeros(shape), "variance": jnp.ones(shape)}
    found = {name: init_statistics(part) for name, part in params.items()}
    return {name: statistics for name, statistics in found.items() if statistics}


def make_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """The optimizer that the options name; Adam with the betas of GPT-3 and Llama.

    Source: Brown et al. (2020), appendix B; Touvron et al., Llama 2 (2023), section 2.2; LAMB: You
      et al., Large Batch Optimization for Deep Learning (2019), algorithm 2; momentum: Goyal et
      al., Accurate, Large Minibatch SGD (2017), section 5.1.
    """
    rate, decay = options.learning_rate, options.weight_decay
    if options.optimizer == "adamw":
        return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=decay, mu_dtype=options.mu_dtype)
    if options.optimizer == "lamb":
        return optax.lamb(rate, weight_decay=decay)
    return optax.chain(
        optax.add_decayed_weights(decay),
        optax.sgd(rate, momentum=0.9, accumulator_dtype=options.mu_dtype),
    )


def without_statistics(loss: Callable[[PyTree, Batch], jax.Array]) -> Loss:
    """The loss of a model that keeps no running statistics, in the form of those that do."""
    return lambda params, statistics, batch: (loss(params, batch), statistics)


def make_init(
    init_params: Callable[[jax.Array], PyTree], options: TrainOptions
) -> Callable[[jax.Array], State]:
    """A function from a PRNG key to the whole train state."""

    def init(key: jax.Array) -> State:
        params = init_params(key)
        return {
            "params": params,
            "statistics": init_statistics(params),
            "opt_state": make_optimizer(options).init(params),
            "step": jnp.zeros((), jnp.int32),
        }

    return init


def make_train_step(loss: Loss, options: TrainOptions) -> TrainStep:
    """A whole train step: loss, gradients (of one microbatch after the other), clipping, optimizer.

    The step takes and returns {"params", "statistics", "opt_state", "step"}, and its metrics are
    "loss" and "grad_norm" (before clipping), float32 scalars.
    """
    optimizer = make_optimizer(options)
    gradients = jax.value_and_grad(loss, has_aux=True)

    def accumulate(state: State, batch: Batch) -> Any:
        """As `gradients`: means over the microbatches, the statistics passed on between them."""
        count = options.accumulated
        # The parts are strided, so that a batch which is cut over devices stays where it is.
        parts = jax.tree.map(
            lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch
        )

        def add(carry: Any, part: Batch) -> tuple[Any, None]:
            total, statistics, grads = carry
            (value, statistics), more = gradients(state["params"], statistics, part)
            grads = jax.tree.map(lambda a, b: a + b / count, grads, more)
            return (total + value / count, statistics, grads), None

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        start = (jnp.zeros(()), state["statistics"], zeros)
        (value, statistics, grads), _ = jax.lax.scan(add, start, parts)
        return (value, statistics), grads

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        (loss_value, statistics), grads = (
            accumulate(state, batch)
            if options.accumulated > 1
            else gradients(state["params"], state["statistics"], batch)
        )
        grad_norm = optax.tree.norm(grads)
        if options.clip_norm is not None:
            scale = jnp.minimum(1.0, options.clip_norm / grad_norm)
            grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        new_state = {
            "params": optax.apply_updates(state["params"], updates),
            "statistics": statistics,
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        return new_state, {"loss": loss_value, "grad_norm": grad_norm}

    return train_step
