"""The search over meshes: its order, what it rules out, and the plans that it keeps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.hardware_profiles.mesh import LogicalMesh, enumerate_meshes
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.models import build
from shardwright.planner.certificate import certificate
from shardwright.planner.mesh_order import GoodMeshes, aligned_first, splits
from shardwright.planner.mesh_solution import Candidate, RuledOut, solve_mesh
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.search import Considered, Progress, search_meshes

TOPOLOGY = "v5e:4x4"
MEMORY = 15e9


def mesh_of(shape: tuple[int, ...], layout: str) -> LogicalMesh:
    """The mesh with these axis sizes whose layout is described so."""
    return next(
        m
        for m in enumerate_meshes(parse_slice(TOPOLOGY), 3)
        if tuple(m.shape.values()) == shape and layout in m.describe()
    )


WHOLE = mesh_of((16,), "")
SQUARE = mesh_of((4, 4), "x=4 on x, y=4 on y")
SPLIT = mesh_of((2, 2, 4), "x_outer=2 on x")


def test_a_mesh_splits_what_its_axes_make_up() -> None:
    assert splits(SQUARE, WHOLE) and splits(SPLIT, SQUARE) and splits(SPLIT, WHOLE)


def test_a_mesh_does_not_split_itself_nor_what_is_finer() -> None:
    assert not splits(SQUARE, SQUARE)
    assert not splits(SQUARE, SPLIT)


def test_a_mesh_does_not_split_another_way_round_the_torus() -> None:
    # x_outer and y together with x_inner alone is no union of x and y.
    other = mesh_of((8, 2), "x_outer_y=8")
    assert splits(SPLIT, other)
    assert not splits(SQUARE, other) and not splits(other, SQUARE)


def test_meshes_that_cut_a_divided_dimension_whole_come_first() -> None:
    """Batch norm over groups: 64 images in 8 groups of 8, over 16 devices by axes of 8 and 2."""

    def centred(x: jax.Array) -> jax.Array:
        groups = x.reshape(8, 8, 32)
        return (groups - groups.mean(1, keepdims=True)).reshape(x.shape)

    kinds = prepare(sw.Program.trace(centred, jnp.ones((64, 32)))).skeleton.kinds
    meshes = [m for m in enumerate_meshes(parse_slice(TOPOLOGY), 3) if len(m.axes) < 3]
    ordered = aligned_first(meshes, kinds)
    assert sorted(ordered[0].shape.values()) == [2, 8] and len(ordered) == len(meshes)


def test_meshes_of_three_axes_that_split_a_fast_one_come_first() -> None:
    three = [m for m in enumerate_meshes(parse_slice(TOPOLOGY), 3) if len(m.axes) == 3]
    good = GoodMeshes()
    fast = mesh_of((8, 2), "x_outer_y=8")
    good.note(SQUARE, 2.0)
    good.note(fast, 1.0)
    chosen = good.next_of(three)
    assert splits(chosen, fast)


@pytest.fixture(scope="module")
def two_layers() -> Prepared:
    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.square(jax.nn.relu(x @ weights[0]) @ weights[1]).mean()

    def step(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    weights = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 16384), (16384, 4096)))
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    return prepare(sw.Program.trace(step, weights, x, donate_argnums=0))


def test_no_mesh_that_was_ruled_out_has_a_better_plan(two_layers: Prepared) -> None:
    # Every mesh ruled out is solved to the end, which the search itself never does.
    told: list[Progress] = []
    meshes = [m for m in enumerate_meshes(parse_slice(TOPOLOGY), 3) if len(m.axes) < 3]
    found = search_meshes(
        two_layers,
        meshes,
        MEMORY,
        fixed_on=lambda mesh: {},
        time_limit_s=120,
        seed=0,
        on_progress=told.append,
    )
    best = found.best.evaluation.step_s
    out = [c for c in found.considered if c.status.startswith("ruled out")]
    assert out
    for considered in out:
        solved = solve_mesh(
            two_layers, two_layers.problem(considered.mesh), MEMORY, 60, seed=0, gap=1e-4
        )
        assert isinstance(solved, Candidate)
        assert solved.evaluation.step_s >= best * (1 - 0.004)
    assert [c.mesh for c in found.considered] == meshes
    assert any("ruled out" in progress.message for progress in told)


def test_bounds_are_compared_with_what_the_integer_program_says_of_the_best_plan() -> None:
    """It prices convolutions with halos 4 % above the partitioned program."""
    model = build("unet-2d", image=512, batch=8, filters=((64, 64), (128, 128)))
    prepared = prepare(sw.Program.trace(model.step, *model.example_args, donate_argnums=0))
    meshes = [m for m in enumerate_meshes(parse_slice("v3:4x4"), 2) if len(m.axes) == 2]
    solved = [
        solve_mesh(prepared, prepared.problem(mesh), MEMORY, 20, seed=0, gap=1e-3)
        for mesh in meshes[:4]
    ]
    steps = [s.evaluation.step_s for s in solved if isinstance(s, Candidate)]
    assert min(steps) < 0.99 * steps[0]
    found = search_meshes(
        prepared, [meshes[0], meshes[steps.index(min(steps))]], MEMORY,
        fixed_on=lambda mesh: {}, time_limit_s=60, seed=0, on_progress=lambda told: None,
    )  # fmt: skip
    assert found.best.evaluation.step_s == pytest.approx(min(steps), rel=0.002)


def test_plans_on_other_meshes_are_kept_fastest_first(two_layers: Prepared) -> None:
    meshes = [WHOLE, SQUARE, mesh_of((8, 2), "x_outer_y=8")]
    found = search_meshes(
        two_layers,
        meshes,
        MEMORY,
        fixed_on=lambda mesh: {},
        time_limit_s=120,
        seed=0,
        on_progress=lambda progress: None,
    )
    steps = [c.evaluation.step_s for c in found.others]
    assert steps == sorted(steps)
    assert found.best.problem.mesh not in [c.problem.mesh for c in found.others]


def test_a_mesh_is_ruled_out_by_a_bound_above_the_cutoff(two_layers: Prepared) -> None:
    problem = two_layers.problem(SQUARE)
    solved = solve_mesh(two_layers, problem, MEMORY, 60, seed=0, gap=1e-4)
    assert isinstance(solved, Candidate)
    step = solved.evaluation.step_s
    ruled_out = solve_mesh(two_layers, problem, MEMORY, 60, seed=0, gap=1e-4, cutoff=0.5 * step)
    assert isinstance(ruled_out, RuledOut)
    assert 0.5 * step <= ruled_out.bound_s <= step


def test_a_certificate_says_what_is_proven_and_what_is_open(two_layers: Prepared) -> None:
    meshes = [SQUARE, WHOLE]
    found = search_meshes(
        two_layers,
        meshes,
        MEMORY,
        fixed_on=lambda mesh: {},
        time_limit_s=120,
        seed=0,
        on_progress=lambda progress: None,
    )
    told = certificate(found)
    assert "on the mesh 4 x 4 takes less than" in told or "on the mesh 16 takes less than" in told
    assert "Of 2 meshes: " in told
    assert told.startswith("Optimal") or "takes longer by the schedule than this plan" in told
    assert "longer time limit" not in told
    considered = (*found.considered, Considered(SPLIT, "not tried: out of time"))
    told = certificate(replace(found, considered=considered))
    assert "Of 3 meshes: 1 not tried" in told and "try the other meshes" in told
