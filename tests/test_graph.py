"""The op graph of small programs: loops, branches, regions, and what each operation tells."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.graph_reader import build_graph
from shardwright.planner.program import Program
from shardwright.planner.tracing import mesh_context

F32 = jnp.float32


def graph_of(fn: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> OpGraph:
    args = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
    return build_graph(Program.trace(fn, *args, **options))


def ops_named(graph: OpGraph, name: str) -> list[Op]:
    return [op for op in graph.ops if op.name == f"stablehlo.{name}"]


LOOP = """
func.func @main(%x: tensor<4xf32>) -> (tensor<i32>, tensor<i32>, tensor<4xf32>) {{
  %start = stablehlo.constant dense<{start}> : tensor<i32>
  %limit = stablehlo.constant dense<{limit}> : tensor<i32>
  %0:3 = stablehlo.while(%i = %start, %n = %limit, %c = %x)
      : tensor<i32>, tensor<i32>, tensor<4xf32>
  cond {{
    %more = stablehlo.compare {compare}, %i, {bound} : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  }} do {{
    %step = stablehlo.constant dense<{step}> : tensor<i32>
    %next = stablehlo.add %i, %step : tensor<i32>
    %left = {handed_on} : tensor<i32>
    %y = stablehlo.tanh %c : tensor<4xf32>
    stablehlo.return %next, %left, %y : tensor<i32>, tensor<i32>, tensor<4xf32>
  }}
  return %0#0, %0#1, %0#2 : tensor<i32>, tensor<i32>, tensor<4xf32>
}}
"""
SUBTRACT, KEEP = "stablehlo.subtract %n, %step", "stablehlo.minimum %n, %n"
COUNTED = {
    "less than": ({}, 10),
    "less than or equal": ({"compare": "LE"}, 11),
    "step of three": ({"step": 3}, 4),
    "start above zero": ({"start": 7}, 3),
    "never": ({"start": 10}, 0),
    "limit below the start": ({"start": 12, "limit": 3}, 0),
}


@pytest.mark.parametrize("case", COUNTED)
def test_passes_of_a_counting_loop(case: str) -> None:
    changes, passes = COUNTED[case]
    defaults = {"start": 0, "limit": 10, "compare": "LT", "bound": "%limit", "step": 1}
    text = LOOP.format(**{**defaults, "handed_on": KEEP, **changes})
    graph = build_graph(Program.from_stablehlo(text))
    (loop,) = graph.loops
    assert (loop.trips, loop.known_trips) == (passes, True)
    (tanh,) = ops_named(graph, "tanh")
    assert tanh.trips == passes


def test_trip_counts_are_read_from_shardy_s_constants_too() -> None:
    # What stablehlo.constant becomes when Shardy imports a module.
    text = LOOP.format(
        start=0, limit=10, compare="LT", bound="%limit", step=1, handed_on=KEEP
    ).replace("stablehlo.constant", "sdy.constant")
    (loop,) = build_graph(Program.from_stablehlo(text)).loops
    assert (loop.trips, loop.known_trips) == (10, True)


UNKNOWN = {
    "limit that changes on the way": {"bound": "%n", "handed_on": SUBTRACT},
    "counting down": {"step": -1, "start": 10, "limit": 0, "compare": "GT"},
    "step of zero": {"step": 0},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_other_loops_count_once_and_say_so(case: str) -> None:
    defaults = {"start": 0, "limit": 10, "compare": "LT", "bound": "%limit", "step": 1}
    text = LOOP.format(**{**defaults, "handed_on": KEEP, **UNKNOWN[case]})
    (loop,) = build_graph(Program.from_stablehlo(text)).loops
    assert (loop.trips, loop.known_trips) == (1, False)


def test_limit_that_the_loop_carries_unchanged_is_known() -> None:
    text = LOOP.format(
        start=0, limit=10, compare="LT", bound="%n", step=1, handed_on="stablehlo.abs %n"
    ).replace("return %next, %left", "return %next, %n")
    (loop,) = build_graph(Program.from_stablehlo(text)).loops
    assert (loop.trips, loop.known_trips) == (10, True)


def test_loop_that_ends_on_a_float_is_unknown() -> None:
    def grow(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c[0] < 3.0, lambda c: (c[0] + 1.0, c[1] * 2), (0.0, x))[1]

    (loop,) = graph_of(grow, (4,)).loops
    assert not loop.known_trips


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_carries_and_stacks(reverse: bool) -> None:
    def scan(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.scan(lambda c, w: (c @ w, c), x, weights, reverse=reverse)

    graph = graph_of(scan, (4, 8), (5, 8, 8))
    (loop,) = graph.loops
    assert loop.trips == 5
    by_shape = {graph.values[c.argument].shape: c for c in loop.carries}
    assert by_shape[5, 8, 8].invariant
    assert not by_shape[4, 8].invariant
    assert by_shape[5, 8, 8].init == graph.arguments[1]
    assert by_shape[4, 8].result == graph.results[0]
    assert by_shape[5, 4, 8].result == graph.results[1]
    (dot,) = ops_named(graph, "dot_general")
    assert (dot.trips, dot.loop) == (5, loop.id)
    assert loop.first_op <= dot.id < loop.last_op
    assert graph.value_trips(by_shape[4, 8].argument) == 5
    assert graph.value_trips(graph.arguments[1]) == 1


def test_loops_know_the_loop_around_them() -> None:
    def nested(x: jax.Array) -> jax.Array:
        inner = lambda y: lax.fori_loop(0, 3, lambda _, z: jnp.sin(z), y)  # noqa: E731
        return lax.fori_loop(0, 4, lambda _, y: inner(y) + inner(y * 2), x)

    graph = graph_of(nested, (4, 8))
    outer, first, second = graph.loops
    assert (outer.parent, first.parent, second.parent) == (-1, outer.id, outer.id)
    assert [op.trips for op in ops_named(graph, "sine")] == [12, 12]


def test_branches_run_with_equal_likelihood() -> None:
    def choose(x: jax.Array) -> jax.Array:
        branches = [jnp.sin, lambda y: y @ y.T @ y, jnp.cos]
        return lax.fori_loop(0, 6, lambda i, y: lax.switch(i % 3, branches, y), x)

    graph = graph_of(choose, (4, 8))
    assert [op.trips for op in ops_named(graph, "sine")] == [2]
    assert [op.trips for op in ops_named(graph, "dot_general")] == [2, 2]
    (join,) = graph.joins
    assert len(join.yields) == 3
    assert graph.ops[join.op].name == "stablehlo.case"


def test_value_known_in_every_sharding_is_free() -> None:
    def fn(x: jax.Array) -> jax.Array:
        positions = jnp.arange(8.0)[:, None] * jnp.ones((8, 4))
        return jnp.sin(positions) + x

    graph = graph_of(fn, (8, 4))
    free = {op.name.removeprefix("stablehlo."): graph.values[op.results[0]].free
            for op in graph.ops}  # fmt: skip
    assert free["iota"] and free["sine"]
    assert not free["add"]


def test_sum_of_a_free_value_is_not_free() -> None:
    # Sharded, it needs an all-reduce.
    graph = graph_of(lambda x: x + jnp.arange(8.0).sum(), (4,))
    (reduction,) = ops_named(graph, "reduce")
    assert not graph.values[reduction.results[0]].free


def test_region_of_a_shard_map_works_on_local_arrays() -> None:
    def fn(x: jax.Array) -> jax.Array:
        local = lambda y: lax.psum(y @ y.T, "model")  # noqa: E731
        return jax.shard_map(local, in_specs=P("data", "model"), out_specs=P("data"))(x)

    with mesh_context({"data": 2, "model": 4}):
        graph = graph_of(fn, (16, 32))
    (dot,) = ops_named(graph, "dot_general")
    assert dot.manual
    assert graph.values[dot.results[0]].shape == (8, 8)
    (reduce,) = ops_named(graph, "all_reduce")
    assert {frozenset(g) for g in reduce.detail["groups"]} == {
        frozenset({0, 1, 2, 3}),
        frozenset({4, 5, 6, 7}),
    }
    (region,) = [op for op in graph.ops if op.name == "sdy.manual_computation"]
    # Each set of axes that shards together is one factor, seen from outside.
    assert region.rule is not None
    assert region.rule.sizes == (2, 4)
    assert region.rule.operands == (((0,), (1,)),)
    assert region.rule.results == (((0,), ()),)


def test_source_is_the_line_of_the_users_code() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    (sine,) = ops_named(graph_of(fn, (4,)), "sine")
    lines, first = inspect.getsourcelines(fn)
    assert sine.source == f"{Path(__file__)}:{first + len(lines) - 1}"


def test_operations_of_one_place_are_told_apart_by_number() -> None:
    def fn(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.sin(x)
        return x

    keys = [op.key for op in ops_named(graph_of(fn, (4,)), "sine")]
    assert [key.ordinal for key in keys] == [0, 1, 2]
    assert len({(key.location, key.op) for key in keys}) == 1


def test_keys_do_not_depend_on_jit() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ x.T)

    plain, jitted = (graph_of(f, (4, 8)) for f in (fn, jax.jit(fn)))
    assert [op.key for op in plain.ops] == [op.key for op in jitted.ops]


def test_networkx_graph_runs_from_producers_to_readers() -> None:
    graph = graph_of(lambda a, b: jnp.tanh(a @ b) + a.sum(), (8, 8), (8, 8))
    found = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(found)
    (dot,), (tanh,), (add,) = (ops_named(graph, n) for n in ("dot_general", "tanh", "add"))
    assert found.nodes[dot.id]["name"] == "stablehlo.dot_general"
    assert found.edges[dot.id, tanh.id]["shape"] == (8, 8)
    assert set(found.predecessors(add.id)) >= {tanh.id}


WINDOWS: dict[str, tuple[Callable[[jax.Array], jax.Array], dict[int, int]]] = {
    # By hand: elements of a neighbour that the windows at the end of a shard reach into.
    "3 wide, padded alike": (lambda x: conv(x, 3, 1, "SAME"), {1: 1}),
    "5 wide, padded alike": (lambda x: conv(x, 5, 1, "SAME"), {1: 2}),
    "3 wide, spread by 2": (lambda x: conv(x, 3, 1, "SAME", dilation=2), {1: 2}),
    "4 wide, unpadded": (lambda x: conv(x, 4, 1, "VALID"), {1: 3}),
    "windows beside each other": (lambda x: conv(x, 2, 2, "VALID"), {1: 0}),
    "pooling": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"),
        {0: 0, 1: 0, 2: 0},
    ),
    "overlapping pooling": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 2, 1), "VALID"),
        {0: 0, 1: 1, 2: 0},
    ),
}


def conv(x: jax.Array, width: int, stride: int, padding: str, dilation: int = 1) -> jax.Array:
    kernel = jnp.ones((width, 4, 4), F32)
    return lax.conv_general_dilated(
        x, kernel, (stride,), padding, rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )  # fmt: skip


@pytest.mark.parametrize("case", WINDOWS)
def test_reach_of_a_window(case: str) -> None:
    fn, reach = WINDOWS[case]
    graph = graph_of(fn, (2, 16, 4))
    (op,) = [op for op in graph.ops if "reach" in op.detail]
    assert op.detail["reach"] == reach


def test_halo_of_a_convolution_is_what_xla_sends() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "rows"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.NamedSharding(mesh, P("data", "rows"))
    compiled = (
        jax.jit(lambda x: conv(x, 5, 1, "SAME"), in_shardings=rows, out_shardings=rows)
        .lower(jax.ShapeDtypeStruct((2, 64, 4), F32))
        .compile()
        .as_text()
    )
    assert compiled is not None
    sent = {
        line.split("= ")[1].split("{")[0]
        for line in compiled.splitlines()
        if " collective-permute(" in line
    }
    # One sequence a device, two rows of four features from either side.
    assert sent == {"f32[1,2,4]"}
