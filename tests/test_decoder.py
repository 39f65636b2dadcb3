"""The decoder's mathematics, against independent formulas, at toy sizes in float32."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.models import build, decoder, positions
from shardwright.planner.tracing import mesh_context

# Tiny programs: compiling costs more than running.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

TINY = {
    "layers": 2,
    "d_model": 32,
    "heads": 4,
    "d_ff": 48,
    "vocab": 64,
    "batch": 2,
    "sequence": 16,
    "compute_dtype": "float32",
}


def tiny(name="llama3-8b", **options):
    kv_heads = {"kv_heads": 2} if name.startswith("llama3") else {}
    return build(name, **TINY | kv_heads | options)


@functools.cache
def params_and_batch(name="llama3-8b"):
    model = tiny(name)
    return jax.device_get((model.init(0)["params"], model.make_batch(0)))


def unstacked(params):
    first, second = (jax.tree.map(operator.itemgetter(i), params["layers"]) for i in (0, 1))
    return params | {"layers": [first, second]}


def loss_and_grads(model, params, batch):
    loss = functools.partial(decoder.loss, model.options)
    value, grads = quick_jit(jax.value_and_grad(loss))(params, batch)
    return float(value), jax.device_get(grads)


def logits(model, params, tokens):
    return np.asarray(quick_jit(functools.partial(decoder.apply, model.options))(params, tokens))


def assert_trees_close(actual, expected, rtol=1e-4, atol=1e-6):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), actual, expected
    )


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-124m"])
def test_loss_falls_on_a_repeated_batch(name):
    model = tiny(name, compute_dtype="bfloat16", learning_rate=1e-2)
    step = quick_jit(model.train_step, donate_argnums=model.donate_argnums)
    state, batch = model.init(0), model.make_batch(0)
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    # An untrained model guesses among 64 tokens alike: a loss of ln 64 = 4.16.
    assert losses[0] == pytest.approx(np.log(64), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]
    assert int(state["step"]) == 20


def test_concrete_arguments_have_the_shapes_of_the_example_arguments():
    model = tiny()
    concrete = jax.eval_shape(lambda: (model.init(0), model.make_batch(0)))
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: a.shape == b.shape and a.dtype == b.dtype, concrete, model.example_args
        )
    )


def test_a_scanned_model_equals_the_unrolled_one():
    params, batch = params_and_batch()
    loss, grads = loss_and_grads(tiny(scan_layers=True), params, batch)
    unrolled_loss, unrolled_grads = loss_and_grads(
        tiny(scan_layers=False), unstacked(params), batch
    )
    assert loss == pytest.approx(unrolled_loss, rel=1e-6)
    assert_trees_close(unstacked(grads), unrolled_grads)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_remat_changes_no_gradient(scan_layers):
    params, batch = params_and_batch()
    params = params if scan_layers else unstacked(params)
    loss, grads = loss_and_grads(tiny(remat="none", scan_layers=scan_layers), params, batch)
    for remat in ("full", "dots"):
        model = tiny(remat=remat, scan_layers=scan_layers)
        remat_loss, remat_grads = loss_and_grads(model, params, batch)
        assert remat_loss == pytest.approx(loss, rel=1e-6)
        assert_trees_close(remat_grads, grads)


def test_attention_is_that_of_a_loop_over_heads_and_positions():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 5, 4, 6))
    k, v = rng.normal(size=(2, 2, 5, 2, 6))
    expected = np.zeros_like(q)
    for b, t, h in np.ndindex(2, 5, 4):
        scores = np.array([q[b, t, h] @ k[b, s, h // 2] for s in range(t + 1)]) / np.sqrt(6)
        weights = np.exp(scores) / np.exp(scores).sum()
        expected[b, t, h] = sum(weights[s] * v[b, s, h // 2] for s in range(t + 1))
    actual = decoder.dot_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_grouped_queries_equal_multi_head_attention_with_repeated_key_heads():
    params, batch = params_and_batch()
    layers = params["layers"]
    repeated = layers | {name: np.repeat(layers[name], 2, axis=2) for name in ("wk", "wv")}
    np.testing.assert_allclose(
        logits(tiny(kv_heads=2), params, batch["tokens"]),
        logits(tiny(kv_heads=4), params | {"layers": repeated}, batch["tokens"]),
        rtol=1e-4,
        atol=1e-5,
    )


def test_rope_multiplies_complex_pairs_by_unit_numbers():
    # RoFormer, equation 14: with pairs as complex numbers, position m turns pair i by
    # exp(j m theta^(-2i/d)).
    x = np.random.default_rng(0).normal(size=(1, 7, 2, 8))
    pairs = x[..., :4] + 1j * x[..., 4:]
    turn = np.exp(1j * np.outer(np.arange(7), 100.0 ** (-2 * np.arange(4) / 8)))
    turned = pairs * turn[:, None, :]
    actual = positions.apply_rope(
        jnp.asarray(x, jnp.float32), positions.rope_tables(jnp.arange(7), 8, 100.0)
    )
    np.testing.assert_allclose(actual, np.concatenate([turned.real, turned.imag], -1), atol=1e-5)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-124m"])
def test_a_later_token_changes_no_earlier_logits(name):
    params, batch = params_and_batch(name)
    changed = batch["tokens"].copy()
    changed[:, 10] = (changed[:, 10] + 1) % 64
    before, after = (logits(tiny(name), params, tokens) for tokens in (batch["tokens"], changed))
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert np.all(np.abs(before - after)[:, 10:].max(axis=-1) > 0)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-124m"])
def test_the_order_of_earlier_tokens_matters(name):
    params, batch = params_and_batch(name)
    swapped = batch["tokens"].copy()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    before, after = (logits(tiny(name), params, tokens) for tokens in (batch["tokens"], swapped))
    assert np.abs(before - after)[:, -1].max() > 1e-5


def test_gpt2_layer_norm_is_that_of_the_formula():
    rng = np.random.default_rng(0)
    x, scale, bias = rng.normal(size=(2, 3, 32)), rng.normal(size=32), rng.normal(size=32)
    variance = ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + 1e-5) * scale + bias
    weights = {"final_norm": jnp.asarray(scale), "final_norm_bias": jnp.asarray(bias)}
    options = tiny("gpt2-124m").options
    actual = decoder.normalize(options, weights, "final_norm", jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scan_layers", "constraints"), [(False, 3), (True, 2)])
def test_the_residual_stream_is_constrained_after_the_embedding_and_each_layer(
    scan_layers, constraints
):
    # Two layers; in a scan both are written once.
    model = tiny(residual_axes=("data", None, ("model",)), scan_layers=scan_layers)
    params, batch = model.example_args[0]["params"], model.example_args[1]
    with mesh_context({"data": 2, "model": 4}):
        forward = jax.jit(functools.partial(decoder.apply, model.options))
        text = forward.trace(params, batch["tokens"]).lower().as_text()
    lines = [line for line in text.splitlines() if "sdy.sharding_constraint" in line]
    assert len(lines) == constraints
    for line in lines:
        assert '[{"data"}, {}, {"model"}]' in line
        assert "tensor<2x16x32xf32>" in line


def test_constraining_the_residual_stream_changes_no_logits():
    params, batch = params_and_batch()
    free = logits(tiny(), params, batch["tokens"])
    with mesh_context({"data": 1}):
        constrained = logits(tiny(residual_axes=("data", None, None)), params, batch["tokens"])
    np.testing.assert_array_equal(constrained, free)
