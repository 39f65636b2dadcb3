"""Models are built by name, and a mistake in an option is told as one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import InputError
from shardwright.models import build, model_names
from shardwright.models.training import cross_entropy


def test_names_are_those_that_build_takes():
    assert "llama3-405b" in model_names()
    for name in model_names():
        assert build(name).name == name


def test_options_change_the_published_sizes():
    model = build(
        "llama3-8b",
        layers=2,
        d_model=64,
        heads=4,
        kv_heads=2,
        d_ff=128,
        vocab=256,
        batch=8,
        sequence=32,
    )
    # By hand: q and o 64x64, k and v 64x32, three 64x128, two norms a layer; two tables, one norm.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert model.parameter_count == 2 * layer + 2 * 256 * 64 + 64
    assert model.tokens_per_step == 8 * 32
    assert model.example_args[1]["tokens"].shape == (8, 32)


def test_mlp_learns_a_repeated_batch():
    model = build("mlp", features=16, hidden=32, layers=3, classes=4, batch=8, learning_rate=1e-2)
    step = jax.jit(model.train_step, donate_argnums=model.donate_argnums)
    state, batch = model.init(0), model.make_batch(0)
    state, first = step(state, batch)
    for _ in range(30):
        state, last = step(state, batch)
    assert last["loss"] < 0.2 * first["loss"]


def test_clipping_bounds_the_first_moment_by_the_norm():
    # AdamW's first moment after one step is (1 - b1) times the clipped gradient.
    model = build("mlp", features=8, hidden=8, layers=2, classes=4, batch=4, clip_norm=1e-3)
    state, metrics = jax.jit(model.train_step)(model.init(0), model.make_batch(0))
    assert metrics["grad_norm"] > 1e-2
    moments = jax.tree.leaves(state["opt_state"][0].mu)
    norm = np.sqrt(sum(float(jnp.sum(moment**2)) for moment in moments))
    assert norm == pytest.approx(0.1 * 1e-3, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "momentum"])
def test_microbatches_take_the_step_of_the_whole_batch(optimizer):
    options = {
        "features": 8, "hidden": 16, "layers": 2, "classes": 4, "batch": 12,
        "compute_dtype": "float32", "optimizer": optimizer, "learning_rate": 0.1,
    }  # fmt: skip
    whole, parts = (build("mlp", **options, microbatches=count) for count in (1, 3))
    ours, theirs = (
        jax.jit(model.train_step)(model.init(0), model.make_batch(0)) for model in (parts, whole)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), ours, theirs)


def test_lamb_moves_an_array_by_the_rate_times_its_norm():
    """You et al. (2019), algorithm 2: the step of each array has length rate x |w|."""
    model = build(
        "mlp", features=8, hidden=16, layers=2, classes=4, batch=12, compute_dtype="float32",
        optimizer="lamb", learning_rate=0.01, weight_decay=0.0,
    )  # fmt: skip
    before = model.init(0)
    after, _ = jax.jit(model.train_step)(before, model.make_batch(0))
    for old, new in zip(
        jax.tree.leaves(before["params"]), jax.tree.leaves(after["params"]), strict=True
    ):
        if np.linalg.norm(old) > 0:
            assert np.linalg.norm(new - old) == pytest.approx(0.01 * np.linalg.norm(old), rel=1e-3)


def test_cross_entropy_is_the_mean_negative_log_probability():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5))
    labels = np.array([[0, 4, 2], [1, 1, 3]])
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.mean([np.log(probabilities[i, j, labels[i, j]]) for i, j in np.ndindex(2, 3)])
    assert cross_entropy(jnp.asarray(logits), jnp.asarray(labels)) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama3-8B", {}, "Did you mean 'llama3-8b'"),
        ("resnet-49", {}, "The models are gpt2-124m"),
        ("llama3-8b", {"n_heads": 4}, r"unknown option 'n_heads'.*options are .*heads, .*kv_heads"),
        ("mlp", {"sequence": 4}, r"unknown option 'sequence'.*options are batch, classes"),
        ("llama3-8b", {"heads": 30}, "kv_heads=8 does not divide heads=30"),
        ("llama3-8b", {"heads": 24}, "heads=24 does not divide d_model=4096"),
        ("llama3-8b", {"head_dim": 7}, "head_dim=7 is odd"),
        ("gpt2-124m", {"sequence": 2048}, "sequence=2048 is longer than max_positions=1024"),
        ("gpt2-124m", {"layers": 0}, "option 'layers': Input should be greater than 0"),
        ("gpt2-124m", {"layers": 10**7}, "option 'layers': Input should be less than or equal to"),
        ("gpt2-124m", {"layers": True}, "option 'layers': Input should be a number, not true"),
        ("mlp", {"batch": 10**20}, "option 'batch': Input should be less than or equal to 2147483"),
        ("resnet-50", {"depths": (3, 10**7)}, "option 'depths': Input should be less than or"),
        (
            "gpt2-124m",
            {"remat": "some"},
            "option 'remat': Input should be 'none', 'full', 'dots' or 'names'",
        ),
        ("mlp", {"batch": 10, "microbatches": 4}, "microbatches=4 does not divide batch=10"),
        ("gpt2-124m", {"residual_axes": ("data",)}, "option 'residual_axes'"),
        ("gpt2-124m", {"param_dtype": "f32"}, "option 'param_dtype': Input should be 'float32'"),
    ],
)
def test_a_bad_name_or_option_is_told_with_what_to_do(name, options, message):
    with pytest.raises(InputError, match=message):
        build(name, **options)
