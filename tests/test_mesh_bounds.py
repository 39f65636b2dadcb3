"""The quick bound of a mesh against the integer program solved to its optimum."""

from dataclasses import replace
from math import inf

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.hardware_profiles.mesh import LogicalMesh, meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner import prepared
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.problem import LEAST_WEIGHT
from shardwright.planner.solver import solve
from shardwright.planner.solver.ties import tie

MESHES = [
    meshes_for_shape(parse_slice("v5e:4x4"), shape)[0] for shape in ({"x": 4, "y": 4}, {"all": 16})
]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def train_step_of(layers: int) -> Prepared:
    """Weights that are cast inside products, and sums along a window, which exchange halos."""

    def loss(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for up, down in weights:
            hidden = jax.nn.relu(x @ up.astype(jnp.bfloat16)) @ down.astype(jnp.bfloat16)
            x = x + jax.lax.reduce_window(hidden, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME")
        return jnp.square(x).mean()

    def step(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> object:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    weights = [(f32(1024, 4096), f32(4096, 1024))] * layers
    return prepare(sw.Program.trace(step, weights, x, donate_argnums=0))


@pytest.fixture(scope="module")
def shallow() -> Prepared:
    return train_step_of(2)


def least_cost(of: Prepared, mesh: LogicalMesh) -> float:
    """What the cheapest choices cost where memory is plenty, those of alike nodes alike."""
    problem = of.problem(mesh)
    program = replace(problem.weighed(LEAST_WEIGHT, 0.0), memory=(), memory_limit=None)
    if problem.alike is not None:
        program = tie(program, problem.alike).problem
    return solve(program, gap=1e-9).cost


@pytest.mark.parametrize("mesh", MESHES, ids=["square", "line"])
def test_the_quick_bound_is_what_the_cheapest_choices_cost(
    shallow: Prepared, mesh: LogicalMesh
) -> None:
    bound = shallow.quick_bound(mesh, {}, inf)
    cost = least_cost(shallow, mesh)
    assert 0.95 * cost <= bound <= cost


@pytest.mark.parametrize("mesh", MESHES, ids=["square", "line"])
def test_the_quick_bound_of_many_layers_ties_alike_ones(
    mesh: LogicalMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_MOST_NODES", 10)
    deep = train_step_of(8)
    bound = deep.quick_bound(mesh, {}, inf)
    cost = least_cost(deep, mesh)
    assert 0.95 * cost <= bound <= cost


def test_a_bound_that_reaches_the_cutoff_is_not_improved(shallow: Prepared) -> None:
    best = shallow.quick_bound(MESHES[0], {}, inf)
    assert 0.5 * best <= shallow.quick_bound(MESHES[0], {}, 0.5 * best) <= best


def test_no_cutoff_is_reached_by_more_than_is_proven(shallow: Prepared) -> None:
    best = shallow.quick_bound(MESHES[0], {}, inf)
    assert shallow.quick_bound(MESHES[0], {}, 2.0 * best) < 2.0 * best
