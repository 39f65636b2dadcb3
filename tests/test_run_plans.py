"""Plans run on eight devices give the numbers of one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.models import build
from shardwright.planner.fixed import fixed_strategies
from shardwright.planner.mesh_solution import evaluate_choices
from shardwright.planner.plan_making import make_plan
from shardwright.planner.plan_schema import OptionsModel
from shardwright.planner.prepared import prepare
from shardwright.planner.pricing import build_problem
from shardwright.planner.search import SearchResult
from shardwright.planner.solver import Solution, evaluate

MESH = {"data": 2, "model": 4}
DECODER = {
    "layers": 4, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 64, "vocab": 64, "batch": 8,
    "sequence": 16, "compute_dtype": "float32", "learning_rate": 1e-2,
}  # fmt: skip
OPTIONS = OptionsModel(
    topology="v5e:2x4", mesh=MESH, pinned={}, memory_fraction=0.9, time_limit_s=1.0, seed=0
)
MODELS: dict[str, tuple[str, dict[str, Any], str, P]] = {
    "scanned decoder": (
        "llama3-8b", DECODER, "[0]['params']['layers']['w_up']", P(None, "data", "model"),
    ),
    "unrolled decoder": (
        "llama3-8b", DECODER | {"scan_layers": False, "layers": 2},
        "[0]['params']['layers'][1]['w_up']", P("data", "model"),
    ),
    "mlp": (
        "mlp",
        {"features": 16, "hidden": 32, "layers": 3, "classes": 8, "batch": 16,
         "compute_dtype": "float32"},
        "[0]['params']['layers'][1]['w']", P("data", "model"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_of_a_planned_model_equal_one_device(name: str) -> None:
    """Float32 throughout, so that sums in another order differ by 1e-4 at most."""
    model_name, options, pin, spec = MODELS[name]
    model = build(model_name, **options)
    plan = sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", mesh=MESH,
        donate_argnums=model.donate_argnums, pinned={pin: spec}, time_limit_s=5,
    )  # fmt: skip
    step = plan.jit(model.train_step)
    state, alone = model.init(0), model.init(0)
    one_device = jax.jit(model.train_step)
    for number in range(3):
        batch = model.make_batch(number)
        state, metrics = step(state, batch)
        alone, expected = one_device(alone, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
        # Donated state keeps its sharding from step to step.
        planned = plan.data.program.inputs[: len(jax.tree.leaves(state))]
        for tensor, leaf in zip(planned, jax.tree.leaves(state), strict=True):
            axes = [a for dim in tensor.spec for a in dim]
            shards = int(np.prod([MESH[a] for a in axes]))
            assert leaf.addressable_shards[0].data.size * shards == leaf.size
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def _attention(x: jax.Array, w: jax.Array) -> jax.Array:
    q, k = jnp.einsum("bsd,dh->bsh", x, w), jnp.einsum("bsd,dh->bsh", x, w)
    scores = jax.nn.softmax(jnp.einsum("bsh,bth->bst", q, k))
    return jnp.einsum("bst,bth->bsh", scores, q) + x


def _loop(x: jax.Array, w: jax.Array) -> jax.Array:
    def body(carry: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry @ layer)
        return carry, carry.sum()

    y, sums = jax.lax.scan(body, x, jnp.stack([w, w * 0.5, w * 2.0]))
    return y * sums.mean()


def _gather_scatter(table: jax.Array, rows: jax.Array) -> jax.Array:
    picked = table[rows % table.shape[0]]
    return table.at[rows % table.shape[0]].add(jnp.cos(picked))


def _shapes(x: jax.Array) -> jax.Array:
    y = x.reshape(4, 4, 8).transpose(2, 0, 1).reshape(8, 16)
    y = jnp.concatenate([y, jnp.flip(y, 0)], axis=1)
    return jnp.pad(y, ((1, 2), (0, 0)))[2:9, ::2] - jnp.cumsum(y, 1)[:7, :16]


def _sorted(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.sort(x, axis=1), jnp.argmax(x, axis=0), jax.lax.top_k(x, 3)[0]


def _convolution(image: jax.Array, kernel: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _branches(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda: jnp.sin(x @ w), lambda: x - w)


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "attention": (_attention, (_random(4, 8, 16), _random(16, 16, seed=1))),
    "loop": (_loop, (_random(8, 16), _random(16, 16, seed=1))),
    "gather and scatter": (_gather_scatter, (_random(16, 8), np.arange(8, dtype=np.int32) * 3)),
    "reshapes, concatenation, pad, slice, cumsum": (_shapes, (_random(8, 16),)),
    "sort, argmax, top-k": (_sorted, (_random(8, 16),)),
    "convolution and pooling": (_convolution, (_random(4, 8, 8, 4), _random(3, 3, 4, 8, seed=1))),
    "branches": (_branches, (_random(8, 8), _random(8, 8, seed=1))),
    "gradient": (
        jax.grad(lambda w, x: jnp.tanh(x @ w).var()), (_random(16, 8), _random(8, 16, seed=1)),
    ),
}  # fmt: skip


@functools.cache
def _problem(name: str) -> Any:
    fn, args = PROGRAMS[name]
    program = sw.Program.trace(fn, *args)
    prepared = prepare(program)
    (mesh, *_) = meshes_for_shape(parse_slice("v5e:2x4"), MESH)
    fixed = fixed_strategies(prepared.nodes, (), mesh)
    problem = build_problem(prepared.nodes, prepared.fusions, prepared.buffers, mesh, fixed)
    return prepared, problem


def _allowed_choices(problem: Any, rng: np.random.Generator) -> tuple[int, ...]:
    """Random strategies; every combination is a valid plan."""
    return tuple(int(rng.integers(len(rows))) for rows in problem.strategies)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_choice_of_strategies_computes_the_same_numbers(name: str, seed: int) -> None:
    fn, args = PROGRAMS[name]
    prepared, problem = _problem(name)
    choices = _allowed_choices(problem, np.random.default_rng(seed))
    integer_program = problem.weighed(0.5, 1e12)
    told = evaluate(integer_program, choices)
    solution = Solution(choices, told.cost, told.cost, 0.0, "feasible", 0.0, told.peak, None)
    found = SearchResult(evaluate_choices(prepared, problem, solution), ())
    plan = make_plan(prepared, found, OPTIONS, None, 0.0)
    ours = plan.jit(fn)(*args)
    expected = jax.jit(fn)(*args)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


WHOLE_MODELS = {
    "scanned decoder": ("scanned decoder", "v5e:2x4", {"data": 2, "model": 4}),
    "mlp on three axes": ("mlp", "v5p:2x2x2", {"a": 2, "b": 2, "c": 2}),
}


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_any_choice_of_strategies_of_a_whole_model_trains_the_same(name: str) -> None:
    model_name, topology, shape = WHOLE_MODELS[name]
    published, options, _, _ = MODELS[model_name]
    model = build(published, **options)
    prepared = prepare(
        sw.Program.trace(
            model.train_step, *model.example_args, donate_argnums=model.donate_argnums
        )
    )  # fmt: skip
    (mesh, *_) = meshes_for_shape(parse_slice(topology), shape)
    problem = build_problem(prepared.nodes, prepared.fusions, prepared.buffers, mesh)
    choices = _allowed_choices(problem, np.random.default_rng(0))
    told = evaluate(problem.weighed(0.5, 1e15), choices)
    solution = Solution(choices, told.cost, told.cost, 0.0, "feasible", 0.0, told.peak, None)
    found = SearchResult(evaluate_choices(prepared, problem, solution), ())
    plan = make_plan(prepared, found, OPTIONS, None, 0.0)
    batch = model.make_batch(0)
    ours = plan.jit(model.train_step)(model.init(0), batch)
    expected = jax.jit(model.train_step)(model.init(0), batch)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_random_keys_are_cut_as_elements_and_never_inside() -> None:
    """A key's data has a dimension that JAX does not show, and no sharding may name."""

    def step(keys: jax.Array, x: jax.Array) -> Any:
        def noisy(key: jax.Array, row: jax.Array) -> Any:
            key, now = jax.random.split(key)
            return key, row + jax.random.normal(now, row.shape)

        return jax.vmap(noisy)(keys, x)

    keys, x = jax.random.split(jax.random.key(0), 16), jnp.ones((16, 32))
    expected = jax.jit(step)(keys, x)
    for spec in (P(), P("data"), P(("data", "model"))):
        plan = sw.plan(
            step, keys, x, topology="v5e:2x4", mesh=MESH, donate_argnums=(0, 1),
            pinned={"[0]": spec},
        )  # fmt: skip
        new_keys, y = plan.jit(step)(jnp.copy(keys), jnp.copy(x))
        assert (new_keys == expected[0]).all()
        np.testing.assert_allclose(y, expected[1], rtol=1e-6)
    with pytest.raises(sw.InputError, match="2 entries and the tensor 1 dimensions"):
        sw.plan(step, keys, x, topology="v5e:2x4", mesh=MESH, pinned={"[0]": P("data", "model")})


def test_random_keys_of_a_program_file_keep_their_inner_dimension() -> None:
    keys = jax.random.split(jax.random.key(0), 16)
    traced = sw.Program.trace(lambda k: jax.random.bits(k[0]), keys)
    assert traced.inputs[0].inner_dims == 1
    assert sw.Program.from_stablehlo(traced.to_stablehlo()).inputs == traced.inputs
