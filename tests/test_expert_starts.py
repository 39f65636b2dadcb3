"""Families of hand-made shardings as choices of the integer program."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner import tied
from shardwright.planner.expert_starts import (
    Family,
    expert_starts,
    families,
    family_rows,
    is_pipelined,
)
from shardwright.planner.prepared import prepare
from shardwright.planner.problem import ShardingProblem
from shardwright.planner.solver import Problem, Solution, evaluate, solve
from shardwright.planner.solver.restricted import restrict_rows

MEMORY = 15e9


def dense(layers: int = 3) -> tuple[Any, Any, Any]:
    """Products with a residual, updated with momentum."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for up, down in weights:
            x = x + jax.nn.relu(x @ up) @ down
        return jnp.square(x).mean()

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        grads = jax.grad(loss)(state["weights"], batch["x"])
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
        return {
            "weights": jax.tree.map(lambda w, m: w - 0.1 * m, state["weights"], moments),
            "moments": moments,
        }

    shapes = [((2048, 8192), (8192, 2048))] * layers
    weights = [tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in pair) for pair in shapes]
    x = jax.ShapeDtypeStruct((8, 1024, 2048), jnp.bfloat16)
    return step, {"weights": weights, "moments": weights}, {"x": x}


def experts() -> tuple[Any, Any, Any]:
    """A mixture of experts with fixed routes."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        up, down = weights
        routed = x.reshape(16, 8, 64, 512).swapaxes(0, 1)
        made = jnp.einsum("ebsd,edf->ebsf", routed, up)
        return jnp.square(jnp.einsum("ebsf,efd->ebsd", jax.nn.relu(made), down)).mean()

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    weights = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 512, 2048), (8, 2048, 512)))
    return step, weights, jax.ShapeDtypeStruct((16, 512, 512), jnp.bfloat16)


def images() -> tuple[Any, Any, Any]:
    """A convolution."""

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        out = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.square(out).mean()

    def step(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return kernel - 0.1 * jax.grad(loss)(kernel, x)

    kernel = jax.ShapeDtypeStruct((3, 3, 128, 128), jnp.bfloat16)
    return step, kernel, jax.ShapeDtypeStruct((8, 64, 64, 128), jnp.bfloat16)


PROGRAMS = {"dense": dense, "experts": experts, "images": images}


def problem_of(name: str) -> tuple[ShardingProblem, Problem]:
    step, *args = PROGRAMS[name]()
    prepared = prepare(sw.Program.trace(step, *args, donate_argnums=0))
    mesh = meshes_for_shape(parse_slice("v5e:2x4"), {"x": 2, "y": 4})[0]
    problem = prepared.problem(mesh)
    return problem, problem.weighed(1e-3, MEMORY)


def of_argument(problem: ShardingProblem, choices: tuple[int, ...], name: str) -> list[int]:
    """The factor of an argument that each mesh axis shards."""
    names = problem.node_graph.graph.argument_names
    node = problem.node_graph.argument_nodes[names.index(name)]
    return [int(factor) for factor in problem.strategies[node][choices[node]]]


def priced(name: str) -> Iterator[tuple[Family, ShardingProblem, tuple[int, ...], float]]:
    problem, program = problem_of(name)
    for family in families(2):
        rows = family_rows(problem, family)
        small = restrict_rows(program, rows)
        found = solve(small.problem, time_limit_s=20)
        assert found.status == "optimal"
        choices = small.lift(found.choices)
        yield family, problem, choices, evaluate(program, choices).cost


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_family_has_a_better_sharding_than_the_plan(name: str) -> None:
    _, program = problem_of(name)
    plan = solve(program, time_limit_s=20)
    costs = {family.name: cost for family, *_, cost in priced(name)}
    assert set(costs) == {
        "FSDP", "data parallel", "tensor parallel", "FSDP x tensor", "expert",
        "sequence or spatial",
    }  # fmt: skip
    assert min(costs.values()) >= plan.cost * (1 - 1e-9)
    # They are not all the same.
    assert len({round(cost / plan.cost, 6) for cost in costs.values()}) > 1


def test_families_cut_what_their_names_say() -> None:
    told: dict[str, list[tuple[list[int], list[int]]]] = {}
    for family, problem, choices, _ in priced("dense"):
        batch = of_argument(problem, choices, "[1]['x']")
        weight = of_argument(problem, choices, "[0]['weights'][0][0]")
        told.setdefault(family.name, []).append((batch, weight))
    assert told["data parallel"] == [([0, 0], [-1, -1])]
    ((batch, weight),) = told["FSDP"]
    assert batch == [0, 0] and weight[0] == weight[1]
    for batch, weight in told["tensor parallel"]:
        data, model = (0, 1) if batch[0] == 0 else (1, 0)
        assert (batch[data], batch[model], weight[data]) == (0, -1, -1)
    for batch, _ in told["sequence or spatial"]:
        assert sorted(batch) == [0, 1]


def test_what_is_not_proven_good_is_no_worse_than_any_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, program = problem_of("dense")
    rng = np.random.default_rng(0)
    poor = tuple(int(rng.integers(len(costs))) for costs in program.costs)

    def only_known(given: Problem, *, warm_starts: Any, **options: Any) -> Solution:
        """A solver that finds nothing by itself."""
        known = [poor, *map(tuple, warm_starts)]
        best = min(known, key=lambda choices: evaluate(given, choices).cost)
        checked = evaluate(given, best)
        return Solution(
            best, checked.cost, 0.0, 1.0, "feasible", 0.0, checked.peak, given.memory_limit
        )

    monkeypatch.setattr(tied, "solve", only_known)
    found = tied.solve_weighed(
        replace(problem, alike=None),
        {loop: 1e-3 for loop in problem.loops},
        MEMORY,
        time_limit_s=200.0,
        seed=0,
        gap=0.0,
        cutoff=float("inf"),
        warm_starts=(),
        untie=False,
    )
    starts = expert_starts(problem, program, None, deadline=time.perf_counter() + 20, seed=0)
    assert len(starts) == len(list(families(2)))
    assert found.cost <= min(evaluate(program, start).cost for start in starts) * (1 + 1e-9)
    assert found.cost < evaluate(program, poor).cost


def pipelined() -> tuple[Any, Any, Any]:
    """Four layers in two stages."""

    def layer(weights: Any, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(x @ weights["up"]) @ weights["down"]

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        out = sw.pipeline(layer, weights, x, stages=2, microbatches=4, remat=True)
        return jnp.square(out).mean()

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    shapes = {"up": (4, 512, 2048), "down": (4, 2048, 512)}
    weights = {key: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for key, shape in shapes.items()}
    return step, weights, jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)


def test_a_pipeline_begins_with_its_stages_on_one_axis_and_its_batch_on_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PROGRAMS, "pipelined", pipelined)
    problem, program = problem_of("pipelined")
    assert is_pipelined(problem) and not is_pipelined(problem_of("dense")[0])
    found = {}
    for family in families(2, pipelined=True):
        if family.name == "pipeline":
            small = restrict_rows(program, family_rows(problem, family))
            choices = small.lift(solve(small.problem, time_limit_s=20).choices)
            found[family.stages] = [
                of_argument(problem, choices, name) for name in ("[0]['up']", "[1]")
            ]
    assert set(found) == {(0,), (1,)}
    for (stage,), (weight, batch) in found.items():
        assert (weight[stage], batch[stage], batch[1 - stage]) == (0, -1, 0)
