"""Weights that products cast inside them, as the integer program and the evaluation price them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.mesh_solution import evaluate_choices
from shardwright.planner.prepared import prepare
from shardwright.planner.pricing import build_problem
from shardwright.planner.solver import Solution, evaluate

MESH = {"data": 4, "model": 2}
W = jax.ShapeDtypeStruct((2048, 8192), jnp.float32)
NARROW = jax.ShapeDtypeStruct(W.shape, jnp.bfloat16)


def product(w: Any, x: Any) -> Any:
    return x @ w.astype(jnp.bfloat16)


def planned(rows: int, w: Any = W) -> sw.Plan:
    x = jax.ShapeDtypeStruct((rows, 2048), jnp.bfloat16)
    pins = {"[0]": P(None, "model"), "[1]": P("data"), "result": P("data", "model")}
    return sw.plan(product, w, x, topology="v5e:2x4", mesh=MESH, pinned=pins)


@pytest.mark.parametrize("seed", range(4))
def test_the_integer_program_knows_what_casting_inside_a_product_takes(seed: int) -> None:
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    prepared = prepare(sw.Program.trace(product, W, x))
    mesh = meshes_for_shape(parse_slice("v5e:2x4"), MESH)[0]
    problem = build_problem(prepared.nodes, prepared.fusions, prepared.buffers, mesh)
    (cast,) = (transfer.a for transfer in problem.transfers if transfer.compute is not None)
    rows, argument = problem.strategies, prepared.nodes.argument_nodes[0]
    assert np.array_equal(rows[argument], rows[cast])
    rng = np.random.default_rng(seed)
    for _ in range(8):
        picked = [int(rng.integers(len(of_node))) for of_node in rows]
        # An argument that is moved before its cast is moved cast.
        picked[argument] = picked[cast]
        choices = tuple(picked)
        told = evaluate(problem.weighed(0.5, 1e12), choices)
        solution = Solution(choices, told.cost, told.cost, 0.0, "feasible", 0.0, told.peak, None)
        evaluation = evaluate_choices(prepared, problem, solution).evaluation
        assert problem.seconds(choices)[0] == pytest.approx(evaluation.compute_s, rel=1e-6)


def test_a_product_waits_for_each_reading_of_what_it_casts() -> None:
    cast, as_it_is = (planned(8192, w).estimate.compute_time_s for w in (W, NARROW))
    # 2048 rows a device in blocks of 1024 read 2048 x 4096 of f32 twice, at the 819 GB/s of HBM
    # and the 0.81 of it that the compiler counts on.
    assert cast - as_it_is == pytest.approx(2 * 33.55e6 / (819e9 * 0.81), rel=0.05)


def test_a_weight_that_would_be_cast_many_times_over_is_cut_cast_and_gathered() -> None:
    plan = planned(65536)
    # Sixteen readings would take 0.81 ms; three quarters of 16.8 MB over two links 0.28 ms.
    gathers = [c for c in plan.estimate.collectives if c.kind == "all_gather"]
    assert [c.axes for c in gathers] == [["data"]]
