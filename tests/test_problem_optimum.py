"""Tiny programs: the integer program's optimum by enumeration, its costs by the partitioner."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.mesh_solution import evaluate_choices
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.pricing import build_problem
from shardwright.planner.problem import ShardingProblem
from shardwright.planner.solver import Solution, evaluate, solve

ENOUGH_S = 3600.0
"""No solve here takes so long: what ends each is its proof, however busy the machine."""

MESHES = [("v5e:2x2", {"data": 2, "model": 2}), ("v5e:2x2", {"all": 4})]
MOST_COMBINATIONS = 300_000


def _shapes(*shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)


PROGRAMS: dict[str, tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]] = {
    "dot": (lambda a, b: a @ b, _shapes((256, 4096), (4096, 512))),
    "batched dot": (
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b), _shapes((4, 256, 512), (4, 512, 256)),
    ),
    "reduction": (lambda a: a.sum(0), _shapes((4096, 4096))),
    "broadcast": (lambda a, b: a + b, _shapes((2048, 2048), (2048,))),
    "reshape": (lambda a: a.reshape(4096, 512).sum(1), _shapes((64, 64, 512))),
    "transpose": (lambda a: a.T @ a, _shapes((1024, 512))),
    "gather": (lambda t, i: t[i.astype(int)], _shapes((4096, 512), (256,))),
    "concatenate": (lambda a, b: jnp.concatenate([a, b]), _shapes((1024, 512), (1024, 512))),
    "pad": (lambda a: jnp.pad(a, ((0, 8), (0, 0))), _shapes((1024, 512))),
    "sort": (lambda a: jnp.sort(a, axis=1), _shapes((1024, 512))),
    "cumsum": (lambda a: jnp.cumsum(a, axis=0), _shapes((1024, 512))),
    "convolution": (
        lambda x, k: jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        _shapes((4, 32, 32, 128), (3, 3, 128, 128)),
    ),
    "loop": (
        lambda x, w: jax.lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, w)[0],
        _shapes((256, 256), (3, 256, 256)),
    ),
    "exponential of a chlo function": (jax.lax.erf_inv, _shapes((1024, 512))),
}  # fmt: skip


def _problem(name: str, topology: str, shape: dict[str, int]) -> tuple[Prepared, ShardingProblem]:
    fn, args = PROGRAMS[name]
    prepared = prepare(sw.Program.trace(fn, *args))
    mesh = meshes_for_shape(parse_slice(topology), shape)[0]
    return prepared, build_problem(prepared.nodes, prepared.fusions, prepared.buffers, mesh)


@pytest.mark.parametrize(("topology", "shape"), MESHES)
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"loop"}))
def test_optimum_equals_enumeration(name: str, topology: str, shape: dict[str, int]) -> None:
    _, problem = _problem(name, topology, shape)
    program = problem.weighed(0.5, 1e12)
    sizes = [len(rows) for rows in problem.strategies]
    assert np.prod(sizes, dtype=float) <= MOST_COMBINATIONS
    least = min(evaluate(program, choice).cost for choice in itertools.product(*map(range, sizes)))
    found = solve(program, time_limit_s=ENOUGH_S)
    assert found.cost == pytest.approx(least, rel=1e-9)
    assert found.bound <= least * (1 + 1e-9)


@pytest.mark.parametrize(("topology", "shape"), MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_communication_agrees_with_the_partitioner(
    name: str, topology: str, shape: dict[str, int]
) -> None:
    prepared, problem = _problem(name, topology, shape)
    found = solve(problem.weighed(0.5, 1e12), time_limit_s=ENOUGH_S, gap=1e-4)
    _check_agreement(prepared, problem, found)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["dot", "batched dot", "reduction", "broadcast", "loop"])
def test_communication_agrees_for_any_choice(name: str, seed: int) -> None:
    prepared, problem = _problem(name, *MESHES[0])
    rng = np.random.default_rng(seed)
    choices = tuple(int(rng.integers(len(rows))) for rows in problem.strategies)
    told = evaluate(problem.weighed(0.5, 1e12), choices)
    solution = Solution(choices, told.cost, told.cost, 0.0, "feasible", 0.0, told.peak, None)
    _check_agreement(prepared, problem, solution)


def _check_agreement(prepared: Prepared, problem: ShardingProblem, solution: Solution) -> None:
    _, gathers, exposed = problem.seconds(solution.choices)
    exact = evaluate_choices(prepared, problem, solution).evaluation
    assert gathers + exposed == pytest.approx(exact.collective_s, rel=0.1, abs=1e-6)
