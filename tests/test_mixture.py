"""Mixtures of experts: routed as the papers say, of the papers' sizes, planned with all-to-alls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.models import build, mixture
from shardwright.models.transformer_options import MixtureOptions

SMALL: dict[str, Any] = {
    "batch": 2, "layers": 2, "d_model": 8, "heads": 2, "d_ff": 16, "vocab": 32, "sequence": 12,
    "experts": 4, "compute_dtype": "float32", "capacity_factor": 100.0,
}  # fmt: skip


def gates_of(choices: list[list[float]]) -> jax.Array:
    """Gates of one sequence."""
    return jnp.asarray([choices], jnp.float32)


def routed(choices: list[list[float]], **options: Any) -> tuple[np.ndarray, np.ndarray, float]:
    given = SMALL | {"sequence": len(choices), "experts": len(choices[0])} | options
    slots, weights, balance = mixture.route(gates_of(choices), MixtureOptions(**given))
    return np.asarray(slots[0]), np.asarray(weights[0]), float(balance)


@pytest.mark.parametrize("per_token", [1, 2, 3])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_a_mixture_is_the_weighted_sum_of_each_tokens_best_experts(
    per_token: int, mlp: str
) -> None:
    options = MixtureOptions(**SMALL, experts_per_token=per_token, mlp=mlp)
    params = mixture.init_params(options, jax.random.key(0))
    weights = jax.tree.map(lambda w: 20 * w[0], params["layers"]["mixed"]["experts"])
    y = jax.random.normal(jax.random.key(1), (2, 12, 8))
    ours, _ = mixture.mix(options, weights, y)

    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    for b, s in np.ndindex(2, 12):
        x = np.asarray(y[b, s], np.float64)
        logits = x @ w["router"]
        gates = np.exp(logits - logits.max())
        gates /= gates.sum()
        best = np.argsort(-gates)[:per_token]
        total = gates[best].sum() if per_token > 1 else 1.0
        expected = np.zeros(8)
        for e in best:
            up = x @ w["routed"]["w_up"][e]
            if mlp == "swiglu":
                gate = x @ w["routed"]["w_gate"][e]
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                hidden = np.asarray(jax.nn.gelu(up))
            expected += gates[e] / total * (hidden @ w["routed"]["w_down"][e])
        np.testing.assert_allclose(ours[b, s], expected, rtol=1e-4, atol=1e-5)


def test_tokens_beyond_an_experts_capacity_are_dropped_in_order() -> None:
    """Four tokens, two experts, one choice, factor 1: two slots each; three want expert 0."""
    slots, weights, _ = routed(
        [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]], experts_per_token=1, capacity_factor=1.0
    )
    assert slots.shape == (4, 2, 2)
    assert [np.argwhere(token).tolist() for token in slots] == [[[0, 0]], [[0, 1]], [], [[1, 0]]]
    # One choice keeps its gate as it is (Switch), and a dropped token adds nothing.
    np.testing.assert_allclose(weights.sum((1, 2)), [0.9, 0.8, 0.0, 0.6], rtol=1e-6)


def test_first_choices_take_slots_before_second_ones() -> None:
    """Token 0 wants expert 1 second, tokens 1 and 2 want it first; it has two slots."""
    slots, weights, _ = routed(
        [[0.6, 0.4, 0.0], [0.0, 0.9, 0.1], [0.0, 0.8, 0.2]],
        experts_per_token=2, capacity_factor=1.0,
    )  # fmt: skip
    assert slots.shape == (3, 3, 2)
    assert slots[:, 1].sum(-1).tolist() == [0.0, 1.0, 1.0]
    # The gates of the two choices were made to sum to one before one of them was dropped.
    np.testing.assert_allclose(weights.sum((1, 2)), [0.6, 1.0, 1.0], rtol=1e-6)


def test_balance_is_one_where_all_experts_get_the_same_and_more_where_not() -> None:
    """Switch Transformers, section 2.2: the minimum, 1, is under uniform routing."""
    even = [[0.7, 0.3], [0.3, 0.7]]
    assert routed(even, experts_per_token=1)[2] == pytest.approx(1.0)
    assert routed([[0.7, 0.3], [0.7, 0.3]], experts_per_token=1)[2] == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("name", "billions", "off"),
    [
        # GShard, table 1; its vocabulary is not told.
        ("gshard-37b", 37, 0.07),
        ("gshard-150b", 150, 0.05),
        ("gshard-600b", 600, 0.05),
        # Switch Transformers, table 9.
        ("switch-base", 7.4, 0.01),
        # GLaM, table 4: 1.2T; NVIDIA/JAX-Toolbox counts 1.14T.
        ("glam-64b-64e", 1140, 0.02),
        # Mixtral of Experts, section 1: 47B.
        ("mixtral-8x7b", 46.7, 0.001),
        # DeepSeekMoE, section 5.1.2: 16.4B, whose first layer is dense.
        ("deepseek-moe-16b", 16.4, 0.04),
    ],
)
def test_presets_have_the_published_number_of_parameters(
    name: str, billions: float, off: float
) -> None:
    assert build(name).parameter_count == pytest.approx(billions * 1e9, rel=off)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("experts_per_token", 9, "experts_per_token=9 is more than"),
        ("layers_per_block", 5, "layers_per_block=5 does not divide"),
        ("capacity_factor", 0, "greater than 0"),
    ],
)
def test_options_that_disagree_are_refused(option: str, value: Any, reason: str) -> None:
    with pytest.raises(sw.InputError, match=reason):
        build("mixtral-8x7b", **{option: value})


def test_experts_are_cut_over_all_devices_and_tokens_sent_by_all_to_all() -> None:
    """GShard, section 3.2: experts and groups over the same devices, an all-to-all between."""
    model = build(
        "gshard-37b", layers=4, experts=32, vocab=1024, batch=32, sequence=256, d_model=512,
        d_ff=4096, head_dim=64, heads=8,
    )  # fmt: skip
    plan = sw.plan(
        model.train_step, *model.example_args, topology="v3:4x4", mesh={"expert": 32},
        donate_argnums=model.donate_argnums,
    )  # fmt: skip
    specs = {tensor.path: tensor.spec for tensor in plan.data.program.inputs}
    experts = "[0]['params']['layers']['mixed']['experts']['routed']"
    assert specs[f"{experts}['w_up']"][1] == ["expert"]
    assert specs[f"{experts}['w_down']"][1] == ["expert"]
    # Two layers mix; dispatch and combination, forward, recomputed and backward.
    exchanges = [c for c in plan.estimate.collectives if c.kind == "all_to_all"]
    assert sum(c.count for c in exchanges) >= 2 * 4


def test_memory_a_device_is_constant_as_experts_grow_with_devices() -> None:
    """GShard, section 4.4: as many experts, and as many sequences, as devices."""
    peaks = []
    for topology, devices in (("v3:2x2", 8), ("v3:4x4", 32)):
        model = build(
            "gshard-37b", layers=2, experts=devices, vocab=1024, batch=2 * devices, sequence=256,
            d_model=512, d_ff=4096, head_dim=64, heads=8,
        )  # fmt: skip
        plan = sw.plan(
            model.train_step, *model.example_args, topology=topology, mesh={"expert": devices},
            donate_argnums=model.donate_argnums, time_limit_s=3,
        )  # fmt: skip
        peaks.append(plan.estimate.peak_memory_bytes)
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({"capacity_factor": 1.0}, P("expert")),
        ({"shared_experts": 2, "expert_d_ff": 8}, P("expert")),
        ({"dispatch": "dropless"}, P(None, None, "expert")),
    ],
    ids=["tokens dropped", "shared experts", "dropless"],
)
def test_gradients_of_a_mixture_that_is_cut_are_those_of_one_device(
    options: dict[str, Any], spec: P
) -> None:
    given = MixtureOptions(**SMALL | options | {"batch": 8, "sequence": 8})
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(
        lambda: mixture.init_params(given, jax.random.key(0))["layers"]["mixed"]["experts"]
    )
    weights = jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape[1:]).astype(x.dtype), shapes)
    y = rng.normal(size=(8, 8, 8)).astype(np.float32)

    def step(weights: Any, y: jax.Array) -> Any:
        def loss(weights: Any, y: jax.Array) -> jax.Array:
            made, balance = mixture.mix(given, weights, y)
            return jnp.sum(jnp.sin(made)) + balance

        return jax.value_and_grad(loss, argnums=(0, 1))(weights, y)

    plan = sw.plan(
        step, weights, y, topology="v5e:2x4", mesh={"data": 2, "expert": 4}, time_limit_s=2,
        pinned={"[1]": P("data"), "[0]['routed']['w_up']": spec},
    )  # fmt: skip
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        plan.jit(step)(weights, y), jax.jit(step)(weights, y),
    )  # fmt: skip
