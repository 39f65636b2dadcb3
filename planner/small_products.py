"""Products that the compiler makes elementwise, without the matrix units.

A product that contracts nothing (the one-hot of expert and slot in a mixture) is a multiplication
inside whatever reads it. One that leaves nothing of one operand but what it is batched over (the
gradient of a gate, a sum over slots) is a multiplication and a sum, inside the product that makes
what it reads, which is then never written. Seen in mixtures of experts scheduled by libtpu 0.0.42.1
for v5p and v6e.
"""

from __future__ import annotations

from shardwright.planner.graph import Op

_PRODUCT = "stablehlo.dot_general"


def is_outer(op: Op) -> bool:
    """Whether a product contracts nothing."""
    if op.name != _PRODUCT or op.rule is None:
        return False
    left, right, made = _factors(op)
    return not (left & right) - made


def is_row_sum(op: Op) -> bool:
    """Whether a product contracts, and leaves nothing of its second operand but batches."""
    if op.name != _PRODUCT or op.rule is None:
        return False
    left, right, made = _factors(op)
    return bool((left & right) - made) and right <= left


def _factors(op: Op) -> tuple[set[int], set[int], set[int]]:
    """The factors larger than 1 of both operands and of the result."""
    assert op.rule is not None
    sizes = op.rule.sizes
    sides = (*op.rule.operands, op.rule.results[0])
    left, right, made = ({f for dim in dims for f in dim if sizes[f] > 1} for dims in sides)
    return left, right, made
