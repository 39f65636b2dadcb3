"""Shardings put on modules: where the constraints go, and what the compiler makes of them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.hardware_profiles.mesh import AxisRef, meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner import mlir
from shardwright.planner.annotate import annotate
from shardwright.planner.constraints import Demand, Site, ValueConstraint, value_constraints
from shardwright.planner.graph import OpKey
from shardwright.planner.graph_reader import build_graph
from shardwright.planner.prepared import prepare
from shardwright.planner.pricing import build_problem
from shardwright.planner.program import Program

MESH = {"x": 2, "y": 4}
X, Y = AxisRef("x"), AxisRef("y")
ROWS, COLUMNS, WHOLE = ((X,), ()), ((), (X,)), ((), ())


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def annotated(program: Program, *constraints: ValueConstraint, **options: Any) -> str:
    with program.module() as module:
        annotate(module, MESH, constraints, **options)
        assert module.operation.verify()
        return str(module)


def constraint(
    site: Site, made: Any, demands: list[tuple[Site, Any]], copy: Any = None
) -> ValueConstraint:
    return ValueConstraint(site, made, copy, tuple(Demand(*d) for d in demands), "")


def key(program: Program, name: str, ordinal: int = 0) -> OpKey:
    found = [op.key for op in build_graph(program).ops if op.name == f"stablehlo.{name}"]
    return found[ordinal]


def test_arguments_and_results_carry_attributes() -> None:
    program = Program.trace(lambda a: a * 2, f32(8, 8))
    text = annotated(program, in_shardings=[ROWS], out_shardings=[COLUMNS])
    assert '%arg0: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}' in text
    assert '-> (tensor<8x8xf32> {jax.result_info = "result", sdy.sharding' in text
    assert text.count("sdy.sharding_constraint") == 0


def test_both_sides_of_a_reshard_are_constrained() -> None:
    program = Program.trace(lambda a: jnp.cos(jnp.sin(a)), f32(8, 8))
    sine, cosine = (key(program, name) for name in ("sine", "cosine"))
    made = constraint(Site("result", 0, sine), ROWS, [(Site("operand", 0, cosine), COLUMNS)])
    lines = [line.strip() for line in annotated(program, made).splitlines() if "%" in line]
    text = "\n".join(lines)
    assert re.search(
        r'%0 = stablehlo.sine .*\n%1 = sdy.sharding_constraint %0 <@mesh, \[\{"x"\}, \{\}\]>.*\n'
        r'%2 = sdy.sharding_constraint %1 <@mesh, \[\{\}, \{"x"\}\]>.*\n%3 = stablehlo.cosine %2',
        text,
    )


def test_readers_that_need_the_same_sharding_share_one_reshard() -> None:
    program = Program.trace(lambda a: jnp.cos(a) + jnp.sin(a), f32(8, 8))
    sites = [Site("operand", 0, key(program, name)) for name in ("cosine", "sine")]
    made = constraint(Site("argument", 0), ROWS, [(site, COLUMNS) for site in sites])
    assert annotated(program, made).count("sdy.sharding_constraint") == 1


def test_readers_are_given_the_copy_and_reshard_from_it() -> None:
    program = Program.trace(lambda a: jnp.cos(a) + jnp.sin(a), f32(8, 8))
    cosine, sine = (Site("operand", 0, key(program, name)) for name in ("cosine", "sine"))
    made = constraint(
        Site("argument", 0), ROWS, [(cosine, None), (sine, COLUMNS)], copy=WHOLE
    )  # fmt: skip
    text = annotated(program, made)
    copy = re.search(r"(%\d+) = sdy.sharding_constraint %arg0 <@mesh, \[\{\}, \{\}\]>", text)
    assert copy is not None
    assert f"stablehlo.cosine {copy[1]} " in text
    assert re.search(rf"sdy.sharding_constraint {copy[1]} <@mesh, \[\{{\}}, \{{\"x\"\}}\]>", text)


def test_reader_that_needs_what_was_made_does_not_read_the_copy() -> None:
    program = Program.trace(lambda a: jnp.cos(a) + jnp.sin(a), f32(8, 8))
    cosine, sine = (Site("operand", 0, key(program, name)) for name in ("cosine", "sine"))
    made = constraint(Site("argument", 0), ROWS, [(cosine, None), (sine, ROWS)], copy=WHOLE)
    text = annotated(program, made)
    assert "stablehlo.sine %arg0 " in text
    assert text.count("sdy.sharding_constraint") == 1


def test_product_that_is_only_transposed_is_constrained_after_its_transposition() -> None:
    """The compiler cannot turn a product around from which a constraint keeps the transposition."""
    program = Program.trace(lambda a, b: jnp.sin((a @ b).T), f32(8, 16), f32(16, 32))
    product, transpose, sine = (key(program, n) for n in ("dot_general", "transpose", "sine"))
    made = constraint(
        Site("result", 0, product), ROWS, [(Site("operand", 0, transpose), None)]
    )  # fmt: skip
    pattern = (
        r"%1 = stablehlo.transpose %0.*\n *"
        r'%2 = sdy.sharding_constraint %1 <@mesh, \[\{\}, \{"x"\}\]>.*\n *%3 = stablehlo.sine %2'
    )
    assert re.search(pattern, annotated(program, made))
    own = constraint(
        Site("result", 0, transpose), COLUMNS, [(Site("operand", 0, sine), None)]
    )  # fmt: skip
    assert re.search(pattern, annotated(program, made, own))
    assert annotated(program, made, own).count("sdy.sharding_constraint") == 1


def test_scores_are_constrained_before_their_transposition() -> None:
    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,btd->bst", q, k).transpose(0, 2, 1)

    program = Program.trace(scores, f32(2, 16, 4), f32(2, 16, 4))
    product, transpose = (key(program, name) for name in ("dot_general", "transpose"))
    whole: Any = ((), (), ())
    made = constraint(Site("result", 0, product), whole, [(Site("operand", 0, transpose), None)])
    assert re.search(r"stablehlo.dot_general .*\n *%1 = sdy.sharding_con", annotated(program, made))


def test_product_is_resharded_after_its_transposition() -> None:
    program = Program.trace(lambda a, b: jnp.sin((a @ b).T), f32(8, 16), f32(16, 32))
    product, transpose, sine = (key(program, n) for n in ("dot_general", "transpose", "sine"))
    resharded = constraint(
        Site("result", 0, product), WHOLE, [(Site("operand", 0, transpose), ROWS)]
    )  # fmt: skip
    assert re.search(
        r"%1 = stablehlo.transpose %0.*\n *%2 = sdy.sharding_constraint %1 <@mesh, \[\{\}, \{\}\].*"
        r'\n *%3 = sdy.sharding_constraint %2 <@mesh, \[\{\}, \{"x"\}\]>.*\n *%4 = stablehlo.sine',
        annotated(program, resharded),
    )
    # Shardy's own passes join a sum and the cut of it only side by side.
    text = annotated(program, resharded, to_compile=False)
    assert re.search(r"stablehlo.dot_general .*\n *%1 = sdy.sharding_constraint %0", text)
    own = constraint(
        Site("result", 0, transpose), COLUMNS, [(Site("operand", 0, sine), None)]
    )  # fmt: skip
    assert annotated(program, resharded, own) == annotated(program, resharded)


def test_every_sharding_on_the_way_of_a_reshard_is_constrained() -> None:
    """Shardy makes room by a collective-permute, then an all-to-all, then an all-gather."""
    program = Program.trace(lambda a: jnp.cos(jnp.sin(a)), f32(8, 8))
    sine, cosine = (key(program, name) for name in ("sine", "cosine"))
    before: Any = ((X,), (Y,))
    made = constraint(Site("result", 0, sine), before, [(Site("operand", 0, cosine), COLUMNS)])
    lines = [
        line for line in annotated(program, made).splitlines() if "sharding_constraint" in line
    ]
    shardings = [line[line.index("[") : line.rindex("]") + 1] for line in lines]
    assert shardings == [
        '[{"x"}, {"y"}]',
        '[{"y":(1)2}, {"x", "y":(2)2}]',
        '[{}, {"x", "y":(2)2}]',
        '[{}, {"x"}]',
    ]


def test_array_cut_on_two_dimensions_is_gathered_one_at_a_time() -> None:
    program = Program.trace(lambda a: jnp.cos(jnp.sin(a)), f32(8, 8))
    sine, cosine = (key(program, name) for name in ("sine", "cosine"))
    before: Any = ((Y,), (X,))
    made = constraint(Site("result", 0, sine), before, [(Site("operand", 0, cosine), WHOLE)])
    lines = [
        line for line in annotated(program, made).splitlines() if "sharding_constraint" in line
    ]
    # x over 2 devices first, so that the larger gather ends with the whole array.
    assert ['[{"y"}, {"x"}]' in lines[0], '[{"y"}, {}]' in lines[1], "[{}, {}]" in lines[2]] == [
        True
    ] * 3


def test_a_mesh_of_the_program_is_used_again() -> None:
    text = 'sdy.mesh @own = <["x"=2, "y"=4]>\nfunc.func @main(%a: tensor<8xf32>) -> tensor<8xf32> '
    program = Program.from_stablehlo(text + "{ return %a : tensor<8xf32> }")
    assert "sdy.sharding<@own" in annotated(program, in_shardings=[((X,),)])


NESTED = """func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %out:2 = stablehlo.while(%i = %zero, %c = %x) : tensor<i32>, tensor<8x8xf32>
  cond {
    %p = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %next = stablehlo.add %i, %one : tensor<i32>
    %in:2 = stablehlo.while(%j = %zero, %d = %c) : tensor<i32>, tensor<8x8xf32>
    cond {
      %q = stablehlo.compare LT, %j, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %q : tensor<i1>
    } do {
      %after = stablehlo.add %j, %one : tensor<i32>
      %y = stablehlo.tanh %d : tensor<8x8xf32>
      stablehlo.return %after, %y : tensor<i32>, tensor<8x8xf32>
    }
    stablehlo.return %next, %in#1 : tensor<i32>, tensor<8x8xf32>
  }
  return %out#1 : tensor<8x8xf32>
}"""


def random_constraints(program: Program, seed: int) -> tuple[ValueConstraint, ...]:
    prepared = prepare(program)
    (mesh, *_) = meshes_for_shape(parse_slice("v5e:2x4"), MESH)
    problem = build_problem(prepared.nodes, prepared.fusions, prepared.buffers, mesh)
    rng = np.random.default_rng(seed)
    return value_constraints(problem, [int(rng.integers(len(r))) for r in problem.strategies])


@pytest.mark.parametrize("seed", range(5))
def test_loops_that_end_together_keep_their_own_yields(seed: int) -> None:
    program = Program.from_stablehlo(NESTED)
    with program.module() as module:
        annotate(module, MESH, random_constraints(program, seed))
        assert module.operation.verify()


def test_every_yield_of_a_value_yielded_twice_is_found() -> None:
    def twice(p: jax.Array, x: jax.Array) -> Any:
        return lax.cond(p > 0, lambda y: (jnp.sin(y),) * 2, lambda y: (y * 2, y * 3), x)

    program = Program.trace(twice, jax.ShapeDtypeStruct((), jnp.int32), f32(8, 8))
    sites = {
        (demand.site.index, demand.site.branch)
        for c in random_constraints(program, 0)
        for demand in c.demands
        if demand.site.kind == "yield"
    }
    assert sites == {(0, 0), (1, 0), (0, 1), (1, 1)}


WRONG: dict[str, ValueConstraint] = {
    "no such operation": constraint(Site("result", 0, OpKey("", "stablehlo.dot", 0)), ROWS, []),
    "no such argument": constraint(Site("argument", 7), ROWS, []),
    "another rank": constraint(Site("argument", 0), ((X,),), []),
    "no such reader": constraint(
        Site("argument", 0), ROWS, [(Site("operand", 9, OpKey("sin", "stablehlo.sine", 0)), ROWS)]
    ),
    "no such result": constraint(Site("argument", 0), ROWS, [(Site("return", 5), ROWS)]),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_constraint_of_another_program_is_told(what: str) -> None:
    program = Program.trace(jnp.sin, f32(8, 8))
    with pytest.raises(sw.InputError, match="Plan this program again"):
        annotated(program, WRONG[what])


# -- what the compiler makes of annotations --------------------------------------------------------


def test_constraints_are_respected_by_compilation_and_attributes_on_operations_are_not() -> None:
    plan = sw.plan(
        lambda a: jnp.cos(jnp.sin(a)) * 2, f32(8, 8), topology="v5e:2x4", mesh=MESH,
        pinned={"[0]": P("x")},
    )  # fmt: skip
    lowered = plan.lower(lambda a: jnp.cos(jnp.sin(a)) * 2, jnp.ones((8, 8)))
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        for op in mlir.walk_block(mlir.entry_block(mlir.main_function(module))):
            if op.name == "stablehlo.sine":
                text = '#sdy.sharding_per_value<[<@mesh, [{}, {"y"}]>]>'
                op.attributes["sdy.sharding"] = mlir.ir.Attribute.parse(text)
    compiled = lowered.compile().as_text()
    # Respected, the attribute would move x to rows and y to columns and back.
    assert compiled is not None
    assert not re.findall(r"all-gather|all-to-all|collective-permute", compiled)


@pytest.mark.parametrize("rows", [1004, 1008])
def test_uneven_intermediates_compile_and_run(rows: int) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spec = jax.NamedSharding(mesh, P(("x", "y")))
    fn = jax.jit(lambda a: lax.with_sharding_constraint(jnp.sin(a), spec) * 2)
    x = np.random.default_rng(0).standard_normal((rows, 3)).astype(np.float32)
    np.testing.assert_allclose(fn(x), np.sin(x) * 2, rtol=1e-5)


def test_part_of_an_axis_compiles_and_runs() -> None:
    """Shardy's reshards go through parts of axes, so constraints may name them."""
    fn = lambda a: jnp.sin(a) * 2  # noqa: E731
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    lowered = jax.jit(fn, in_shardings=jax.NamedSharding(mesh, P("x"))).lower(x)
    module = lowered.compiler_ir("stablehlo")
    site = Site("result", 0, key(Program.trace(fn, f32(8, 8)), "sine"))
    with module.context:
        annotate(module, MESH, [constraint(site, ((AxisRef("y", 1, 2),), ()), [])])
        assert '"y":(1)2' in str(module)
    np.testing.assert_allclose(lowered.compile()(x), np.sin(x) * 2, rtol=1e-5)


def test_region_of_a_shard_map_is_planned_around_and_runs() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        local = lambda a, b: lax.psum(a @ b, "y")  # noqa: E731
        region = jax.shard_map(local, in_specs=(P("x", "y"), P("y")), out_specs=P("x"))
        return region(jnp.sin(x), w) * 2

    plan = sw.plan(fn, f32(16, 16), f32(16, 16), topology="v5e:2x4", mesh=MESH)
    assert [(c.kind, c.axes) for c in plan.estimate.collectives if c.op.endswith("all_reduce")] == [
        ("all_reduce", ["y"])
    ]
    x, w = np.random.default_rng(0).standard_normal((2, 16, 16)).astype(np.float32)
    np.testing.assert_allclose(plan.jit(fn)(x, w), np.sin(x) @ w * 2, rtol=1e-4, atol=1e-4)


def test_constraints_that_the_program_writes_itself_are_kept() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x * 2, P("y", "x")) + 1

    plan = sw.plan(fn, f32(16, 16), topology="v5e:2x4", mesh=MESH)
    (own,) = [c for c in plan.data.constraints if c.site.op == "sdy.sharding_constraint"]
    assert own.made == [["y"], ["x"]]
    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    np.testing.assert_allclose(plan.jit(fn)(x), x * 2 + 1)
