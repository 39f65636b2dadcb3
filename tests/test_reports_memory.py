"""Memory over the step: a step function of buffers by kind, and what plans keep of it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright.cost_models.memory import Buffer, memory_over_time, peak_memory

buffers = st.lists(
    st.builds(
        lambda start, length, nbytes, kind: Buffer("b", start, start + length, nbytes, kind),
        st.integers(0, 400),
        st.integers(0, 50),
        st.integers(1, 1000),
        st.sampled_from(["state", "temporary"]),
    ),
    max_size=300,
)


def held_at(time: int, of: list[Buffer], kind: str) -> float:
    return sum(b.nbytes for b in of if b.kind == kind and b.start <= time < b.end)


@given(buffers, st.integers(4, 40))
def test_every_point_is_the_sum_of_the_buffers_alive_there(of: list[Buffer], most: int) -> None:
    over = memory_over_time(of, most)
    for kind, row in over.by_kind.items():
        assert list(row) == [held_at(time, of, kind) for time in over.times]


@given(buffers, st.integers(4, 40))
def test_thinning_keeps_the_peak_and_the_number_of_points(of: list[Buffer], most: int) -> None:
    over = memory_over_time(of, most)
    assert len(over.times) <= most
    totals = [sum(row) for row in zip(*over.by_kind.values(), strict=True)]
    peak = peak_memory(of)
    assert max(totals, default=0.0) == peak.bytes
    assert peak.time in over.times or not over.times


def test_few_points_are_all_kept() -> None:
    over = memory_over_time([Buffer("a", 0, 9, 8, "state"), Buffer("b", 2, 5, 4, "temporary")], 10)
    assert over.times == (0, 2, 5, 9)
    assert over.by_kind == {"state": (8, 8, 8, 0), "temporary": (0, 4, 0, 0)}


WIDTH, LAYERS, BATCH = 256, 3, 512


def scanned_step(weights: jax.Array, x: jax.Array) -> jax.Array:
    def loss(weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    return weights - 0.1 * jax.grad(loss)(weights)


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(
        scanned_step,
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
        topology="v5e:2x2",
        donate_argnums=(0,),
        mesh={"data": 4},
        name="scanned",
        tokens_per_step=BATCH,
    )


def test_a_plan_keeps_memory_over_the_step_with_its_peak(plan: sw.Plan) -> None:
    memory = plan.estimate.memory
    assert memory is not None
    totals = np.sum([row for row in memory.nbytes.values()], axis=0)
    assert totals.max() == plan.estimate.peak_memory_bytes
    assert len(memory.source_of) == len(memory.positions) == len(totals)
    assert memory.positions[-1] <= memory.operations + 1


def test_donated_state_is_told_from_inputs_and_from_what_the_loop_stacks(plan: sw.Plan) -> None:
    memory = plan.estimate.memory
    assert memory is not None
    weights, inputs = plan.data.program.inputs
    parts = {t.path: 4 if any(t.spec) else 1 for t in (weights, inputs)}
    assert set(memory.nbytes["state"][:-1]) == {LAYERS * WIDTH**2 * 4 // parts[weights.path]}
    assert set(memory.nbytes["input"][:-1]) == {BATCH * WIDTH * 4 // parts[inputs.path]}
    # The forward pass saves the activations of every layer for the backward pass.
    saved = LAYERS * BATCH * WIDTH * 4 / 4
    assert max(memory.nbytes["loop"]) >= saved


def test_loops_are_spans_with_their_trips_and_source(plan: sw.Plan) -> None:
    memory = plan.estimate.memory
    assert memory is not None
    assert [loop.trips for loop in memory.loops] == [LAYERS, LAYERS]
    assert all(0 <= loop.first < loop.last <= memory.operations for loop in memory.loops)
    assert all("test_reports_memory.py" in loop.source for loop in memory.loops)


def test_compute_by_source_line_adds_up_to_the_compute_time(plan: sw.Plan) -> None:
    lines = plan.estimate.compute
    assert sum(line.seconds for line in lines) == pytest.approx(plan.estimate.compute_time_s)
    assert [line.seconds for line in lines] == sorted((x.seconds for x in lines), reverse=True)


def test_a_plan_keeps_the_name_and_the_tokens_it_was_given(plan: sw.Plan) -> None:
    assert plan.data.program.name == "scanned"
    assert plan.data.program.tokens_per_step == BATCH


def test_plans_of_older_versions_load_without_what_they_lack(plan: sw.Plan) -> None:
    old = json.loads(plan.to_json())
    for key in ("memory", "compute"):
        del old["estimate"][key]
    for buffer in old["estimate"]["peak_buffers"]:
        del buffer["kind"]
    del old["program"]["tokens_per_step"]
    loaded = sw.Plan.from_json(json.dumps(old))
    assert loaded.estimate.memory is None
    assert loaded.estimate.compute == []
    assert loaded.data.program.tokens_per_step is None
