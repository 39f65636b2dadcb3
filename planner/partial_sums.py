"""Sums of matrix products that the compiler reduces once.

Where several products are added up and each is left as partial sums over the same mesh axes, the
compiler adds first and reduces the total: one all-reduce (or reduce-scatter) instead of one for
each. Seen in scheduled programs of libtpu (the gradient of a gated feed-forward block's input).
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.planner.graph import OpGraph

_MATRIX = ("stablehlo.dot_general", "stablehlo.convolution")


def sums_of_products(graph: OpGraph) -> dict[int, tuple[int, int]]:
    """Values that are added up before anything else is done with them.

    Returns:
      value id -> (the sum it belongs to, how many products are in that sum).
    """
    readers = graph.uses()
    results = set(graph.results)

    def leaves(value: int) -> Iterable[int]:
        """The products that a value is the sum of; itself where it is a product."""
        producer = graph.values[value].producer
        once = len(readers.get(value, ())) == 1 and value not in results
        if producer < 0 or not once:
            return ()
        op = graph.ops[producer]
        if op.name in _MATRIX:
            return (value,)
        if op.name != "stablehlo.add":
            return ()
        return [leaf for operand in op.operands for leaf in leaves(operand)]

    found: dict[int, tuple[int, int]] = {}
    for op in reversed(graph.ops):
        if op.name != "stablehlo.add" or op.operands[0] == op.operands[1]:
            continue
        products = [leaf for operand in op.operands for leaf in leaves(operand)]
        if len(products) > 1 and products[0] not in found:
            found.update((leaf, (op.id, len(products))) for leaf in products)
    return found
