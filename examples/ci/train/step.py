"""One step of training a residual network of dense blocks with Adam."""

import jax
import jax.numpy as jnp
import optax

from train import config

optimizer = optax.adamw(1e-3)


def init():
    """Parameters and optimizer state, in float32."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * config.LAYERS + 1))

    def matrix(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    params = {
        "blocks": [
            {
                "up": matrix(config.WIDTH, config.HIDDEN),
                "down": matrix(config.HIDDEN, config.WIDTH),
            }
            for _ in range(config.LAYERS)
        ],
        "head": matrix(config.WIDTH, config.CLASSES),
    }
    return {"params": params, "optimizer": optimizer.init(params)}


def loss(params, batch):
    """Mean cross-entropy, computed in bfloat16."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x = batch["x"]
    for block in params["blocks"]:
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    logits = (x @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def step(state, batch):
    """The updated state, and the loss."""
    value, gradients = jax.value_and_grad(loss)(state["params"], batch)
    updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer_state}, value


def example_args():
    """Shapes of state and batch; nothing is allocated."""
    batch = {
        "x": jax.ShapeDtypeStruct((config.BATCH, config.WIDTH), jnp.bfloat16),
        "label": jax.ShapeDtypeStruct((config.BATCH,), jnp.int32),
    }
    return jax.eval_shape(init), batch
