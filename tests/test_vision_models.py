"""Convolutional reference models have the published sizes, learn, and normalise as told."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.models import amoebanet, build, detector, resnet, unet
from shardwright.models.convolution import batch_norm, convolve, max_pool, upsample
from shardwright.models.training import init_statistics

SMALL: dict[str, dict[str, Any]] = {
    "resnet-50": {"image": 32, "batch": 4, "width": 8, "classes": 10, "depths": (1, 2, 1, 1)},
    "ssd-300": {
        "image": 32, "batch": 4, "width": 4, "classes": 5, "depths": (1, 1, 1),
        "layers": ((4, 8, 2),), "anchors": (2, 3),
    },
    "amoebanet-d": {"image": 32, "batch": 4, "width": 16, "classes": 10, "cells": 3},
    "unet-2d": {"image": 16, "batch": 4, "filters": ((4, 4), (8, 8))},
    "unet-3d": {"image": 8, "batch": 4, "filters": ((4, 8), (8, 16))},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        # torchvision's resnet50: 25,557,032.
        ("resnet-50", 25.557032),
        # torchvision's resnet34: 21,797,672.
        ("resnet-34", 21.797672),
        # Ronneberger et al.'s network has 31.03 M, and 11,776 more with batch norms (2 x 5,888
        # filters).
        ("unet-2d", 31.03 + 0.011776 / 2),
        # Cicek et al., section 2: 19,069,955.
        ("unet-3d", 19.069955),
    ],
)
def test_parameters_are_as_many_as_published(name: str, millions: float) -> None:
    assert build(name).parameter_count == pytest.approx(millions * 1e6, rel=2e-4)


@pytest.mark.parametrize(("cells", "width", "millions"), [(18, 208, 82), (36, 544, 1050)])
def test_amoebanets_have_the_parameters_of_gpipes_table_1(
    cells: int, width: int, millions: int
) -> None:
    model = build("amoebanet-d", cells=cells, width=width)
    assert model.parameter_count == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize("number", [2, 3], ids=["normal", "reducing"])
def test_a_cell_that_is_cut_computes_the_numbers_of_one_device(number: int) -> None:
    """Cells after others that made maps of another size, over the batch and over space."""
    options: Any = build(
        "amoebanet-d", **SMALL["amoebanet-d"] | {"norm_groups": 2}, compute_dtype="float32"
    ).options
    cell = amoebanet.cells(options)[number]
    assert cell.reduces == (number == 3)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: amoebanet.init_params(options, jax.random.key(0))[cell.name])
    weights = jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(x.dtype), shapes)
    given = tuple(
        rng.normal(size=(4, size, size, channels)).astype(np.float32)
        for size, channels in zip(cell.sizes, cell.channels, strict=True)
    )

    def apply(weights: Any, given: Any) -> Any:
        return amoebanet.apply_cell(options, cell, weights, init_statistics(weights), given)

    plan = sw.plan(
        apply, weights, given, topology="v5e:2x4", mesh={"data": 2, "space": 4}, time_limit_s=2,
        pinned={"[1][0]": P("data"), "[1][1]": P("data", "space")},
    )  # fmt: skip
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        plan.jit(apply)(weights, given), jax.jit(apply)(weights, given),
    )  # fmt: skip


def test_resnet_50_takes_4_09_billion_multiply_adds_an_image() -> None:
    """torchvision's documentation of ResNet50_Weights: 4.09 GFLOPS, counting multiply-adds."""
    model = build("resnet-50")
    forward = model.model_flops_per_step / model.tokens_per_step / 6
    assert forward == pytest.approx(4.09e9, rel=1e-3)


def test_ssd_300_has_the_8732_anchors_of_its_paper() -> None:
    """Liu et al. (2016), table 1; maps of 38 to 1 places a side, section 3.1."""
    _, batch = build("ssd-300").example_args
    sizes = [leaf.shape[1:] for leaf in batch["labels"]]
    assert [size[0] for size in sizes] == [38, 19, 10, 5, 3, 1]
    assert sum(map(math.prod, sizes)) == 8732


def test_a_detector_learns_from_its_objects_and_three_times_as_many_hard_negatives() -> None:
    """Against the loss of Liu et al. (2016), section 2.2, added up image by image."""
    model = build("ssd-300", **SMALL["ssd-300"], compute_dtype="float32")
    state, batch = model.init(0), model.make_batch(0)
    places = [leaf.shape for leaf in batch["labels"]]
    assert places == [(4, 4, 4, 2), (4, 2, 2, 3)]
    rng = np.random.default_rng(0)
    batch["labels"] = [jnp.asarray((rng.random(s) < 0.1) * rng.integers(1, 5, s)) for s in places]
    (logits, offsets, _), (loss, _) = jax.jit(
        lambda params, statistics: (
            detector.apply(model.options, params, statistics, batch["images"]),
            detector.loss(model.options, params, statistics, batch),
        )
    )(state["params"], state["statistics"])
    flat = lambda maps, *last: np.concatenate(  # noqa: E731
        [np.asarray(part).reshape(4, -1, *last) for part in maps], axis=1
    )
    labels, scores = flat(batch["labels"]), flat(logits, 5)
    shift = np.abs(flat(offsets, 4) - flat(batch["boxes"], 4))
    total = 0.0
    for image in range(4):
        rows = scores[image] - np.log(np.exp(scores[image]).sum(-1, keepdims=True))
        losses = -rows[np.arange(len(rows)), labels[image]]
        found = labels[image] > 0
        hard = np.sort(losses[~found])[::-1][: 3 * found.sum()]
        box = np.where(shift[image] < 1, shift[image] ** 2 / 2, shift[image] - 0.5).sum(-1)
        total += losses[found].sum() + hard.sum() + box[found].sum()
    assert (labels > 0).sum() > 4
    assert float(loss) == pytest.approx(total / (labels > 0).sum(), rel=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_model_flops_are_those_of_the_traced_convolutions(name: str) -> None:
    """XLA counts every operation of a forward pass; convolutions are nearly all of it."""
    model = build(name, **SMALL[name] | {"image": 64 if name != "unet-3d" else 32})
    modules: dict[str, Any] = {
        "amoebanet-d": amoebanet, "resnet-50": resnet, "ssd-300": detector
    }  # fmt: skip
    module = modules.get(name, unet)
    state, batch = model.example_args
    forward = jax.jit(lambda p, s, x: module.apply(model.options, p, s, x)[0])
    lowered = forward.lower(state["params"], state["statistics"], batch["images"])
    counted = lowered.cost_analysis()["flops"]
    assert model.model_flops_per_step / 3 == pytest.approx(counted, rel=0.25)


@pytest.mark.parametrize("name", ["resnet-50", "unet-2d", "unet-3d"])
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
        ("ssd-300", {"anchors": (4, 6)}, r"anchors=\(4, 6\) are of 2 maps"),
        ("ssd-300", {"image": 100}, "image=100 is too small"),
        ("ssd-300", {"layers": ((4, 8, 3),)}, "layers.*Input should be 1 or 2"),
    ],
)
def test_options_that_disagree_are_refused(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(sw.InputError, match=reason):
        build(name, **options)
