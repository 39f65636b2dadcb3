"""DLRM: the published sizes, rows updated in place, tables cut where a device cannot hold them."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.models import build, dlrm
from shardwright.models.options import DlrmOptions

SMALL: dict[str, Any] = {
    "batch": 16, "features": 5, "tables": (64, 24, 3), "width": 8, "bottom": (16, 8),
    "top": (16, 1), "row_multiple": 8, "compute_dtype": "float32",
}  # fmt: skip


def test_networks_and_tables_are_as_large_as_mlperf_s() -> None:
    """MLPerf's reference: 187.8 million rows of 128, and 2.4 million weights in the networks."""
    options = build("dlrm").options
    assert isinstance(options, DlrmOptions)
    assert sum(options.tables) == pytest.approx(187.77e6, rel=1e-4)
    assert sum(options.table_rows) == pytest.approx(sum(options.tables), rel=1e-3)
    assert options.joined == 479
    networks = [13, 512, 256, 128], [479, 1024, 1024, 512, 256, 1]
    weights = sum((a + 1) * b for n in networks for a, b in itertools.pairwise(n))
    assert build("dlrm").parameter_count == 128 * sum(options.table_rows) + weights


def test_pairs_of_vectors_interact_by_their_dot_products() -> None:
    options = DlrmOptions(**SMALL)
    params = dlrm.init_params(options, jax.random.key(0))
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((16, 8)).astype(np.float32) for _ in range(3)]
    features = rng.standard_normal((16, 5)).astype(np.float32)
    ours = dlrm.apply(options, params, [jnp.asarray(r) for r in rows], jnp.asarray(features))
    x = features
    for layer in params["bottom"]:
        x = np.maximum(x @ np.asarray(layer["w"]) + np.asarray(layer["b"]), 0)
    vectors = [x, *rows]
    pairs = [np.sum(vectors[i] * vectors[j], -1) for i in range(4) for j in range(i)]
    x = np.concatenate([x, np.stack(pairs, 1)], axis=1)
    first, last = params["top"]
    x = np.maximum(x @ np.asarray(first["w"]) + np.asarray(first["b"]), 0)
    np.testing.assert_allclose(
        ours, (x @ np.asarray(last["w"]) + np.asarray(last["b"]))[:, 0], rtol=1e-4, atol=1e-4
    )


def test_rows_updated_in_place_are_sgd_on_the_whole_table() -> None:
    model = build("dlrm", **SMALL)
    options: Any = model.options
    state, batch = model.init(0), model.make_batch(0)
    # Two examples that name one row both count.
    batch["categories"] = batch["categories"].at[1].set(batch["categories"][0])

    def loss(tables: list[jax.Array]) -> jax.Array:
        params = state["params"]
        rows = dlrm.look_up(tables, batch["categories"])
        logits = dlrm.apply(options, params, rows, batch["features"])
        labels = batch["labels"].astype(jnp.float32)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))

    gradients = jax.grad(loss)(state["params"]["tables"])
    new, _ = jax.jit(model.train_step)(state, batch)
    for table, gradient, updated in zip(
        state["params"]["tables"], gradients, new["params"]["tables"], strict=True
    ):
        expected = table - options.learning_rate * gradient
        np.testing.assert_allclose(updated, expected, rtol=1e-5, atol=1e-6)


def test_tables_are_cut_where_a_device_cannot_hold_them_and_numbers_are_those_of_one() -> None:
    """Twelve megabytes of tables, and eight for each of eight devices."""
    options = SMALL | {"tables": (16384, 8192, 5), "width": 128, "bottom": (16, 128), "batch": 64}
    model = build("dlrm", **options)
    plan = sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", donate_argnums=(0,),
        memory_fraction=8e6 / 17.2e9, time_limit_s=3,
    )  # fmt: skip
    specs = {t.path: t.spec for t in plan.data.program.inputs}
    assert any(specs["[0]['params']['tables'][0]"])
    state, alone, batch = model.init(0), model.init(0), model.make_batch(0)
    step = plan.jit(model.train_step)
    for _ in range(2):
        state, metrics = step(state, batch)
        alone, expected = jax.jit(model.train_step)(alone, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("bottom", (16, 4), "must end in width=8"),
        ("top", (16, 2), "must end in 1"),
        ("microbatches", 2, "microbatches are not for tables"),
    ],
)
def test_options_that_disagree_are_refused(option: str, value: Any, reason: str) -> None:
    with pytest.raises(sw.InputError, match=reason):
        build("dlrm", **SMALL | {option: value})
