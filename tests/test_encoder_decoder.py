"""The encoder-decoder has published sizes, computes what the papers say, and runs as planned."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.models import build, decoder, encoder_decoder, positions

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

SMALL: dict[str, Any] = {
    "layers": 1, "encoder_layers": 2, "d_model": 16, "heads": 4, "head_dim": 8, "d_ff": 32,
    "vocab": 32, "batch": 8, "sequence": 12, "target_sequence": 8, "compute_dtype": "float32",
}  # fmt: skip


@functools.cache
def small(name: str = "t5-base", **options: Any) -> tuple[Any, Any, Any]:
    """A model, and parameters and a batch that show differences."""
    model = build(name, **SMALL | options)
    state = random_state(model)
    return model, state["params"], random_batch(model)


def random_state(model: Any) -> Any:
    """A state that needs no compilation: random parameters, and nothing else so far."""
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), model.example_args[0])
    state["params"] = jax.tree.map(
        lambda a: rng.normal(scale=0.3, size=a.shape).astype(a.dtype), state["params"]
    )
    return state


def random_batch(model: Any) -> Any:
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray(rng.integers(0, 32, size=array.shape), jnp.int32)
        for name, array in model.example_args[1].items()
    }


def logits(model: Any, params: Any, source: Any, tokens: Any) -> np.ndarray:
    apply = functools.partial(encoder_decoder.apply, model.options)
    return np.asarray(quick_jit(apply)(params, source, tokens))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # Exact counts of the released checkpoints (Hugging Face, t5-base to t5-11b).
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("t5-3b", 2_851_598_336),
        ("t5-11b", 11_307_321_344),
    ],
)
def test_t5_has_the_parameters_of_the_released_checkpoints(name: str, count: int) -> None:
    assert build(name).parameter_count == count


@pytest.mark.parametrize(("name", "millions"), [("transformer-base", 65), ("transformer-big", 213)])
def test_transformers_have_the_parameters_of_table_3(name: str, millions: float) -> None:
    """Vaswani et al. (2017), table 3; the vocabulary is "about" 37,000 there."""
    assert build(name).parameter_count == pytest.approx(millions * 1e6, rel=0.04)


@pytest.mark.parametrize("name", ["t5-base", "transformer-base"])
def test_every_position_of_the_target_sees_the_source_and_the_target_so_far(name: str) -> None:
    model, params, batch = small(name)
    before = logits(model, params, batch["source"], batch["tokens"])
    later = batch["tokens"].at[:, 5].add(1) % 32
    changed = np.abs(logits(model, params, batch["source"], later) - before).max((0, 2))
    assert np.all(changed[:5] == 0) and np.all(changed[5:] > 0)
    other_end = batch["source"].at[:, -1].add(1) % 32
    changed = np.abs(logits(model, params, other_end, batch["tokens"]) - before).max((0, 2))
    assert np.all(changed > 0)


def test_an_attention_is_that_of_a_loop_with_another_source_and_a_bias() -> None:
    rng = np.random.default_rng(0)
    q, bias = rng.normal(size=(2, 3, 4, 6)), rng.normal(size=(4, 3, 5))
    k, v = rng.normal(size=(2, 2, 5, 2, 6))
    expected = np.zeros_like(q)
    for b, t, h in np.ndindex(2, 3, 4):
        scores = k[b, :, h // 2] @ q[b, t, h] / np.sqrt(6) + bias[h, t]
        weights = np.exp(scores) / np.exp(scores).sum()
        expected[b, t, h] = weights @ v[b, :, h // 2]
    given = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    actual = decoder.dot_attention(*given, causal=False, bias=jnp.asarray(bias, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_positions_fall_into_the_buckets_of_t5(bidirectional: bool) -> None:
    """T5's `_relative_position_bucket` written as a loop; 32 buckets, the farthest from 128."""
    table = jnp.arange(32.0)[:, None]
    actual = np.asarray(positions.relative_bias(table, 160, bidirectional=bidirectional)[0])
    for query, key in [(0, 0), (9, 0), (159, 0), (159, 100), (20, 40), (0, 159), (64, 56), (17, 0)]:
        distance, buckets, start = query - key, 32, 0
        if bidirectional:
            buckets, start = 16, 16 if distance < 0 else 0
            distance = abs(distance)
        distance = max(distance, 0)
        half = buckets // 2
        bucket = distance
        if distance >= half:
            grown = np.log(distance / half) / np.log(128 / half) * (buckets - half)
            bucket = min(half + int(np.float32(grown)), buckets - 1)
        assert actual[query, key] == start + bucket, (query, key)


def test_sinusoids_are_those_of_the_formula() -> None:
    """Vaswani et al. (2017), section 3.5, sines and cosines side by side."""
    angle = np.arange(7)[:, None] / 10_000 ** (2 * np.arange(4) / 8)
    expected = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    np.testing.assert_allclose(positions.sinusoids(jnp.arange(7), 8), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("t5-base", {"attention": "flash"}, "positions='relative'"),
        (
            "transformer-big",
            {"attention": "flash", "target_sequence": 100},
            "target_sequence=100 is not a multiple of 128",
        ),
        (
            "transformer-big",
            {"positions": "learned", "max_positions": 128, "target_sequence": 256},
            "target_sequence=256 is longer than the 128",
        ),
    ],
)
def test_options_that_disagree_are_refused(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(sw.InputError, match=reason):
        build(name, **options)


def test_a_planned_step_has_the_numbers_of_one_device() -> None:
    model = build("t5-base", **SMALL | {"encoder_layers": 1}, optimizer="momentum")
    plan = sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", mesh={"data": 2, "model": 4},
        donate_argnums=model.donate_argnums, time_limit_s=5,
    )  # fmt: skip
    assert not plan.data.replicated_ops
    batch = random_batch(model)
    ours, metrics = plan.jit(model.train_step)(random_state(model), batch)
    theirs, expected = quick_jit(model.train_step)(random_state(model), batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4),
        ours["params"], theirs["params"],
    )  # fmt: skip
