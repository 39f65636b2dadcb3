"""State that the compiler copies to the layout of a gradient.

The gradient of a matrix is a product whose result is transposed. The compiler makes it in the
layout of its weight, by the other order of the product's operands, unless it is resharded before it
is transposed. Then it transposes the layout, which the elementwise operations of the optimizer take
over: the weight and its moments, whose layout is given, are copied to that layout for the update,
and back. It does one weight after the other. Seen in scheduled programs of libtpu 0.0.42.1: of the
weights of a multilayer perceptron only the one whose gradient was resharded.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.nodes import NodeGraph

_TRANSPOSE = "stablehlo.transpose"
_CONVERT = "stablehlo.convert"
_PRODUCT = "stablehlo.dot_general"


@dataclass(frozen=True)
class Relayout:
    """Arguments that are copied for an update.

    Attributes:
      product: the gradient as it is made, before it is transposed; nothing is copied where its
        transposition reads it so.
      copied: values of the arguments.
      start, end: the half-open interval of program points in which the copies are alive.
    """

    product: int
    copied: tuple[int, ...]
    start: int
    end: int


def relayouts(nodes: NodeGraph) -> tuple[Relayout, ...]:
    """The arguments that updates outside loops copy to another layout."""
    graph = nodes.graph
    state = {graph.arguments[number] for number in graph.aliases.values()}
    found = []
    for op in graph.ops:
        product = _product(graph, op)
        if product is None:
            continue
        node = nodes.nodes[nodes.node_of_op[op.id]]
        shape = graph.values[op.results[0]].shape
        reads = {
            value: member
            for member in sorted(node.ops, reverse=True)
            for value in graph.ops[member].operands
            if value in state and graph.values[value].shape == shape
        }
        if reads:
            copied = tuple(sorted(reads))
            found.append(Relayout(product, copied, max(reads.values()), max(node.ops) + 1))
    return tuple(found)


def _product(graph: OpGraph, op: Op) -> int | None:
    """The matrix product that an operation transposes, outside loops."""
    if op.name != _TRANSPOSE or op.loop >= 0 or op.rule is None:
        return None
    if op.rule.operands[0] == op.rule.results[0]:
        return None
    value = op.operands[0]
    producer = graph.values[value].producer
    if producer >= 0 and graph.ops[producer].name == _CONVERT:
        value = graph.ops[producer].operands[0]
        producer = graph.values[value].producer
    if producer < 0 or graph.ops[producer].name != _PRODUCT:
        return None
    return value
