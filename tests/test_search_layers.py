"""Unrolled layers: found by structure, planned tied and then untied."""

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.models.registry import build
from shardwright.planner import prepared
from shardwright.planner.mesh_solution import Candidate, solve_mesh
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.program import Program
from shardwright.planner.repeats import alike_nodes
from shardwright.planner.search import search_meshes

MEMORY = 15e9
MESH = meshes_for_shape(parse_slice("v5e:4x4"), {"x": 4, "y": 4})[0]


def train_step_of(layers: int) -> Prepared:
    """Gradient descent on unrolled pairs of products."""

    def loss(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for up, down in weights:
            x = x + jax.nn.relu(x @ up) @ down
        return jnp.square(x).mean()

    def step(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> object:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    up = jax.ShapeDtypeStruct((2048, 8192), jnp.bfloat16)
    down = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    return prepare(sw.Program.trace(step, [(up, down)] * layers, x, donate_argnums=0))


@pytest.fixture(scope="module")
def deep() -> Prepared:
    return train_step_of(20)


def test_more_layers_have_no_more_classes_of_alike_nodes(deep: Prepared) -> None:
    shallow = train_step_of(14)
    assert max(alike_nodes(deep.skeleton, {})) == max(alike_nodes(shallow.skeleton, {}))
    assert len(deep.skeleton.kind_of) > len(shallow.skeleton.kind_of)


def test_more_layers_have_no_more_kinds_to_price(deep: Prepared) -> None:
    shallow = train_step_of(14)
    for kinds in ("kinds", "kernels", "reshards", "held"):
        assert len(getattr(deep.skeleton, kinds)) == len(getattr(shallow.skeleton, kinds))


def test_nodes_that_are_given_other_strategies_are_not_alike(deep: Prepared) -> None:
    first, second = deep.nodes.argument_nodes[8], deep.nodes.argument_nodes[10]
    free = alike_nodes(deep.skeleton, {})
    assert free[first] == free[second]
    given = alike_nodes(deep.skeleton, {first: (0, None)})
    assert given[first] != given[second]


def test_alike_nodes_share_their_strategies(deep: Prepared) -> None:
    problem = deep.problem(MESH)
    first: dict[int, int] = {}
    for node, c in enumerate(alike_nodes(deep.skeleton, {})):
        other = first.setdefault(c, node)
        assert problem.strategies[node] is problem.strategies[other]


def test_gradients_of_many_layers_are_held_as_they_are_scattered() -> None:
    """What the integer program counts against the exact evaluation, by an optimizer at the end."""
    size = {"batch": 64, "sequence": 64, "d_model": 1024, "heads": 8, "d_ff": 4096, "vocab": 512}
    built = build("gpt2-124m", layers=8, scan_layers=False, **size)
    program = Program.trace(
        built.train_step, *built.example_args, donate_argnums=built.donate_argnums
    )
    unrolled = prepare(program)
    line = meshes_for_shape(parse_slice("v5e:4x4"), {"x": 16})[0]
    solved = solve_mesh(unrolled, unrolled.problem(line), MEMORY, 60, seed=0, gap=1e-2)
    assert isinstance(solved, Candidate)
    counted = solved.problem.peak_memory(solved.solution.choices).bytes
    assert counted == pytest.approx(solved.evaluation.peak.bytes, rel=0.1)


def test_a_large_program_is_planned_within_one_percent(
    deep: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = solve_mesh(deep, deep.problem(MESH), MEMORY, 60, seed=0, gap=1e-4)
    monkeypatch.setattr(prepared, "_MOST_NODES", 10)
    assert deep.problem(MESH).alike is not None
    found = search_meshes(
        deep,
        [MESH],
        MEMORY,
        fixed_on=lambda mesh: {},
        time_limit_s=60,
        seed=0,
        on_progress=lambda progress: None,
    )
    assert isinstance(whole, Candidate)
    assert found.best.solution.gap <= 0.01
    assert found.best.evaluation.step_s <= whole.evaluation.step_s * 1.01
    assert found.best.bound_s <= whole.evaluation.step_s * (1 + 1e-9)
    assert [c.status for c in found.considered] == ["planned"]
