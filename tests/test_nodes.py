"""Which operations share one sharding decision, and how each node sees its values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.planner.graph_reader import build_graph
from shardwright.planner.nodes import NodeGraph, build_nodes
from shardwright.planner.program import Program

F32 = jnp.float32


def nodes_of(fn: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> NodeGraph:
    args = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
    return build_nodes(build_graph(Program.trace(fn, *args, **options)))


def together(nodes: NodeGraph) -> list[set[str]]:
    """The operations that share a node, by name, in order; constants and the like left out."""
    members: dict[int, set[str]] = {}
    for op in nodes.graph.ops:
        if nodes.node_of_op[op.id] >= 0:
            name = op.name.removeprefix("stablehlo.")
            members.setdefault(nodes.node_of_op[op.id], set()).add(name)
    return list(members.values())


def node_of(nodes: NodeGraph, name: str) -> Any:
    (op,) = [op for op in nodes.graph.ops if op.name.endswith(f".{name}")]
    return nodes.nodes[nodes.node_of_op[op.id]]


def test_chain_of_elementwise_operations_is_one_node() -> None:
    nodes = nodes_of(lambda x, y: jnp.tanh(jnp.sin(x) * y) + 1.0, (4, 8), (4, 8))
    assert together(nodes) == [{"sine", "multiply", "tanh", "add"}]
    assert node_of(nodes, "sine").sizes == (4, 8)


def test_arguments_and_results_decide_for_themselves() -> None:
    nodes = nodes_of(jnp.sin, (4, 8))
    assert [node.kind for node in nodes.nodes] == ["group", "argument", "result"]
    assert [node.exact for node in nodes.nodes] == [False, True, True]
    (argument,) = nodes.graph.arguments
    (use,) = nodes.uses[argument]
    assert use.port.node == node_of(nodes, "sine").id
    assert nodes.producers[argument].node == nodes.argument_nodes[0]


def test_donated_argument_and_its_result_are_one_node() -> None:
    nodes = nodes_of(lambda x: x * 2, (4, 8), donate_argnums=(0,))
    assert nodes.result_nodes == nodes.argument_nodes


def test_dot_ends_a_group_and_begins_another() -> None:
    nodes = nodes_of(lambda x, w: jnp.tanh(jnp.sin(x) @ w), (4, 8), (8, 16))
    assert together(nodes) == [{"sine"}, {"dot_general"}, {"tanh"}]
    dot = node_of(nodes, "dot_general")
    assert dot.kind == "operation"
    assert sorted(dot.sizes) == [4, 8, 16]


def test_contracted_factor_leaves_partial_sums() -> None:
    nodes = nodes_of(lambda x, w: x @ w, (4, 8), (8, 16))
    port = nodes.producers[nodes.graph.results[0]]
    sizes = nodes.nodes[port.node].sizes
    assert [sizes[f] for f in port.partial] == [8]
    assert [[sizes[f] for f in dim] for dim in port.dims] == [[4], [16]]


def test_reduction_joins_what_it_reduces() -> None:
    nodes = nodes_of(lambda x: jnp.exp(x).sum(1), (4, 8))
    assert together(nodes) == [{"exponential", "reduce"}]
    port = nodes.producers[nodes.graph.results[0]]
    assert port.dims == ((0,),)
    assert port.partial == {1}


def test_broadcast_joins_what_it_makes() -> None:
    nodes = nodes_of(lambda x, y: lax.broadcast_in_dim(y, (4, 8), (1,)) + x, (4, 8), (8,))
    assert together(nodes) == [{"broadcast_in_dim", "add"}]
    assert node_of(nodes, "add").sizes == (4, 8)
    (use,) = nodes.uses[nodes.graph.arguments[1]]
    assert use.port.dims == ((1,),)


def test_softmax_sums_and_broadcasts_in_the_node_of_its_rows() -> None:
    nodes = nodes_of(jax.nn.softmax, (4, 8))
    full = node_of(nodes, "exponential")
    assert full.sizes == (4, 8)
    assert full.id == node_of(nodes, "divide").id
    # What is summed is partial where the row is sharded, so reading it again is a use.
    for op in nodes.graph.ops:
        if op.name == "stablehlo.reduce":
            assert nodes.producers[op.results[0]].partial
            assert nodes.uses[op.results[0]]


def test_transpose_joins_with_its_dimensions_exchanged() -> None:
    nodes = nodes_of(lambda x: jnp.sin(x).T * 2.0, (4, 8))
    assert together(nodes) == [{"sine", "transpose", "multiply"}]
    made = nodes.producers[nodes.graph.results[0]].dims
    (argument,) = nodes.graph.arguments
    (use,) = nodes.uses[argument]
    assert made == tuple(reversed(use.port.dims))


def test_adding_the_own_transpose_demands_two_shardings_of_one_value() -> None:
    def fn(x: jax.Array) -> jax.Array:
        y = jnp.sin(x)
        return y + y.T

    nodes = nodes_of(fn, (8, 8))
    (add,) = [op for op in nodes.graph.ops if op.name == "stablehlo.add"]
    rows, columns = nodes.nodes[nodes.node_of_op[add.id]].ops[add.id]
    demanded = ((rows,), (columns,))
    # One of y and its transpose is made in the sharding of the sum; the other is resharded to it.
    as_made = [nodes.producers[v].dims == demanded for v in add.operands]
    assert sorted(as_made) == [False, True]
    for value, agrees in zip(add.operands, as_made, strict=True):
        uses = [use.port.dims for use in nodes.uses.get(value, ()) if use.op == add.id]
        assert uses == ([] if agrees else [demanded])


def test_unit_dimensions_do_not_keep_groups_apart() -> None:
    nodes = nodes_of(lambda x: jnp.sin(x[:, None, :])[:, 0] * 2.0, (4, 8))
    assert len(together(nodes)) == 1
    assert node_of(nodes, "sine").sizes == (4, 8)


def test_merged_dimension_keeps_the_groups_apart() -> None:
    nodes = nodes_of(lambda x: jnp.cos(jnp.sin(x).reshape(32, 16)), (4, 8, 16))
    assert together(nodes) == [{"sine"}, {"reshape"}, {"cosine"}]
    reshape = node_of(nodes, "reshape")
    assert reshape.sizes == (4, 8, 16)
    made = nodes.producers[next(op.results[0] for op in nodes.graph.ops if "reshape" in op.name)]
    assert made.dims == ((0, 1), (2,))


def test_loop_carries_are_nodes_that_every_pass_shares() -> None:
    def scan(x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]

    nodes = nodes_of(scan, (4, 8), (3, 8, 8))
    (loop,) = nodes.graph.loops
    carries = {nodes.graph.values[c.argument].shape: c for c in loop.carries}
    state, stack = carries[4, 8], carries[3, 8, 8]
    made = nodes.producers
    assert nodes.nodes[made[state.argument].node].kind == "carry"
    assert made[state.argument].node == made[state.result].node
    uses = [use for use in nodes.uses[state.yielded] if use.port.node == made[state.argument].node]
    assert [use.trips for use in uses] == [3]
    # The stack is handed on as it is: demanded once before the loop, never yielded.
    into = [use for use in nodes.uses[stack.init] if use.port.node == made[stack.argument].node]
    assert [use.trips for use in into] == [1]


def test_branches_yield_into_one_node() -> None:
    def choose(p: jax.Array, x: jax.Array) -> jax.Array:
        return lax.cond(p > 0, jnp.sin, lambda y: y @ y, x)

    nodes = nodes_of(choose, (), (8, 8))
    (join,) = nodes.graph.joins
    node = nodes.producers[join.result].node
    assert nodes.nodes[node].kind == "join"
    for value in join.yields:
        assert node in {use.port.node for use in nodes.uses[value]}


def test_scalars_and_free_values_are_no_decision() -> None:
    nodes = nodes_of(lambda x, s: x * (s + 1.0) + jnp.arange(8.0), (4, 8), ())
    decided = {v for v in (*nodes.uses, *nodes.producers) if nodes.graph.values[v].shape == ()}
    assert all(not nodes.uses.get(v) for v in decided)
    assert not any(nodes.graph.values[v].free for v in (*nodes.uses, *nodes.producers))


def test_operation_without_a_rule_is_a_node_that_stays_whole() -> None:
    text = """func.func @main(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
      %0 = stablehlo.custom_call @mystery(%x) : (tensor<4x8xf32>) -> tensor<4x8xf32>
      return %0 : tensor<4x8xf32>
    }"""
    nodes = build_nodes(build_graph(Program.from_stablehlo(text)))
    node = nodes.nodes[nodes.node_of_op[0]]
    assert (node.kind, node.sizes) == ("operation", ())
    assert nodes.producers[nodes.graph.results[0]].dims == ((), ())
