"""A decoder-only language model with mixtures of experts, written as GShard writes them.

Tokens are dispatched to experts and combined again by matrix products with one-hot masks, and
every expert takes a fixed number of tokens of each group (its capacity), so that all shapes are
known. The expert is a dimension like others: cut over devices, dispatch becomes an all-to-all.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.models import decoder
from shardwright.models.dropless import mix_dropless
from shardwright.models.training import Batch, PyTree, cross_entropy
from shardwright.models.transformer_options import MixtureOptions

make_batch = decoder.make_batch


def init_params(options: MixtureOptions, key: jax.Array) -> PyTree:
    """Parameters: as the dense decoder's, with "experts" in the layers that mix."""
    blocks = options.layers // options.layers_per_block
    return decoder.init_params(options, key, functools.partial(_init_block, options), blocks)


def _init_block(options: MixtureOptions, key: jax.Array) -> PyTree:
    """A layer with experts, after the dense layers that come before it."""
    *dense_keys, mixed_key, experts_key = jax.random.split(key, options.layers_per_block + 1)
    mixed = decoder.init_attention(options, mixed_key) | decoder.init_norm(options, "mlp_norm")
    return {
        "dense": [decoder.init_layer(options, dense_key) for dense_key in dense_keys],
        "mixed": mixed | {"experts": _init_experts(options, experts_key)},
    }


def _init_experts(options: MixtureOptions, key: jax.Array) -> PyTree:
    router_key, routed_key, shared_key = jax.random.split(key, 3)
    each = jax.random.split(routed_key, options.experts)
    init_one = functools.partial(decoder.init_feed_forward, options, options.expert_width)
    shared_width = options.shared_experts * options.expert_width
    return {
        "router": decoder.normal(options, router_key, (options.d_model, options.experts)),
        "routed": jax.vmap(init_one)(each),
    } | (
        {"shared": decoder.init_feed_forward(options, shared_width, shared_key)}
        if options.shared_experts
        else {}
    )


def loss(options: MixtureOptions, params: PyTree, batch: Batch) -> jax.Array:
    """Mean cross-entropy, plus the load-balancing loss of the routers."""
    logits, balances = decoder.forward(
        options, params, batch["tokens"], functools.partial(_block, options)
    )
    return cross_entropy(logits, batch["labels"]) + options.balance_weight * jnp.mean(balances)


def _block(
    options: MixtureOptions, weights: PyTree, x: jax.Array, context: decoder.Context
) -> tuple[jax.Array, jax.Array]:
    for dense in weights["dense"]:
        x, _ = decoder.layer(options, dense, x, context)
    x = checkpoint_name(x, "decoder_layer_input")
    mixed = weights["mixed"]
    x = x + decoder.attention(options, mixed, x, context)
    y = decoder.normalize(options, mixed, "mlp_norm", x)
    experts = mixed["experts"]
    routed, balance = mix(options, experts, y)
    if options.shared_experts:
        routed = routed + decoder.feed_forward(options, experts["shared"], y)
    return x + routed, balance


def mix(options: MixtureOptions, weights: PyTree, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The routed experts' output for y [batch, sequence, d_model], and the balance loss.

    A group of GShard is one sequence here. Its mask [batch, sequence, experts, capacity] tells
    which slot of which expert a token takes.

    Source: Lepikhin et al., GShard (2020), section 2.2 and algorithms 1 and 2.
    """
    logits = jnp.einsum("bsd,de->bse", y.astype(jnp.float32), weights["router"].astype(jnp.float32))
    gates = jax.nn.softmax(logits)
    if options.dispatch == "dropless":
        made = mix_dropless(options, weights["routed"], y, gates)
        first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), options.experts, dtype=gates.dtype)
        return made, _balance(gates, first)
    dispatch, combine, balance = route(gates, options)
    taken = jnp.einsum("bsec,bsd->ebcd", dispatch.astype(y.dtype), y)
    taken = decoder.constrain(decoder.constrain(taken, options.token_axes), options.expert_axes)
    made = jax.vmap(functools.partial(decoder.feed_forward, options))(weights["routed"], taken)
    made = decoder.constrain(decoder.constrain(made, options.expert_axes), options.token_axes)
    return jnp.einsum("bsec,ebcd->bsd", combine.astype(y.dtype), made), balance


def route(gates: jax.Array, options: MixtureOptions) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses experts, best first, and gives each token a slot while its experts have any.

    Args:
      gates: [batch, sequence, experts], probabilities.

    Returns:
      A mask [batch, sequence, experts, capacity] of the slots that tokens take, the same with the
      weights that combine the experts' results (the gates of the chosen experts, made to sum to
      one where there are several), and the load-balancing loss: experts times the sum over
      experts of the fraction of tokens that choose it first times its mean gate.

    Source: Lepikhin et al., GShard (2020), algorithm 1 (here the second expert is always taken,
      not with a probability); Fedus et al., Switch Transformers (2021), equations 4 to 6; for more
      choices than two, Jiang et al., Mixtral of Experts (2024), section 2.1.
    """
    batch, _, experts = gates.shape
    left = gates
    full = jnp.zeros((batch, 1, experts), gates.dtype)
    choices, slots, chosen = [], [], []
    for _ in range(options.experts_per_token):
        choice = jax.nn.one_hot(jnp.argmax(left, axis=-1), experts, dtype=gates.dtype)
        left = left * (1 - choice)
        # Slots go in the order of the sequence, to all first choices before second ones. One
        # beyond the capacity has an empty one-hot row, and the token goes without that expert.
        place = jnp.sum((jnp.cumsum(choice, axis=1) - choice + full) * choice, axis=-1)
        full = full + jnp.sum(choice, axis=1, keepdims=True)
        slot = jax.nn.one_hot(place.astype(jnp.int32), options.capacity, dtype=gates.dtype)
        choices.append(choice)
        slots.append(jnp.einsum("bse,bsc->bsec", choice, slot))
        chosen.append(jnp.sum(gates * choice, axis=-1))
    total = sum(chosen) if options.experts_per_token > 1 else jnp.ones_like(chosen[0])
    weighed = [
        (gate / total)[..., None, None] * mask for gate, mask in zip(chosen, slots, strict=True)
    ]
    balance = _balance(gates, choices[0])
    return jnp.asarray(sum(slots)), jnp.asarray(sum(weighed)), balance


def _balance(gates: jax.Array, first: jax.Array) -> jax.Array:
    """The load-balancing loss, of gates and one-hot first choices [batch, sequence, experts]."""
    fractions = jnp.mean(first, axis=1) * jnp.mean(gates, axis=1)
    loss: jax.Array = gates.shape[-1] * jnp.mean(jnp.sum(fractions, axis=-1))
    return loss


def model_flops(options: MixtureOptions) -> int:
    """Matmul FLOPs that one step needs: as of the dense decoder, with the experts a token uses.

    Dispatch and combination, empty slots and recomputation do not count.
    """
    blocks = options.layers // options.layers_per_block
    used = options.experts_per_token + options.shared_experts
    expert_weights = options.d_model * options.expert_width * options.mlp_matrices * used
    dense_weights = options.d_model * options.d_ff * options.mlp_matrices
    instead = expert_weights + options.d_model * options.experts - dense_weights
    tokens = options.batch * options.sequence
    return decoder.model_flops(options) + 6 * tokens * blocks * instead
