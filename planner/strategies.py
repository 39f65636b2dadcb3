"""The strategies of a node: every useful way to assign mesh axes to its factors.

A strategy is a row of an array of shape (strategies, axes): the factor that each mesh axis is
assigned to, or -1. The sharding of a value follows from it and is told as one number, its code:
the digit of mesh axis a in base (rank + 1) is the dimension that the axis shards plus one, or 0.
Within a dimension, axes are in mesh order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.rules import DimFactors

IntArray = NDArray[np.int64]
REPLICATED = -1
Allowed = tuple[frozenset[int] | None, ...]
"""For each mesh axis the factors that it may be assigned to (-1: none), or None for any."""


@lru_cache(maxsize=4096)
def assignments(
    sizes: tuple[int, ...],
    shardable: frozenset[int],
    exact: bool,
    split_dims: frozenset[tuple[int, ...]],
    axis_sizes: tuple[int, ...],
    allowed: Allowed = (),
) -> IntArray:
    """All strategies of a node, shape (strategies, axes), the unsharded one first.

    Args:
      sizes: factor sizes.
      shardable: factors that axes may be assigned to.
      exact: every shard must have the same size.
      split_dims: dimensions made of several factors, major to minor: a minor factor is only
        sharded where the factors above it are sharded whole, and with axes that come later in
        the mesh, so that the dimension's sharding can be written.
      axis_sizes: sizes of the mesh axes.
      allowed: where something is given, what each axis may be assigned to.
    """
    axes = len(axis_sizes)
    choices = []
    for axis in range(axes):
        wanted = allowed[axis] if allowed else None
        choices.append(sorted({REPLICATED, *shardable} if wanted is None else wanted))
    even = {f for dim in split_dims for f in dim}
    rows = [
        row
        for row in product(*choices)
        if _fits(row, sizes, exact, even, axis_sizes)
        and _writable(row, sizes, split_dims, axis_sizes)
    ]
    return np.array(rows, dtype=np.int64).reshape(len(rows), axes)


def _fits(
    row: tuple[int, ...],
    sizes: tuple[int, ...],
    exact: bool,
    even: set[int],
    axis_sizes: tuple[int, ...],
) -> bool:
    for factor in {f for f in row if f >= 0}:
        parts = prod(n for f, n in zip(row, axis_sizes, strict=True) if f == factor)
        size = sizes[factor]
        if parts > size or ((exact or factor in even) and size % parts):
            return False
    return True


def _writable(
    row: tuple[int, ...],
    sizes: tuple[int, ...],
    split_dims: Iterable[tuple[int, ...]],
    axis_sizes: tuple[int, ...],
) -> bool:
    for dim in split_dims:
        open_above = False
        last_axis = -1
        for factor in dim:
            mine = [a for a, f in enumerate(row) if f == factor]
            if mine and (open_above or mine[0] < last_axis):
                return False
            last_axis = max([last_axis, *mine])
            open_above = open_above or prod(axis_sizes[a] for a in mine) != sizes[factor]
    return True


def codes(rows: IntArray, dims: DimFactors) -> IntArray:
    """The sharding code of a value under each strategy, shape (strategies,)."""
    dimension_of = _dimension_of(dims, rows)
    base = len(dims) + 1
    weights = base ** np.arange(rows.shape[1], dtype=np.int64)
    total: IntArray = ((dimension_of + 1) * weights).sum(axis=1)
    return total


def local_dims(
    rows: IntArray, shape: Sequence[int], dims: DimFactors, axis_sizes: Sequence[int]
) -> IntArray:
    """The largest local shape of a value under each strategy, shape (strategies, rank)."""
    dimension_of = _dimension_of(dims, rows)
    parts = np.ones((rows.shape[0], len(shape)), dtype=np.int64)
    for axis, size in enumerate(axis_sizes):
        for dim in range(len(shape)):
            parts[:, dim] = np.where(
                dimension_of[:, axis] == dim, parts[:, dim] * size, parts[:, dim]
            )
    return -(-np.asarray(shape, dtype=np.int64) // parts)


def factor_parts(rows: IntArray, factors: int, axis_sizes: Sequence[int]) -> IntArray:
    """In how many parts each factor is cut, shape (strategies, factors)."""
    parts = np.ones((rows.shape[0], factors), dtype=np.int64)
    for axis, size in enumerate(axis_sizes):
        for factor in range(factors):
            parts[:, factor] = np.where(
                rows[:, axis] == factor, parts[:, factor] * size, parts[:, factor]
            )
    return parts


def partial_masks(rows: IntArray, partial: frozenset[int]) -> IntArray:
    """A bit mask of the mesh axes over which a value is left as partial sums."""
    masks = np.zeros(rows.shape[0], dtype=np.int64)
    for axis in range(rows.shape[1]):
        masks |= np.isin(rows[:, axis], list(partial)).astype(np.int64) << axis
    return masks


def decode(code: int, rank: int, axes: int) -> tuple[tuple[int, ...], ...]:
    """The mesh axes (as numbers) on each dimension of a value with this sharding code."""
    dims: list[list[int]] = [[] for _ in range(rank)]
    for axis in range(axes):
        code, digit = divmod(code, rank + 1)
        if digit:
            dims[digit - 1].append(axis)
    return tuple(map(tuple, dims))


def encode(sharding: Sequence[Sequence[int]], axes: int) -> int:
    """The code of a sharding given as mesh axis numbers on each dimension."""
    base = len(sharding) + 1
    return sum(
        (dim + 1) * base**axis for dim, on in enumerate(sharding) for axis in on if axis < axes
    )


def _dimension_of(dims: DimFactors, rows: IntArray) -> IntArray:
    """The dimension that each axis shards, or -1, shape (strategies, axes)."""
    highest = max([f for dim in dims for f in dim], default=-1)
    table = np.full(max(highest, int(rows.max(initial=-1))) + 2, -1, dtype=np.int64)
    for dim, factors in enumerate(dims):
        for factor in factors:
            table[factor] = dim
    return table[rows]  # row entry -1 reads the last element, which stays -1
