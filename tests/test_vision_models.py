"""Convolutional reference models have the published sizes, learn, and normalise as told."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.models import build
from shardwright.models.convolution import batch_norm, convolve, max_pool, upsample

SMALL: dict[str, dict[str, Any]] = {
    "resnet-50": {"image": 32, "batch": 4, "width": 8, "classes": 10, "depths": (1, 2, 1, 1)},
    "unet-2d": {"image": 16, "batch": 4, "filters": ((4, 4), (8, 8))},
    "unet-3d": {"image": 8, "batch": 4, "filters": ((4, 8), (8, 16))},
}


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        # torchvision's resnet50: 25,557,032.
        ("resnet-50", 25.557032),
        # Ronneberger et al.'s network has 31.03 M, and 11,776 more with batch norms (2 x 5,888
        # filters).
        ("unet-2d", 31.03 + 0.011776 / 2),
        # Cicek et al., section 2: 19,069,955.
        ("unet-3d", 19.069955),
    ],
)
def test_parameters_are_as_many_as_published(name: str, millions: float) -> None:
    assert build(name).parameter_count == pytest.approx(millions * 1e6, rel=2e-4)


def test_resnet_50_takes_4_09_billion_multiply_adds_an_image() -> None:
    """torchvision's documentation of ResNet50_Weights: 4.09 GFLOPS, counting multiply-adds."""
    model = build("resnet-50")
    forward = model.model_flops_per_step / model.tokens_per_step / 6
    assert forward == pytest.approx(4.09e9, rel=1e-3)


@pytest.mark.parametrize("name", SMALL)
def test_model_flops_are_those_of_the_traced_convolutions(name: str) -> None:
    """XLA counts every operation of a forward pass; convolutions are nearly all of it."""
    model = build(name, **SMALL[name] | {"image": 64 if name != "unet-3d" else 32})
    from shardwright.models import resnet, unet

    module: Any = resnet if name == "resnet-50" else unet
    state, batch = model.example_args
    forward = jax.jit(lambda p, s, x: module.apply(model.options, p, s, x)[0])
    lowered = forward.lower(state["params"], state["statistics"], batch["images"])
    counted = lowered.cost_analysis()["flops"]
    assert model.model_flops_per_step / 3 == pytest.approx(counted, rel=0.25)


@pytest.mark.parametrize("name", SMALL)
def test_a_batch_is_learnt_by_heart(name: str) -> None:
    model = build(name, **SMALL[name], compute_dtype="float32")
    step, state, batch = jax.jit(model.train_step), model.init(0), model.make_batch(0)
    losses = []
    for _ in range(6):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0] and losses == sorted(losses, reverse=True)


def test_batch_norm_in_groups_is_batch_norm_of_each_group() -> None:
    x = jax.random.normal(jax.random.key(0), (8, 4, 4, 3)) * 3 + 1
    weights = {"scale": jnp.array([1.0, 2.0, 3.0]), "bias": jnp.array([0.0, 1.0, -1.0])}
    old = {"mean": jnp.zeros(3), "variance": jnp.ones(3)}
    ours, running = batch_norm(weights, old, x, groups=4)
    parts, means = [], []
    for part in np.split(np.asarray(x, np.float64), 4):
        mean, variance = part.mean((0, 1, 2)), part.var((0, 1, 2))
        normed = (part - mean) / np.sqrt(variance + 1e-5)
        parts.append(normed * np.array([1.0, 2.0, 3.0]) + np.array([0.0, 1.0, -1.0]))
        means.append(mean)
    np.testing.assert_allclose(ours, np.concatenate(parts), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(running["mean"], 0.1 * np.mean(means, axis=0), rtol=1e-4)


@pytest.mark.parametrize("dims", [2, 3])
def test_space_halves_and_doubles(dims: int) -> None:
    x = jnp.ones((2, *(8,) * dims, 4))
    kernel = jnp.ones((*(3,) * dims, 4, 6))
    assert convolve(x, kernel, 2).shape == (2, *(4,) * dims, 6)
    assert max_pool(x, 3, 2).shape == (2, *(4,) * dims, 4)
    assert upsample(x, jnp.ones((*(2,) * dims, 4, 6))).shape == (2, *(16,) * dims, 6)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("resnet-50", {"batch": 12, "norm_groups": 8}, "norm_groups=8 does not divide batch=12"),
        ("unet-2d", {"image": 100}, "image=100 is not a multiple of 16"),
        ("unet-3d", {"dimensions": 4}, "dimensions"),
    ],
)
def test_options_that_disagree_are_refused(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(sw.InputError, match=reason):
        build(name, **options)
