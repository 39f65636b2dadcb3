"""Serving steps: what the whole model computes, token by token, planned and run on devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.models import build, decoder, serving
from shardwright.models.quantized import product, quantize, take_rows
from shardwright.models.transformer_options import DecoderOptions, ServingOptions

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

SMALL: dict[str, Any] = {
    "layers": 2, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 48, "vocab": 64, "batch": 4,
    "compute_dtype": "float32",
}  # fmt: skip
SERVED = SMALL | {"context": 8, "weights": "float32"}


def trained(name: str) -> tuple[DecoderOptions, Any]:
    """A model's options and parameters that show differences."""
    sizes = SMALL if name == "llama3-8b" else SMALL | {"kv_heads": None, "max_positions": 8}
    model = build(name, **sizes, sequence=8, scan_layers=False)
    assert isinstance(model.options, DecoderOptions)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: rng.normal(scale=0.2, size=a.shape).astype(a.dtype),
        model.example_args[0]["params"],
    )
    return model.options, params


def options(name: str = "llama3-8b", **changes: Any) -> ServingOptions:
    sizes = {} if name == "llama3-8b" else {"kv_heads": None, "max_positions": 8}
    chosen = build(name, **SERVED | sizes | changes).options
    assert isinstance(chosen, ServingOptions)
    return chosen


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-124m"])
def test_a_prompt_then_token_by_token_gives_the_logits_of_the_whole_sequence(name: str) -> None:
    whole, params = trained(name)
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, 64)
    expected = quick_jit(functools.partial(decoder.apply, whole))(params, tokens)
    prefill = options(name, step="prefill", prompt=5)
    state, logits = quick_jit(functools.partial(serving.forward, prefill))(
        params, serving.init_state(prefill), tokens[:, :5]
    )
    np.testing.assert_allclose(logits[:, 0], expected[:, 4], rtol=1e-3, atol=1e-4)
    decode = quick_jit(functools.partial(serving.forward, options(name, step="decode")))
    for position in range(5, 8):
        state, logits = decode(params, state, tokens[:, position : position + 1])
        np.testing.assert_allclose(logits[:, 0], expected[:, position], rtol=1e-3, atol=1e-4)
    assert state["position"] == 8


def test_a_quantised_product_is_that_of_the_rounded_matrix() -> None:
    """By hand: the scale of a column is its largest element over 127."""
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(6, 3, 4)), rng.normal(size=(2, 5, 3, 4))
    scale = np.abs(weight).max((1, 2)) / 127
    rounded = np.round(weight / scale[:, None, None]) * scale[:, None, None]
    given = quantize(jnp.asarray(weight, jnp.float32), contracted=(1, 2))
    assert given.values.dtype == jnp.int8 and given.scale.shape == (6,)
    actual = product("bshk,dhk->bsd", jnp.asarray(x, jnp.float32), given)
    np.testing.assert_allclose(actual, np.einsum("bshk,dhk->bsd", x, rounded), rtol=1e-4, atol=1e-4)
    table = quantize(jnp.asarray(weight[:, 0], jnp.float32), contracted=(1,))
    rows = take_rows(table, jnp.asarray([[5, 0]]))
    np.testing.assert_allclose(rows[0], weight[[5, 0], 0], atol=np.abs(weight).max() / 127)


def test_int8_weights_take_a_byte_each_and_change_logits_little() -> None:
    _, params = trained("llama3-8b")
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, 64)
    logits = {}
    for weights in ("float32", "int8"):
        chosen = options(step="prefill", weights=weights)
        converted = jax.jit(functools.partial(serving.served, chosen))(params)
        forward = quick_jit(functools.partial(serving.forward, chosen))
        _, logits[weights] = forward(converted, serving.init_state(chosen), tokens)
    assert converted["layers"][0]["wq"].values.dtype == jnp.int8
    assert np.corrcoef(*(np.ravel(one) for one in logits.values()))[0, 1] > 0.999


def test_an_int8_cache_takes_a_byte_an_element_and_changes_logits_little() -> None:
    whole, params = trained("llama3-8b")
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, 64)
    expected = quick_jit(functools.partial(decoder.apply, whole))(params, tokens)
    prefill, decode = (
        options(step=step, cache_dtype="int8", **more)
        for step, more in (("prefill", {"prompt": 7}), ("decode", {}))
    )
    state, _ = quick_jit(functools.partial(serving.forward, prefill))(
        params, serving.init_state(prefill), tokens[:, :7]
    )
    state, logits = quick_jit(functools.partial(serving.forward, decode))(
        params, state, tokens[:, 7:]
    )
    kept = state["keys"][0]
    assert kept.values.dtype == jnp.int8 and kept.values.shape == (4, 2, 8, 8)
    assert kept.scale.shape == (4, 2, 8)
    assert np.corrcoef(np.ravel(logits[:, 0]), np.ravel(expected[:, 7]))[0, 1] > 0.999


def test_decode_flops_are_two_a_weight_and_four_a_cached_position() -> None:
    """Pope et al. (2022), section 2: 2 N a token; attention by hand for llama3-8b."""
    model = build("llama3-8b", step="decode", batch=3, context=1000)
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    attention = 4 * 32 * 4096 * 1000
    assert model.model_flops_per_step == 3 * (2 * weights + attention)
    assert model.tokens_per_step == 3


@pytest.mark.parametrize(
    ("changes", "mesh"),
    [
        (
            {"step": "decode", "weights": "int8", "cache_dtype": "int8"},
            {"data": 2, "model": 4},
        ),
        ({"step": "prefill", "prompt": 4}, {"data": 4, "model": 2}),
    ],
    ids=["decode", "prefill"],
)
def test_a_planned_step_has_the_numbers_of_one_device(
    changes: dict[str, Any], mesh: dict[str, int]
) -> None:
    model = build("llama3-8b", **SERVED | changes)
    plan = sw.plan(
        model.step, *model.example_args, topology="v5e:2x4", mesh=mesh,
        donate_argnums=model.donate_argnums, time_limit_s=5,
    )  # fmt: skip
    assert not plan.data.replicated_ops
    chosen = model.options
    assert isinstance(chosen, ServingOptions)
    params, tokens = model.init(0), model.make_batch(0)
    ours, theirs = (
        step(params, serving.init_state(chosen), tokens)
        for step in (plan.jit(model.step), jax.jit(model.step))
    )
    np.testing.assert_array_equal(ours[1], theirs[1])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours[0], theirs[0]
    )


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mixtral-8x7b", {"step": "decode"}, "no step 'decode' of this kind"),
        ("llama3-8b", {"step": "decode", "optimizer": "lamb"}, "unknown option 'optimizer'"),
        ("llama3-8b", {"step": "prefill", "prompt": 4096}, "prompt=4096 is longer than context"),
        ("llama3-8b", {"step": "decode", "prompt": 4}, "prompt is of prefill"),
        ("gpt2-124m", {"step": "decode", "context": 4096}, "longer than max_positions=1024"),
    ],
)
def test_options_that_disagree_are_refused(name: str, changes: Any, reason: str) -> None:
    with pytest.raises(sw.InputError, match=reason):
        build(name, **changes)


def test_int8_weights_are_read_as_bytes_in_the_price_of_a_step() -> None:
    """Of the output projection 4096 x 32768, v5e reads 134 MB in int8 and 268 MB in bf16."""
    seconds = {}
    for weights in ("bfloat16", "int8"):
        model = build(
            "llama3-8b", layers=1, vocab=32768, step="decode", batch=8, context=16, weights=weights
        )
        plan = sw.plan(
            model.step, *model.example_args, topology="v5e:1x1", mesh={"x": 1},
            donate_argnums=model.donate_argnums, time_limit_s=2,
        )  # fmt: skip
        seconds[weights] = plan.estimate.compute_time_s
    # All matrices but the embedding: attention 41.9 M, feed-forward 176.2 M, output 134.2 M.
    saved = 352.3e6 / 819e9
    assert seconds["bfloat16"] - seconds["int8"] == pytest.approx(saved, rel=0.3)
