"""Exponentials of softmaxes that the compiler keeps in memory, in f32.

Where the scores of attention are made by a product in the order in which the softmax reads them,
one kernel makes the exponentials, sums them and writes them, and all that need them read them: the
weights in the forward pass, and their gradients. Where the scores are transposed first, as those of
grouped heads are, each reader computes the exponentials of the scores. Seen in programs without a
loop, masked and not, rematerialised and not, scheduled by libtpu 0.0.42.1 for v4, v5e, v5p, v6e
and TPU7x.
The logits of a loss, not batched, are none of these.
"""

from __future__ import annotations

from math import prod

from shardwright.planner.given import CONSTRAINT
from shardwright.planner.graph import Op, OpGraph

_EXPONENTIAL = "stablehlo.exponential"
_PRODUCT = "stablehlo.dot_general"
_REDUCE = "stablehlo.reduce"
_TRANSPOSE = "stablehlo.transpose"
_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "add", "broadcast_in_dim", "convert", "divide", "maximum", "minimum", "multiply", "negate",
        "reshape", "select", "subtract", "tanh", "transpose",
    )
) | {CONSTRAINT}  # fmt: skip


def written_exponentials(graph: OpGraph) -> frozenset[int]:
    """The operations that make them."""
    readers = graph.uses()
    return frozenset(
        op.id
        for op in graph.ops
        if op.name == _EXPONENTIAL
        and any(r >= 0 and graph.ops[r].name == _REDUCE for r in readers.get(op.results[0], ()))
        and _is_of_scores_as_made(graph, op)
    )


def _is_of_scores_as_made(graph: OpGraph, exponential: Op) -> bool:
    """Whether what it is computed from elementwise is made by products, nothing transposed."""
    elements = prod(graph.values[exponential.results[0]].shape)
    pending, seen, products = [exponential.operands[0]], set(exponential.operands), False
    while pending:
        producer = graph.values[pending.pop()].producer
        op = graph.ops[producer] if producer >= 0 else None
        if op is None or op.loop != exponential.loop:
            continue
        products |= op.name == _PRODUCT and _is_batched(op)
        if op.name not in _ELEMENTWISE:
            continue
        if op.name == _TRANSPOSE and _reorders(graph, op):
            return False
        new = {v for v in op.operands if prod(graph.values[v].shape) == elements} - seen
        seen |= new
        pending += new
    return products


def _is_batched(product: Op) -> bool:
    """Whether a product is one for each element of a batch, as scores are and logits are not."""
    if product.rule is None:
        return False
    sides = (*product.rule.operands, product.rule.results[0])
    return bool(set.intersection(*({f for dim in dims for f in dim} for dims in sides)))


def _reorders(graph: OpGraph, transpose: Op) -> bool:
    """Whether a transposition changes the order of dimensions with more than one element."""
    rule = transpose.rule
    if rule is None:
        return True
    before, after = (
        [dim for dim in dims if any(rule.sizes[factor] > 1 for factor in dim)]
        for dims in (rule.operands[0], rule.results[0])
    )
    return before != after
