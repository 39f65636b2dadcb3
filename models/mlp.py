"""A classifier of stacked dense layers."""

import itertools

import jax
import jax.numpy as jnp

from shardwright.models.options import MlpOptions
from shardwright.models.training import Batch, PyTree, cross_entropy


def _widths(options: MlpOptions) -> list[int]:
    hidden = [options.hidden] * (options.layers - 1)
    return [options.features, *hidden, options.classes]


def init_params(options: MlpOptions, key: jax.Array) -> PyTree:
    """Weights [in, out] with variance 2/in, biases zero.

    Source: He et al., Delving Deep into Rectifiers (2015), section 2.2.
    """
    widths = _widths(options)
    keys = jax.random.split(key, options.layers)
    layers = []
    for layer_key, (fan_in, fan_out) in zip(keys, itertools.pairwise(widths), strict=True):
        w = jax.random.normal(layer_key, (fan_in, fan_out), options.param_dtype)
        layers.append({"w": w * (2 / fan_in) ** 0.5, "b": jnp.zeros(fan_out, options.param_dtype)})
    return {"layers": layers}


def apply(options: MlpOptions, params: PyTree, features: jax.Array) -> jax.Array:
    """Logits [batch, classes] of features [batch, features]."""
    x = features.astype(options.compute_dtype)
    for index, layer in enumerate(params["layers"]):
        x = x @ layer["w"].astype(x.dtype) + layer["b"].astype(x.dtype)
        if index < options.layers - 1:
            x = jax.nn.relu(x)
    return x


def loss(options: MlpOptions, params: PyTree, batch: Batch) -> jax.Array:
    """Mean cross-entropy of batch["features"] [batch, features] with batch["labels"] [batch]."""
    return cross_entropy(apply(options, params, batch["features"]), batch["labels"])


def make_batch(options: MlpOptions, key: jax.Array) -> Batch:
    """Random features and labels."""
    features_key, labels_key = jax.random.split(key)
    shape = (options.batch, options.features)
    return {
        "features": jax.random.normal(features_key, shape, options.compute_dtype),
        "labels": jax.random.randint(labels_key, (options.batch,), 0, options.classes),
    }


def model_flops(options: MlpOptions) -> int:
    """Matmul FLOPs of one step: 6 a weight and example, 4 in the first layer.

    A multiply-add is two FLOPs; the forward pass does one product a weight, the backward pass two,
    but nothing asks for the gradient of the input.
    """
    widths = _widths(options)
    weights = [fan_in * fan_out for fan_in, fan_out in itertools.pairwise(widths)]
    return options.batch * (6 * sum(weights) - 2 * weights[0])
