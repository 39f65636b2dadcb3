"""The weight update of a data-parallel step is cut over the replicas, and computes the same.

Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training (2020):
gradients are reduce-scattered, every device updates its part, and new weights are gathered.
"""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.models import build

MESH = {"data": 8}
SIZES: dict[str, Any] = {
    "features": 64, "hidden": 512, "layers": 3, "classes": 64, "batch": 64,
    "compute_dtype": "float32", "learning_rate": 0.01,
}  # fmt: skip
MEMORY = {"momentum": 2.2e6, "lamb": 3.3e6}
"""Bytes a device, less than parameters and moments take whole. LAMB needs norms of arrays."""


@pytest.mark.parametrize("optimizer", MEMORY)
def test_state_and_update_are_cut_where_memory_asks_and_numbers_are_those_of_one(
    optimizer: Any,
) -> None:
    model, memory = build("mlp", **SIZES, optimizer=optimizer), MEMORY[optimizer]
    state_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(model.example_args[0]) if leaf.ndim)
    assert memory < state_bytes
    plan = sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", mesh=MESH,
        donate_argnums=(0,), memory_fraction=memory / 17.2e9, time_limit_s=5,
    )  # fmt: skip
    moments = [
        t
        for t in plan.data.program.inputs
        if "opt_state" in t.path and np.prod(t.shape) > 4096 and any(t.spec)
    ]
    assert moments
    kinds = {c.kind for c in plan.estimate.collectives}
    assert "all_gather" in kinds
    step, state, alone = plan.jit(model.train_step), model.init(0), model.init(0)
    for number in range(2):
        batch = model.make_batch(number)
        state, metrics = step(state, batch)
        alone, expected = jax.jit(model.train_step)(alone, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_plan_takes_no_longer_than_an_update_cut_over_all_replicas() -> None:
    model = build("gpt2-124m", batch=512, vocab=50304)
    arguments: dict[str, Any] = {"topology": "v3:8x8", "donate_argnums": model.donate_argnums}

    def cut(leaf: Any) -> P:
        for dim, size in enumerate(leaf.shape):
            if size % 128 == 0:
                return P(*[None] * dim, "data")
        return P()

    state, batch = model.example_args
    specs = jax.tree.map(lambda leaf: P(), state)
    specs = specs | {"opt_state": jax.tree.map(cut, state["opt_state"])}
    told = build("gpt2-124m", batch=512, vocab=50304, residual_axes=("data", None, None))
    by_hand = sw.evaluate(
        told.train_step, state, batch, mesh={"data": 128},
        in_specs=(specs, jax.tree.map(lambda leaf: P("data"), batch)), **arguments,
    )  # fmt: skip
    plan = sw.plan(model.train_step, state, batch, mesh={"data": 128}, **arguments)
    assert plan.estimate.step_time_s <= by_hand.step_time_s
    assert by_hand.exposed_collective_time_s < 0.2 * by_hand.compute_time_s
