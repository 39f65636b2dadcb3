"""DLRM: recommendation from dense features and categories, with embedding tables of any size.

A table's gradient is zero but for the rows of the batch, so that no step writes it whole: rows that
were looked up are updated in place by plain SGD, as MLPerf's reference does. All else has the
optimizer of the options.

Source: Naumov et al., Deep Learning Recommendation Model (2019), sections 2.1 and 2.2 (dot
  interaction of every pair of vectors, joined with the bottom network's result).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.models.options import DlrmOptions
from shardwright.models.training import Batch, PyTree, State, TrainStep, make_optimizer


def init_params(options: DlrmOptions, key: jax.Array) -> PyTree:
    """Parameters: tables uniform within 1/sqrt(rows), weights [in, out] normal with variance 2/in.

    Source: the reference implementation of Naumov et al. (tables); He et al., Delving Deep into
      Rectifiers (2015), section 2.2 (weights).
    """
    bottom_key, top_key, tables_key = jax.random.split(key, 3)
    table_keys = jax.random.split(tables_key, len(options.table_rows))
    tables = [
        jax.random.uniform(
            table_key, (rows, options.width), options.param_dtype, -(rows**-0.5), rows**-0.5
        )
        for table_key, rows in zip(table_keys, options.table_rows, strict=True)
    ]
    return {
        "tables": tables,
        "bottom": _init_network(options, bottom_key, (options.features, *options.bottom)),
        "top": _init_network(options, top_key, (options.joined, *options.top)),
    }


def _init_network(options: DlrmOptions, key: jax.Array, widths: Sequence[int]) -> list[PyTree]:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {
            "w": (2 / fan_in) ** 0.5 * jax.random.normal(one, (fan_in, fan_out), "float32"),
            "b": jnp.zeros(fan_out, "float32"),
        }
        for one, (fan_in, fan_out) in zip(keys, itertools.pairwise(widths), strict=True)
    ]


def init_state(options: DlrmOptions, key: jax.Array) -> State:
    """The whole train state; tables have no state of an optimizer."""
    params = init_params(options, key)
    return {
        "params": params,
        "statistics": {},
        "opt_state": make_optimizer(options).init(_networks(params)),
        "step": jnp.zeros((), jnp.int32),
    }


def _networks(params: PyTree) -> PyTree:
    return {"bottom": params["bottom"], "top": params["top"]}


def look_up(tables: Sequence[jax.Array], categories: jax.Array) -> list[jax.Array]:
    """The rows [batch, width] of each table that categories [batch, tables] name."""
    return [
        jnp.take(table, categories[:, number], axis=0, mode="clip")
        for number, table in enumerate(tables)
    ]


def apply(
    options: DlrmOptions, networks: PyTree, rows: Sequence[jax.Array], features: jax.Array
) -> jax.Array:
    """Logits [batch] of looked-up rows and dense features [batch, features]."""
    dtype = options.compute_dtype
    bottom = _network(networks["bottom"], features.astype(dtype), last_relu=True)
    vectors = jnp.stack([bottom, *(row.astype(dtype) for row in rows)], axis=1)
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    count = vectors.shape[1]
    first, second = np.tril_indices(count, -1)
    pairs = products.reshape(-1, count * count)[:, first * count + second]
    return _network(networks["top"], jnp.concatenate([bottom, pairs], axis=1), last_relu=False)[
        :, 0
    ]


def _network(layers: Sequence[PyTree], x: jax.Array, *, last_relu: bool) -> jax.Array:
    for number, layer in enumerate(layers):
        x = x @ layer["w"].astype(x.dtype) + layer["b"].astype(x.dtype)
        if last_relu or number < len(layers) - 1:
            x = jax.nn.relu(x)
    return x


def make_train_step(options: DlrmOptions) -> TrainStep:
    """A whole train step of {"params", "statistics", "opt_state", "step"}; its metric is "loss"."""
    optimizer = make_optimizer(options)

    def loss(networks: PyTree, rows: list[jax.Array], batch: Batch) -> jax.Array:
        logits = apply(options, networks, rows, batch["features"]).astype(jnp.float32)
        labels = batch["labels"].astype(jnp.float32)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        params, categories = state["params"], batch["categories"]
        networks, rows = _networks(params), look_up(params["tables"], categories)
        value, (grads, row_grads) = jax.value_and_grad(loss, argnums=(0, 1))(networks, rows, batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], networks)
        tables = [
            table.at[categories[:, number]].add(
                (-options.learning_rate * grad).astype(table.dtype), mode="drop"
            )
            for number, (table, grad) in enumerate(zip(params["tables"], row_grads, strict=True))
        ]
        new_state = {
            "params": {**optax.apply_updates(networks, updates), "tables": tables},
            "statistics": state["statistics"],
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        return new_state, {"loss": value}

    return train_step


def make_batch(options: DlrmOptions, key: jax.Array) -> Batch:
    """Random features, categories and clicks."""
    features_key, categories_key, labels_key = jax.random.split(key, 3)
    most = jnp.asarray(options.tables)
    return {
        "features": jax.random.normal(features_key, (options.batch, options.features)),
        "categories": jax.random.randint(
            categories_key, (options.batch, len(options.tables)), 0, most
        ),
        "labels": jax.random.bernoulli(labels_key, 0.5, (options.batch,)).astype(jnp.int32),
    }


def model_flops(options: DlrmOptions) -> int:
    """FLOPs of a step's matrix products: three times those of a forward pass."""
    widths = [(options.features, *options.bottom), (options.joined, *options.top)]
    macs = sum(a * b for network in widths for a, b in itertools.pairwise(network))
    vectors = len(options.tables) + 1
    return 6 * options.batch * (macs + vectors * vectors * options.width)
