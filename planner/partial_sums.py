"""Sums of matrix products that the compiler reduces once.

Where several products are added up and each is left as partial sums over the same mesh axes, the
compiler adds first and reduces the total: one all-reduce (or reduce-scatter) instead of one for
each. Seen in scheduled programs of libtpu (the gradient of a gated feed-forward block's input).
"""

from __future__ import annotations

from shardwright.planner.graph import Op, OpGraph

_MATRIX = ("stablehlo.dot_general", "stablehlo.convolution")


def sums_of_products(graph: OpGraph) -> dict[int, tuple[int, int]]:
    """Values that are added up before anything else is done with them.

    Returns:
      value id -> (the sum it belongs to, how many products are in that sum).
    """
    readers = graph.uses()
    results = set(graph.results)

    # Sums that are a part of one seen already, which comes later in the program.
    inside: set[int] = set()

    def leaves(total: Op) -> list[int]:
        """The products that are added up for a sum, in order."""
        products = []
        pending = list(reversed(total.operands))
        while pending:
            value = pending.pop()
            producer = graph.values[value].producer
            once = len(readers.get(value, ())) == 1 and value not in results
            if producer < 0 or not once:
                continue
            op = graph.ops[producer]
            if op.name in _MATRIX:
                products.append(value)
            elif op.name == "stablehlo.add":
                inside.add(op.id)
                pending += reversed(op.operands)
        return products

    found: dict[int, tuple[int, int]] = {}
    for op in reversed(graph.ops):
        if op.name != "stablehlo.add" or op.operands[0] == op.operands[1] or op.id in inside:
            continue
        products = leaves(op)
        if len(products) > 1 and products[0] not in found:
            found.update((leaf, (op.id, len(products))) for leaf in products)
    return found
