"""Kernels in programs: planned as one operation, run as a shard_map, with one device's numbers."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cost_models.compute import matmul_efficiency
from shardwright.errors import InputError
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.export import constraints_code
from shardwright.planner.mesh_solution import Candidate, evaluate_choices
from shardwright.planner.plan_making import make_plan
from shardwright.planner.plan_schema import OptionsModel
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.pricing import build_problem
from shardwright.planner.problem import ShardingProblem
from shardwright.planner.search import SearchResult
from shardwright.planner.solver import Solution, evaluate, solve

MESH = {"data": 2, "model": 4}
TOPOLOGY = "v5e:2x4"
OPTIONS = OptionsModel(
    topology=TOPOLOGY, mesh=MESH, pinned={}, memory_fraction=0.9, time_limit_s=1.0, seed=0
)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def plain_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def plain_gradient(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return dy @ w.T, x.T @ dy


product_kernel = sw.kernel(
    plain_product, rule="m k, k n -> m n", reduction="k", flops="2 * m * k * n", name="product"
)
# m is summed over in the gradient of w, and n in that of x, so neither can be cut.
gradient_kernel = sw.kernel(
    plain_gradient, rule="m k, k n, m n -> m k, k n", flops="4 * m * k * n", name="gradient"
)


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> Any:
    return product_kernel(x, w)


product.defvjp(
    lambda x, w: (product_kernel(x, w), (x, w)), lambda saved, dy: gradient_kernel(*saved, dy)
)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(product(x, w))


def scanned_loss(x: jax.Array, w: jax.Array) -> jax.Array:
    body = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    return jnp.sum(jax.lax.scan(lambda c, v: (body(c, v), None), x, w)[0] ** 2)


def unrolled_loss(x: jax.Array, w: jax.Array) -> jax.Array:
    body = jax.checkpoint(layer)
    for number in range(w.shape[0]):
        x = body(x, w[number])
    return jnp.sum(x**2)


def same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("loss", [scanned_loss, unrolled_loss])
def test_planned_gradients_through_kernels_equal_one_device(loss: Any) -> None:
    step = jax.value_and_grad(loss, argnums=(0, 1))
    x, w = random(16, 32), random(3, 32, 32, seed=1) / 6
    plan = sw.plan(
        step, x, w, topology=TOPOLOGY, mesh=MESH,
        pinned={"[0]": P("data", "model"), "[1]": P(None, "model", None)},
    )  # fmt: skip
    assert {k.name for k in plan.data.kernels} == {"product", "gradient"}
    plain = functools.partial(_plain_loss, scanned=loss is scanned_loss)
    same(plan.jit(step)(x, w), jax.value_and_grad(plain, argnums=(0, 1))(x, w))


def _plain_loss(x: jax.Array, w: jax.Array, scanned: bool) -> jax.Array:
    for number in range(w.shape[0]):
        x = jnp.tanh(x @ w[number])
    return jnp.sum(x**2)


def test_without_a_plan_the_function_runs() -> None:
    x, w = random(4, 8), random(8, 4, seed=1)
    same(product_kernel(x, w), x @ w)
    same(jax.jit(product_kernel)(x, w), x @ w)
    same(jax.grad(lambda x: product(x, w).sum())(x), np.ones((4, 4)) @ w.T)


def test_where_there_is_no_tpu_the_reference_runs() -> None:
    def fails(x: jax.Array) -> jax.Array:
        raise AssertionError("the TPU kernel was traced")

    kernel = sw.kernel(fails, rule="n -> n", flops=0.0, reference=lambda x: 2 * x)
    same(jax.jit(kernel)(np.ones(4)), 2 * np.ones(4))


def _choice_problem(
    fn: Any, *args: Any, shape: dict[str, int] = MESH
) -> tuple[Prepared, ShardingProblem]:
    prepared = prepare(sw.Program.trace(fn, *args))
    (mesh, *_) = meshes_for_shape(parse_slice(TOPOLOGY), shape)
    return prepared, build_problem(prepared.nodes, prepared.fusions, prepared.buffers, mesh)


def _candidate(prepared: Prepared, problem: ShardingProblem, choices: tuple[int, ...]) -> Candidate:
    told = evaluate(problem.weighed(0.5, 1e12), choices)
    solution = Solution(choices, told.cost, told.cost, 0.0, "feasible", 0.0, told.peak, None)
    return evaluate_choices(prepared, problem, solution)


def _planned(prepared: Prepared, problem: ShardingProblem, choices: tuple[int, ...]) -> sw.Plan:
    found = SearchResult(_candidate(prepared, problem, choices), ())
    return make_plan(prepared, found, OPTIONS, None, 0.0)


OPTIMA: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "partial sums": (product_kernel, ((256, 4096), (4096, 512))),
    "two results": (gradient_kernel, ((512, 256), (256, 512), (512, 512))),
}


@pytest.mark.parametrize("shape", [{"data": 2, "model": 4}, {"all": 8}])
@pytest.mark.parametrize("name", OPTIMA)
def test_optimum_with_a_kernel_equals_enumeration(name: str, shape: dict[str, int]) -> None:
    fn, shapes = OPTIMA[name]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    _, problem = _choice_problem(fn, *args, shape=shape)
    program = problem.weighed(0.5, 1e12)
    sizes = [len(rows) for rows in problem.strategies]
    assert np.prod(sizes, dtype=float) <= 300_000
    least = min(evaluate(program, c).cost for c in itertools.product(*map(range, sizes)))
    found = solve(program, time_limit_s=20)
    assert found.cost == pytest.approx(least, rel=1e-9)
    assert found.bound <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_communication_around_a_kernel_is_as_the_partitioner_says(seed: int) -> None:
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 4096), (4096, 512))]
    prepared, problem = _choice_problem(lambda x, w: product_kernel(x, w) + 1, *args)
    rng = np.random.default_rng(seed)
    choices = tuple(int(rng.integers(len(rows))) for rows in problem.strategies)
    _, gathers, exposed = problem.seconds(choices)
    exact = _candidate(prepared, problem, choices).evaluation
    assert gathers + exposed == pytest.approx(exact.collective_s, rel=0.1, abs=1e-6)


def mixed(x: jax.Array, w: jax.Array) -> jax.Array:
    grouped = sw.kernel(
        lambda q, k: q * jnp.repeat(k, q.shape[0] // k.shape[0], 0),
        rule="(k g) d, k d -> (k g) d", flops=0.0, name="grouped",
    )  # fmt: skip
    batched = jax.vmap(product_kernel, in_axes=(0, None))(x.reshape(4, 4, 16), w)
    return grouped(batched.reshape(16, 16), product_kernel(x[:4], w))


@pytest.mark.parametrize("seed", range(6))
def test_any_choice_of_strategies_computes_the_same_numbers(seed: int) -> None:
    """Factors in groups, partial sums and a vmapped kernel, however they are sharded."""
    x, w = random(16, 16), random(16, 16, seed=1)
    prepared, problem = _choice_problem(mixed, x, w)
    rng = np.random.default_rng(seed)
    choices = tuple(int(rng.integers(len(rows))) for rows in problem.strategies)
    same(_planned(prepared, problem, choices).jit(mixed)(x, w), mixed(x, w))


def test_calls_of_one_jitted_function_are_planned_apart() -> None:
    """JAX lowers the function once; each call still gets the sharding that it was planned with."""
    once = jax.jit(product_kernel)

    def two(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return once(x, w), once(w, x)

    x, w = random(16, 16), random(16, 16, seed=1)
    prepared, problem = _choice_problem(two, x, w)
    nodes = problem.node_graph
    first, second = (nodes.node_of_op[op.id] for op in nodes.graph.ops if "kernel" in op.detail)
    choices = [0] * len(problem.strategies)
    rows = [problem.strategies[n].tolist() for n in (first, second)]
    choices[first], choices[second] = rows[0].index([0, 2]), rows[1].index([1, -1])
    plan = _planned(prepared, problem, tuple(choices))
    specs = [(k.in_specs, k.out_specs, k.summed) for k in plan.data.kernels]
    assert specs == [
        ([[["data"], []], [[], ["model"]]], [[["data"], ["model"]]], []),
        ([[[], ["data"]], [["data"], []]], [[[], []]], ["data"]),
    ]
    same(plan.jit(two)(x, w), (x @ w, w @ x))


def test_a_size_that_the_axis_does_not_divide_is_not_sharded_by_it() -> None:
    rows = sw.kernel(lambda x: x * 2, rule="m n -> m n", whole="n", flops=0.0)
    x = random(6, 4)
    _, problem = _choice_problem(rows, x)
    nodes = problem.node_graph
    (node,) = [nodes.node_of_op[op.id] for op in nodes.graph.ops if "kernel" in op.detail]
    assert {tuple(row) for row in problem.strategies[node].tolist()} == {(-1, -1), (0, -1)}


def test_kernels_of_a_function_that_is_planned_again_use_the_new_plan() -> None:
    x, w = random(16, 16), random(16, 16, seed=1)
    fn = jax.jit(product_kernel)
    for spec in (P("data"), P(None, "model")):
        plan = sw.plan(fn, x, w, topology=TOPOLOGY, mesh=MESH, pinned={"[0]": spec})
        same(plan.jit(fn)(x, w), x @ w)
        same(jax.jit(fn)(x, w), x @ w)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_a_mesh_that_the_caller_has_set_does_not_matter(shape: tuple[int, int]) -> None:
    x, w = random(16, 32), random(32, 16, seed=1)
    plan = sw.plan(product_kernel, x, w, topology=TOPOLOGY, mesh=MESH, pinned={"[0]": P("data")})
    mesh = Mesh(
        np.array(jax.devices()).reshape(shape), tuple(MESH), axis_types=(AxisType.Auto,) * 2
    )  # fmt: skip
    with jax.set_mesh(mesh):
        same(plan.jit(product_kernel)(x, w), x @ w)


def test_a_kernel_may_call_another() -> None:
    outer = sw.kernel(
        lambda x, w: 2 * product_kernel(x, w), rule="m k, k n -> m n", reduction="k",
        flops="2 * m * k * n", name="outer",
    )  # fmt: skip
    x, w = random(16, 32), random(32, 16, seed=1)
    plan = sw.plan(outer, x, w, topology=TOPOLOGY, mesh=MESH, pinned={"[0]": P(None, "data")})
    assert [k.name for k in plan.data.kernels] == ["outer"]
    same(plan.jit(outer)(x, w), 2 * x @ w)


def test_donated_state_passes_through_a_kernel() -> None:
    def step(state: jax.Array, w: jax.Array) -> jax.Array:
        return product_kernel(state, w)

    x, w = random(16, 16), random(16, 16, seed=1)
    plan = sw.plan(step, x, w, topology=TOPOLOGY, mesh=MESH, donate_argnums=0)
    run = plan.jit(step)
    same(run(run(x, w), w), x @ w @ w)


def test_saved_plan_holds_the_specs_of_kernels(tmp_path: Path) -> None:
    x, w = random(16, 32), random(32, 16, seed=1)
    plan = sw.plan(product_kernel, x, w, topology=TOPOLOGY, mesh=MESH)
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert loaded.kernels() == plan.kernels()
    same(loaded.jit(product_kernel)(x, w), x @ w)


def test_a_plan_from_before_there_were_kernels_still_loads() -> None:
    plan = sw.plan(lambda x: x + 1, random(8), topology="v5e:2x2", mesh={"x": 4})
    raw = json.loads(plan.to_json())
    del raw["kernels"], raw["unpriced_ops"]
    assert sw.Plan.from_json(json.dumps(raw)).data == plan.data


def test_a_plan_without_the_kernel_refuses_the_program() -> None:
    x, w = random(16, 32), random(32, 16, seed=1)
    plan = sw.plan(product_kernel, x, w, topology=TOPOLOGY, mesh=MESH)
    raw = json.loads(plan.to_json()) | {"kernels": []}
    with pytest.raises(InputError, match=r"no shardings for kernel product .* Plan this program"):
        sw.Plan.from_json(json.dumps(raw)).lower(product_kernel, x, w)


def test_program_file_keeps_rules_and_costs() -> None:
    x, w = random(16, 32), random(32, 16, seed=1)
    program = sw.Program.trace(product_kernel, x, w)
    read = sw.Program.from_stablehlo(program.to_stablehlo())
    assert read.fingerprint == program.fingerprint
    plans = [sw.plan(p, topology=TOPOLOGY, mesh=MESH) for p in (program, read)]
    assert plans[0].data.kernels == plans[1].data.kernels
    assert plans[0].estimate == plans[1].estimate
    assert plans[0].estimate.matrix_flops == 2 * 16 * 32 * 16


def test_marks_are_in_one_order_whatever_the_hash_seed() -> None:
    """Else a program would have another fingerprint in every process."""
    names = "one two three four five six seven"
    kernel = sw.kernel(lambda x: x, rule=f"{names} -> {names}", whole=names, flops=0.0)
    x = jax.ShapeDtypeStruct((1,) * 7, jnp.float32)
    assert list(kernel.describe([x], [x], ["f32"]).whole) == sorted(names.split())


def test_what_a_kernel_allocates_counts_as_memory() -> None:
    def peak(temp_bytes: str | None) -> float:
        kernel = sw.kernel(
            plain_product, rule="m k, k n -> m n", whole="n", flops=0.0, temp_bytes=temp_bytes
        )
        x, w = random(16, 32), random(32, 16)
        plan = sw.plan(
            kernel, x, w, topology=TOPOLOGY, mesh={"x": 8}, pinned={"[0]": P("x"), "[1]": P()}
        )
        assert plan.data.kernels[0].in_specs == [[["x"], []], [[], []]]
        return plan.estimate.peak_memory_bytes

    assert peak("m * 1e6") == pytest.approx(peak(None) + 2 * 1e6)


def test_exported_constraints_tell_the_specs_of_kernels() -> None:
    x, w = random(16, 32), random(32, 16, seed=1)
    prepared, problem = _choice_problem(product_kernel, x, w)
    nodes = problem.node_graph
    (node,) = [nodes.node_of_op[op.id] for op in nodes.graph.ops if "kernel" in op.detail]
    choices = [0] * len(problem.strategies)
    choices[node] = problem.strategies[node].tolist().index([0, 1])
    code = constraints_code(_planned(prepared, problem, tuple(choices)).data)
    assert (
        "kernel = jax.shard_map(kernel, in_specs=(P('data', 'model'), P('model',),), "
        "out_specs=P('data',), check_vma=False)  # product, results added up over model"
    ) in code


def test_flops_count_in_the_type_of_the_largest_operand() -> None:
    """197 TFLOP/s in bf16 on v5e, as far as large products reach them, whatever comes first."""
    kernel = sw.kernel(
        lambda i, x: x, rule="m, m n -> m n", whole="n", flops=1e12, hbm_bytes=1.0
    )  # fmt: skip
    i, x = jnp.zeros(16, jnp.int8), jnp.zeros((16, 16), jnp.bfloat16)
    plan = sw.plan(kernel, i, x, topology="v5e:1x1", mesh={"x": 1})
    assert plan.estimate.compute_time_s == pytest.approx(
        1e12 / (197e12 * matmul_efficiency(plan.logical_mesh.slice.chip)), rel=1e-3
    )


def test_scalars_and_single_elements_go_through_a_kernel() -> None:
    scaled = sw.kernel(lambda x, s: x * s, rule="n, -> n", flops=0.0)

    def fn(x: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scaled(x, s), scaled(x[:1], s)

    x, s = random(16), jnp.float32(3)
    plan = sw.plan(fn, x, s, topology=TOPOLOGY, mesh=MESH, pinned={"[0]": P("data")})
    same(plan.jit(fn)(x, s), (3 * x, 3 * x[:1]))


DAMAGE = {
    "not JSON": ('{\\22name', "{", "damaged"),
    "a factor that is not there": (':[\\22k\\22]', ':[\\22z\\22]', "damaged"),
    "other sizes": ('\\22m\\22:16', '\\22m\\22:17', "not those of its arrays"),
    "code": ("2 * m", "open(m)", "is not understood"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_kernel_is_refused(case: str) -> None:
    right, wrong, told = DAMAGE[case]
    program = sw.Program.trace(product_kernel, random(16, 32), random(32, 16))
    with program.module() as module:
        text = module.operation.get_asm()
    assert right in text
    damaged = sw.Program.from_stablehlo(text.replace(right, wrong))
    with pytest.raises(InputError, match=told):
        sw.plan(damaged, topology=TOPOLOGY, mesh=MESH)


def test_a_kernel_has_no_gradient_of_its_own() -> None:
    with pytest.raises(InputError, match=r"no gradient .* jax.custom_vjp"):
        jax.grad(lambda x: product_kernel(x, x).sum())(random(4, 4))


def test_arrays_from_around_the_kernel_must_be_its_arguments() -> None:
    def scale(x: jax.Array, y: jax.Array) -> jax.Array:
        kernel = sw.kernel(lambda x: x * y, rule="n -> n", flops=0.0, name="scaled")
        result: jax.Array = kernel(x)
        return result

    with pytest.raises(InputError, match=r"kernel scaled: .* Pass them as arguments"):
        jax.jit(scale)(random(4), random(4))


def test_constants_inside_a_kernel_are_kept() -> None:
    table = jnp.asarray(random(16))
    kernel = sw.kernel(lambda x: x + table, rule="m n -> m n", whole="n", flops=0.0)
    x = random(8, 16)
    same(jax.jit(kernel)(x), x + table)
    plan = sw.plan(kernel, x, topology=TOPOLOGY, mesh=MESH, pinned={"[0]": P("data")})
    same(plan.jit(kernel)(x), x + table)


def test_a_kernel_that_needs_whole_arrays_says_so_when_it_is_lowered() -> None:
    def picky(x: jax.Array) -> jax.Array:
        if x.shape[0] != 16:
            raise ValueError("sixteen rows are wanted")
        return x

    kernel = sw.kernel(picky, rule="m -> m", flops=0.0, name="picky")
    plan = sw.plan(kernel, random(16), topology=TOPOLOGY, mesh=MESH, pinned={"[0]": P("data")})
    with pytest.raises(InputError, match=r"kernel picky: .* sixteen rows .* whole="):
        plan.lower(kernel, random(16))


def test_inside_a_shard_map_of_the_user_a_kernel_is_called_as_it_is() -> None:
    mesh = own_mesh()

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        local = jax.shard_map(
            product_kernel, mesh=mesh, in_specs=(P("data"), P(None, "model")),
            out_specs=P("data", "model"), check_vma=False,
        )  # fmt: skip
        return local(x, w) * 2

    x, w = random(16, 32), random(32, 16, seed=1)
    plan = sw.plan(fn, x, w, topology=TOPOLOGY)
    assert plan.data.kernels == []
    same(plan.jit(fn)(x, w), 2 * (x @ w))


def own_mesh() -> Mesh:
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _doubled(x: jax.Array, cost: Any) -> jax.Array:
    from jax.experimental import pallas as pl

    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    call = pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost
    )
    result: jax.Array = call(x)
    return result


def _around_pallas(cost: Any) -> sw.Plan:
    mesh = own_mesh()
    spec = P("data", "model")

    def fn(x: jax.Array) -> jax.Array:
        mapped = jax.shard_map(
            lambda x: _doubled(x, cost), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        result: jax.Array = mapped(x)
        return result

    return sw.plan(fn, random(32, 512), topology=TOPOLOGY)


def test_a_raw_pallas_kernel_in_a_shard_map_is_told_as_unpriced() -> None:
    plan = _around_pallas(None)
    (told,) = plan.data.unpriced_ops
    assert told.startswith("custom_call:tpu_custom_call at ")
    assert "test_kernels.py" in told
    # It is on local arrays already: nothing is replicated for it.
    assert plan.data.replicated_ops == []
    # Its operand and its result, 16 x 128 floats each, are moved all the same.
    moved = 2 * 16 * 128 * 4 / (plan.logical_mesh.slice.chip.device_hbm_bandwidth * 0.85)
    assert plan.estimate.compute_time_s >= moved


def test_a_raw_pallas_kernel_that_tells_its_cost_is_priced() -> None:
    from jax.experimental import pallas as pl

    plan = _around_pallas(pl.CostEstimate(flops=10**12, transcendentals=0, bytes_accessed=10**6))
    assert plan.data.unpriced_ops == []
    chip = plan.logical_mesh.slice.chip
    peak = chip.device_peak_flops("f32") * matmul_efficiency(chip)
    assert plan.estimate.compute_time_s == pytest.approx(1e12 / peak, rel=0.01)


def test_verify_runs_the_planned_kernel_beside_one_device() -> None:
    x, w = random(16, 32), random(32, 16, seed=1)
    plan = sw.plan(product_kernel, x, w, topology=TOPOLOGY, mesh=MESH, pinned={"[0]": P("data")})
    found = sw.verify(plan, product_kernel, x, w, compiler="cpu")
    assert found.fits
    assert found.largest_difference < 1e-5


def test_verify_needs_the_functions_of_kernels() -> None:
    program = sw.Program.trace(product_kernel, random(16, 32), random(32, 16))
    read = sw.Program.from_stablehlo(program.to_stablehlo())
    plan = sw.plan(read, topology=TOPOLOGY, mesh=MESH)
    with pytest.raises(InputError, match=r"does not hold the function of kernel product"):
        sw.verify(plan, read, compiler="cpu")
