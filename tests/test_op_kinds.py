"""A small program for every kind of operation: priced as partitioned, optimal, computed rightly."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.models import build
from shardwright.planner.mesh_solution import evaluate_choices
from shardwright.planner.plan_making import make_plan
from shardwright.planner.plan_schema import OptionsModel
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.pricing import build_problem
from shardwright.planner.problem import ShardingProblem
from shardwright.planner.search import SearchResult
from shardwright.planner.solver import Problem, Solution, evaluate, solve

Args = tuple[Any, ...]
MESHES = {
    "4": ("v5e:2x2", {"x": 4}),
    "2x2": ("v5e:2x2", {"x": 2, "y": 2}),
    "2x4": ("v5e:2x4", {"x": 2, "y": 4}),
}
LARGE, UNEVEN, TINY = 1024, 12, 16


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def convolve(x: jax.Array, k: jax.Array, stride: int = 1, padding: str = "SAME") -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, (stride, stride), padding, dimension_numbers=numbers)


def pool(x: jax.Array) -> jax.Array:
    window = (1, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def scan(x: jax.Array, weights: jax.Array) -> jax.Array:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]


def until_large(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0]


def normalise(x: jax.Array) -> jax.Array:
    return (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5)


def two_layers(w: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x @ w[0]) @ w[1]).mean()


KINDS: dict[str, tuple[Callable[..., Any], Callable[[int], Args]]] = {
    "dot": (lambda x, w: x @ w, lambda n: (f32(n, n // 2), f32(n // 2, n))),
    "batched dot": (
        lambda x, w: jnp.einsum("bij,bjk->bik", x, w), lambda n: (f32(4, n, 8), f32(4, 8, n)),
    ),
    "two dots": (
        lambda x, w, v: jax.nn.relu(x @ w) @ v, lambda n: (f32(n, 8), f32(8, n), f32(n, 8)),
    ),
    "transposed dot": (lambda x: x.T @ x, lambda n: (f32(n, n // 2),)),
    "two readers": (
        lambda x, w: (x @ w, x.T @ w), lambda n: (f32(n, n), f32(n, n // 2)),
    ),
    "convolution": (convolve, lambda n: (f32(4, n, 8, 16), f32(3, 3, 16, 8))),
    "strided convolution": (
        functools.partial(convolve, stride=2, padding="VALID"),
        lambda n: (f32(4, n, 8, 16), f32(2, 2, 16, 8)),
    ),
    "convolution's gradient": (
        jax.grad(lambda k, x: jnp.square(convolve(x, k)).mean()),
        lambda n: (f32(3, 3, 16, 8), f32(4, n, 8, 16)),
    ),
    "gather": (lambda t, i: t[i], lambda n: (f32(n, n // 2), i32(8))),
    "take along": (
        lambda t, i: jnp.take_along_axis(t, i, axis=1), lambda n: (f32(n, n // 2), i32(n, 1)),
    ),
    "scatter": (
        lambda t, i, u: t.at[i].add(u), lambda n: (f32(n, n // 2), i32(8), f32(8, n // 2)),
    ),
    "reduce": (lambda x: (x.max(0), x.mean(1)), lambda n: (f32(n, n // 2),)),
    "reduce to a scalar": (lambda x, y: jnp.square(x - y).mean(), lambda n: (f32(n, 8),) * 2),
    "argmax": (lambda x: x.argmax(1), lambda n: (f32(n, n // 2),)),
    "softmax": (jax.nn.softmax, lambda n: (f32(n, n // 2),)),
    "layer norm": (normalise, lambda n: (f32(n, n // 2),)),
    "broadcast": (lambda x, y: x[:, None] + y, lambda n: (f32(n), f32(n // 2))),
    "split": (lambda x: jnp.sin(x).reshape(-1, 2, x.shape[1] // 2), lambda n: (f32(n, n // 2),)),
    "merge": (lambda x: jnp.sin(x).reshape(-1, x.shape[2]) * 2, lambda n: (f32(n, 2, n // 2),)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y]), lambda n: (f32(n, n // 2),) * 2),
    "pad": (lambda x: jnp.pad(x, ((1, 1), (0, 0))), lambda n: (f32(n, n // 2),)),
    "slice": (lambda x: x[: x.shape[0] // 2], lambda n: (f32(n, n // 2),)),
    "shifted slices": (lambda x: x[1:] - x[:-1], lambda n: (f32(n, n // 2),)),
    "strided slice": (lambda x: x[::2], lambda n: (f32(n, n // 2),)),
    "dynamic slice": (
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 2), lambda n: (f32(n, n // 2), i32()),
    ),
    "dynamic update": (
        lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 0),
        lambda n: (f32(n, n // 2), f32(2, n // 2), i32()),
    ),
    "reverse": (lambda x: x[::-1] * 2, lambda n: (f32(n, n // 2),)),
    "transposed sum": (lambda x: jnp.sin(x) + jnp.sin(x).T, lambda n: (f32(n, n),)),
    "sort": (lambda x: jnp.sort(x, 1), lambda n: (f32(n, n // 2),)),
    "argsort": (lambda x: jnp.argsort(x, 1), lambda n: (f32(n, n // 2),)),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), lambda n: (f32(n, n // 2),)),
    "pooling": (pool, lambda n: (f32(4, n, 8, 4),)),
    "pooling's gradient": (
        jax.grad(lambda x: jnp.square(pool(x)).mean()), lambda n: (f32(4, n, 8, 4),),
    ),
    "iota": (lambda x: x + jnp.arange(x.shape[0])[:, None], lambda n: (f32(n, n // 2),)),
    "scan": (scan, lambda n: (f32(n, 8), f32(3, 8, 8))),
    "scan's gradient": (
        jax.grad(lambda w, x: scan(x, w).sum()), lambda n: (f32(3, 8, 8), f32(n, 8)),
    ),
    "while": (until_large, lambda n: (f32(n, n // 2),)),
    "counted loop": (
        lambda x: lax.fori_loop(0, 5, lambda i, c: c * 1.5 + i, x), lambda n: (f32(n, n // 2),),
    ),
    "branches": (
        lambda p, x: lax.cond(p > 1, lambda y: y @ y.T, lambda y: jnp.outer(y[:, 0], y[:, 1]), x),
        lambda n: (i32(), f32(n, 8)),
    ),
    "random": (
        lambda k, x: x + jax.random.normal(jax.random.wrap_key_data(k), x.shape),
        lambda n: (jax.ShapeDtypeStruct((2,), jnp.uint32), f32(n, n // 2)),
    ),
    "random bits": (
        lambda k, x: x + lax.rng_bit_generator(k, x.shape)[1].astype(jnp.float32),
        lambda n: (jax.ShapeDtypeStruct((4,), jnp.uint32), f32(n, n // 2)),
    ),
    "chlo function": (lambda x: lax.erf_inv(jnp.tanh(x)), lambda n: (f32(n, n // 2),)),
    "top k": (lambda x: lax.top_k(x, 4), lambda n: (f32(n, n // 2),)),
    "barrier": (lambda x: lax.optimization_barrier(jnp.sin(x)) * 2, lambda n: (f32(n, n // 2),)),
    "Fourier transform": (lambda x: jnp.abs(jnp.fft.rfft(x)), lambda n: (f32(n, n // 2),)),
    "select": (lambda x, y: jnp.where(x > y, x, y * 2), lambda n: (f32(n, n // 2),) * 2),
    "bitcast": (
        lambda x: lax.bitcast_convert_type(x, jnp.int16), lambda n: (f32(n, n // 2),),
    ),
    "two layers' gradient": (
        jax.grad(two_layers), lambda n: ((f32(8, n), f32(n, 8)), f32(n, 8)),
    ),
}  # fmt: skip
DIFFERS_ON_CPU = {"random bits"}
"""JAX gives other random bits on another platform or in another number of shards."""


TOO_MANY_ON_ONE_AXIS = {"scan's gradient", "two layers' gradient"}
TOO_MANY_ON_TWO_AXES = TOO_MANY_ON_ONE_AXIS | {
    "two dots", "two readers", "convolution's gradient", "layer norm", "pooling's gradient",
    "scan", "branches",
}  # fmt: skip
"""More than two million combinations of strategies."""


@functools.cache
def problem_of(kind: str, mesh: str, size: int) -> tuple[Prepared, ShardingProblem]:
    fn, args = KINDS[kind]
    prepared = prepare(sw.Program.trace(fn, *args(size)))
    topology, shape = MESHES[mesh]
    laid = meshes_for_shape(parse_slice(topology), shape)[0]
    return prepared, build_problem(prepared.nodes, prepared.fusions, prepared.buffers, laid)


def solution_of(program: Problem, choices: tuple[int, ...]) -> Solution:
    told = evaluate(program, choices)
    return Solution(choices, told.cost, told.cost, 0.0, "feasible", 0.0, told.peak, None)


def random_solution(problem: ShardingProblem, rng: np.random.Generator) -> Solution:
    """Random strategies, but the best for the copies that several readers share.

    Readers that need the same sharding share a reshard in the module; in the integer program
    only the best copy says so.
    """
    program = problem.weighed(1.0, 1e15)
    choices = [int(rng.integers(len(rows))) for rows in problem.strategies]
    for copy in problem.copies:
        options = range(len(problem.strategies[copy.node]))
        ways = [(*choices[: copy.node], k, *choices[copy.node + 1 :]) for k in options]
        choices = list(min(ways, key=lambda way: evaluate(program, way).cost))
    return solution_of(program, tuple(choices))


@pytest.mark.parametrize("size", [LARGE, UNEVEN])
@pytest.mark.parametrize("mesh", ["4", "2x4"])
@pytest.mark.parametrize("kind", KINDS)
def test_strategies_are_priced_as_the_partitioner_runs_them(
    kind: str, mesh: str, size: int
) -> None:
    prepared, problem = problem_of(kind, mesh, size)
    best = solve(problem.weighed(1.0, 1e15), gap=1e-4, time_limit_s=10)
    rng = np.random.default_rng(0)
    for solution in (best, *(random_solution(problem, rng) for _ in range(3))):
        compute, gathers, exposed = problem.seconds(solution.choices)
        exact = evaluate_choices(prepared, problem, solution).evaluation
        # Casts inside a product are of the operand as the partitioner cuts it.
        assert exact.compute_s == pytest.approx(compute, rel=5e-3)
        assert exact.collective_s == pytest.approx(gathers + exposed, rel=0.1)


@pytest.mark.parametrize(("scanned", "beyond"), [(True, 0.08), (False, 0.16)])
def test_optimum_of_a_whole_train_step_is_priced_as_the_partitioner_runs_it(
    scanned: bool, beyond: float
) -> None:
    """Kernels that follow from collectives (copies of gradients to another layout) come on top."""
    model = build(
        "llama3-8b", layers=2, d_model=1024, heads=8, kv_heads=4, d_ff=2048, vocab=8192,
        batch=32, sequence=512, scan_layers=scanned,
    )  # fmt: skip
    prepared = prepare(
        sw.Program.trace(
            model.train_step, *model.example_args, donate_argnums=model.donate_argnums
        )
    )  # fmt: skip
    (mesh, *_) = meshes_for_shape(parse_slice("v5e:4x4"), {"x": 4, "y": 4})
    problem = build_problem(prepared.nodes, prepared.fusions, prepared.buffers, mesh)
    best = solve(problem.weighed(0.05, 1e15), gap=1e-3, time_limit_s=20)
    compute, gathers, exposed = problem.seconds(best.choices)
    exact = evaluate_choices(prepared, problem, best).evaluation
    assert compute <= exact.compute_s <= compute * (1 + beyond)
    assert exact.collective_s == pytest.approx(gathers + exposed, rel=0.01)


def enumerate_least(program: Problem) -> float:
    """The least cost of all combinations of strategies, memory apart."""
    shape = [len(costs) for costs in program.costs]
    total = np.zeros(shape)
    for node, costs in enumerate(program.costs):
        total += np.expand_dims(costs, [d for d in range(len(shape)) if d != node])
    for edge in program.edges:
        rest = [d for d in range(len(shape)) if d not in (edge.a, edge.b)]
        table = edge.cost if edge.a < edge.b else edge.cost.T
        total += np.expand_dims(table, rest)
    return float(total.min())


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [(kind, "4") for kind in KINDS if kind not in TOO_MANY_ON_ONE_AXIS]
    + [(kind, "2x2") for kind in KINDS if kind not in TOO_MANY_ON_TWO_AXES],
)
def test_optimum_is_that_of_enumeration(kind: str, mesh: str) -> None:
    _, problem = problem_of(kind, mesh, LARGE)
    program = problem.weighed(0.5, 1e15)
    found = solve(program, time_limit_s=20)
    assert found.cost == pytest.approx(enumerate_least(program), rel=1e-9)


OPTIONS = OptionsModel(
    topology="v5e:2x4", mesh=None, pinned={}, memory_fraction=0.9, time_limit_s=1.0, seed=0
)


def values_of(args: Args) -> Args:
    rng = np.random.default_rng(0)

    def value(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return np.asarray(rng.integers(0, 4, leaf.shape), leaf.dtype)
        return np.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    values: Args = jax.tree.map(value, args)
    return values


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - DIFFERS_ON_CPU))
def test_any_strategies_compute_the_numbers_of_one_device(kind: str) -> None:
    fn, args = KINDS[kind]
    prepared, problem = problem_of(kind, "2x4", TINY)
    solution = random_solution(problem, np.random.default_rng(len(kind)))
    found = SearchResult(evaluate_choices(prepared, problem, solution), ())
    plan = make_plan(prepared, found, OPTIONS, None, 0.0)
    values = values_of(args(TINY))
    ours, expected = plan.jit(fn)(*values), jax.jit(fn)(*values)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
