"""Operations that move a tensor along one of its dimensions, as a pipeline's buffer moves a stage.

Where the dimension is sharded, the compiler sends what crosses from shard to shard in one
collective-permute. Two forms are known to become that (libtpu 0.0.42.1 and XLA on CPU, seen in
compiled programs): a `pad` that takes off at one end what it puts on at the other, and a
`concatenate` of a tensor's two parts in the other order. Shardy takes the first for an elementwise
operation, and the second for slices and a concatenation that each exchange with a neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.planner.mlir import ir

_PAD, _CONCATENATE, _SLICE = "stablehlo.pad", "stablehlo.concatenate", "stablehlo.slice"
ROTATING = (_CONCATENATE, _SLICE)
"""Operations that are shifts together with those around them."""

_PAD_ATTRIBUTES = ("edge_padding_low", "edge_padding_high", "interior_padding")


def shift_of(op: Any) -> dict[int, int]:
    """Dimension -> how many of its elements cross from each shard to the next.

    A slice that is a part of a rotation moves nothing by itself: 0. Empty for everything else.
    """
    if op.name == _PAD:
        low, high, interior = (_numbers(op, name) for name in _PAD_ATTRIBUTES)
        return {
            dim: abs(before)
            for dim, (before, after, between) in enumerate(zip(low, high, interior, strict=True))
            if before and before == -after and not between
        }
    if op.name == _CONCATENATE:
        return _rotation(op)
    if op.name == _SLICE:
        return dict.fromkeys(_rotations_of(op), 0)
    return {}


def _rotation(op: Any) -> dict[int, int]:
    """For a concatenation of x[k:] and x[:k] along a dimension, that and what crosses."""
    if len(op.operands) != 2:
        return {}
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    parts = [_slice_behind(operand) for operand in op.operands]
    end, start = parts
    if end is None or start is None or end.operands[0] != start.operands[0]:
        return {}
    shape = list(end.operands[0].type.shape)
    cut = _numbers(end, "start_indices")[dim]
    whole = [0] * len(shape)
    from_cut = [cut if d == dim else 0 for d in range(len(shape))]
    to_cut = [cut if d == dim else size for d, size in enumerate(shape)]
    rotates = _covers(end, from_cut, shape) and _covers(start, whole, to_cut)
    return {dim: min(cut, shape[dim] - cut)} if rotates else {}


def _rotations_of(op: Any) -> set[int]:
    """The dimensions that a slice is rotated along, where all that reads it are rotations."""
    dims: set[int] = set()
    for use in op.results[0].uses:
        reader = use.owner.operation
        found = _rotation(reader) if reader.name == _CONCATENATE else {}
        if not found:
            return set()
        dims |= found.keys()
    return dims


def _slice_behind(value: Any) -> Any:
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    return owner if owner.operation.name == _SLICE else None


def _covers(part: Any, starts: Sequence[int], limits: Sequence[int]) -> bool:
    return (
        _numbers(part, "start_indices") == list(starts)
        and _numbers(part, "limit_indices") == list(limits)
        and set(_numbers(part, "strides")) <= {1}
    )


def _numbers(op: Any, attribute: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[attribute]))
