"""What the installed jaxlib must be able to do, and what its partitioner is relied on to do."""

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import passmanager

from shardwright.planner import mlir
from shardwright.planner.graph_reader import build_graph
from shardwright.planner.program import Program

F32 = jnp.float32


def _graph(fn: object, *shapes: tuple[int, ...]) -> object:
    return build_graph(Program.trace(fn, *(jax.ShapeDtypeStruct(s, F32) for s in shapes)))


def _rule(graph: object, name: str) -> object:
    return next(op.rule for op in graph.ops if op.name == f"stablehlo.{name}")


@pytest.mark.parametrize("name", mlir.REQUIRED_PASSES)
def test_jaxlib_has_the_pass(name: str) -> None:
    with mlir.new_context():
        passmanager.PassManager.parse(f"builtin.module({name})")


def test_contracting_dimension_of_a_dot_is_a_reduction_factor() -> None:
    rule = _rule(_graph(lambda a, b: a @ b, (4, 8), (8, 16)), "dot_general")
    (contracted,) = rule.reduction
    assert rule.sizes[contracted] == 8
    assert rule.operands == (((0,), (contracted,)), ((contracted,), (1,)))
    assert rule.results == (((0,), (1,)),)


def test_sliced_layer_dimension_cannot_stay_sharded() -> None:
    graph = _graph(lambda w, i: jax.lax.dynamic_index_in_dim(w, i.astype(int)[0]), (4, 8), (1,))
    rule = _rule(graph, "dynamic_slice")
    assert {rule.sizes[f] for f in rule.replicated} == {4}


def test_merged_dimension_has_its_factors_major_to_minor() -> None:
    rule = _rule(_graph(lambda x: x.reshape(32, 8), (4, 8, 8)), "reshape")
    assert rule.results[0][0] == (rule.operands[0][0][0], rule.operands[0][1][0])


def test_every_operation_of_a_scan_is_counted_by_its_passes() -> None:
    def scan(x: jax.Array, w: jax.Array) -> jax.Array:
        def outer(c: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ layer), c), None

        return jax.lax.scan(outer, x, w)[0]

    graph = _graph(scan, (4, 8), (5, 8, 8))
    (dot,) = [op for op in graph.ops if op.name == "stablehlo.dot_general"]
    assert dot.trips == 5 * 3
    assert [loop.trips for loop in graph.loops] == [5, 3]


def test_loop_that_ends_on_data_is_told_as_unknown() -> None:
    loop = lambda x: jax.lax.while_loop(lambda y: y.sum() < 9.0, lambda y: y * 2.0, x)  # noqa: E731
    (found,) = _graph(loop, (4,)).loops
    assert not found.known_trips


def test_operations_that_nobody_reads_are_dropped() -> None:
    def wasteful(x: jax.Array) -> jax.Array:
        jnp.sin(x).sum()
        return x + 1.0

    assert "stablehlo.sine" not in {op.name for op in _graph(wasteful, (4,)).ops}


def test_what_depends_on_iotas_alone_is_free() -> None:
    def mask(x: jax.Array) -> jax.Array:
        seen = jnp.arange(8)[:, None] >= jnp.arange(8)[None, :]
        return jnp.where(seen, x, 0.0)

    graph = _graph(mask, (8, 8))
    compare = next(op for op in graph.ops if op.name == "stablehlo.compare")
    assert graph.values[compare.results[0]].free


def test_operations_keep_their_keys_in_a_lowering_for_another_platform() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.tanh(x @ w) @ w)

    keys = []
    for platform in ("tpu", "cpu"):
        shapes = [jax.ShapeDtypeStruct((8, 8), F32)] * 2
        text = jax.jit(step).trace(*shapes).lower(lowering_platforms=(platform,))
        asm = text.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True)
        graph = build_graph(Program.from_stablehlo(asm))
        keys.append([op.key for op in graph.ops if op.name == "stablehlo.dot_general"])
    assert keys[0] == keys[1] and len(set(keys[0])) == 2
