"""Conformer and LSTM models have published sizes, compute the papers' formulas, run as planned."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.models import build, conformer, lstm

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

SMALL: dict[str, dict[str, Any]] = {
    "conformer-l": {
        "layers": 1, "d_model": 16, "heads": 2, "kernel": 5, "features": 8, "frames": 32,
        "labels": 3, "classes": 8, "batch": 8, "compute_dtype": "float32",
    },
    "gnmt": {
        "layers": 2, "encoder_layers": 2, "d_model": 16, "vocab": 32, "sequence": 6,
        "target_sequence": 4, "batch": 8, "compute_dtype": "float32",
    },
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize(
    ("name", "millions", "decoder_millions"),
    [
        # Gulati et al. (2020), table 1. What our encoder lacks is their decoder, one LSTM of 320 or
        # 640 units: 8 units^2 weights (0.8 and 3.3 M), its embedding, and the joint network.
        ("conformer-s", 10.3, 1.5),
        ("conformer-m", 30.7, 3.5),
        ("conformer-l", 118.8, 3.5),
    ],
)
def test_conformers_have_the_parameters_of_table_1_but_for_the_decoder(
    name: str, millions: float, decoder_millions: float
) -> None:
    ours = build(name).parameter_count
    assert ours == pytest.approx((millions - decoder_millions) * 1e6, rel=0.02)


def test_gnmt_has_the_parameters_that_its_layers_add_up_to() -> None:
    """By hand: 4 gates, each 1024 from what a layer reads and its own 1024, with a bias."""
    narrow, wide = (4 * 1024 * (features + 1024 + 1) for features in (1024, 2048))
    encoder = 2 * narrow + wide + 6 * narrow
    attention = 2 * 1024**2 + 1024
    count = 2 * 32000 * 1024 + 32000 + encoder + attention + 8 * wide
    assert build("gnmt").parameter_count == count


def test_relative_shift_puts_the_score_of_each_distance_at_its_key() -> None:
    """Column p of the scores is of distance query - key = 4 - p."""
    scores = jnp.asarray(random(2, 5, 9))
    shifted = conformer._relative_shift(scores)
    for query, key in np.ndindex(5, 5):
        np.testing.assert_array_equal(shifted[:, query, key], scores[:, query, 4 - query + key])


def test_conformer_convolution_is_gated_depthwise_and_normalised() -> None:
    options = build("conformer-l", **SMALL["conformer-l"]).options
    assert isinstance(options, conformer.ConformerOptions)
    w = {
        "before": {"scale": np.ones(16), "bias": np.zeros(16)}, "w_in": random(16, 2, 16, seed=1),
        "b_in": random(2, 16, seed=2), "depthwise": random(5, 1, 16, seed=3),
        "norm": {"scale": np.ones(16), "bias": np.zeros(16)}, "w_out": random(16, 16, seed=4),
        "b_out": random(16, seed=5),
    }  # fmt: skip
    x = random(2, 7, 16, seed=6)
    y = x - x.mean(-1, keepdims=True)
    y /= np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5)
    y = (y @ w["w_in"][:, 0] + w["b_in"][0]) * sigmoid(y @ w["w_in"][:, 1] + w["b_in"][1])
    padded = np.pad(y, ((0, 0), (2, 2), (0, 0)))
    y = sum(padded[:, i : i + 7] * w["depthwise"][i, 0] for i in range(5))
    y = (y - y.mean((0, 1))) / np.sqrt(y.var((0, 1)) + 1e-5)
    expected = (y * sigmoid(y)) @ w["w_out"] + w["b_out"]
    old = {"mean": jnp.zeros(16), "variance": jnp.ones(16)}
    given = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (w, x))
    actual, _ = conformer._convolution(options, given[0], old, given[1])
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


def test_an_lstm_cell_is_that_of_the_equations() -> None:
    """Wu et al. (2016), equation 4: gates in, forget, candidate, out."""
    gates, memory = random(2, 4, 3), random(2, 3, seed=1)
    i, f, g, o = (gates[:, index] for index in range(4))
    kept = sigmoid(f) * memory + sigmoid(i) * np.tanh(g)
    hidden, new = lstm.lstm_cell(jnp.asarray(gates), jnp.asarray(memory))
    np.testing.assert_allclose(new, kept, rtol=1e-5)
    np.testing.assert_allclose(hidden, sigmoid(o) * np.tanh(kept), rtol=1e-5)


def test_gnmt_reads_the_source_both_ways_and_the_target_one_way() -> None:
    model = build("gnmt", **SMALL["gnmt"])
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: rng.normal(scale=0.3, size=a.shape), model.example_args[0]["params"]
    )
    batch = {
        name: jnp.asarray(rng.integers(0, 32, size=array.shape), jnp.int32)
        for name, array in model.example_args[1].items()
    }
    apply = quick_jit(functools.partial(lstm.apply, model.options))
    before = np.asarray(apply(params, batch["source"], batch["tokens"]))
    for place in (0, -1):
        source = batch["source"].at[:, place].add(1) % 32
        change = np.abs(np.asarray(apply(params, source, batch["tokens"])) - before)
        assert np.all(change.max((0, 2)) > 0)
    later = batch["tokens"].at[:, 2].add(1) % 32
    change = np.abs(np.asarray(apply(params, batch["source"], later)) - before).max((0, 2))
    assert np.all(change[:2] == 0) and np.all(change[2:] > 0)


@pytest.mark.parametrize("name", SMALL)
def test_a_planned_step_trains_as_one_device_does(name: str) -> None:
    model = build(name, **SMALL[name], optimizer="momentum", learning_rate=0.1)
    plan = sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", mesh={"data": 2, "model": 4},
        donate_argnums=model.donate_argnums, time_limit_s=5,
    )  # fmt: skip
    assert not plan.data.replicated_ops
    batch, one_device = model.make_batch(0), quick_jit(model.train_step)
    (ours, metrics), (theirs, expected) = (
        step(model.init(0), batch) for step in (plan.jit(model.train_step), one_device)
    )
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-4)
    for part in ("params", "statistics"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
            ours[part], theirs[part],
        )  # fmt: skip
    for _ in range(8):
        theirs, later = one_device(theirs, batch)
    assert later["loss"] < expected["loss"]


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("conformer-l", {"heads": 7}, "heads=7 does not divide d_model=512"),
        ("conformer-l", {"labels": 500}, "labels=500 are more than a quarter"),
        ("conformer-l", {"batch": 12, "norm_groups": 8}, "norm_groups=8 does not divide batch=12"),
        ("gnmt", {"encoder_layers": 1}, "encoder_layers=1 is too few"),
    ],
)
def test_options_that_disagree_are_refused(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(sw.InputError, match=reason):
        build(name, **options)
