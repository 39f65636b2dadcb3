"""Strategies and sharding codes, written out by hand for small nodes."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.strategies import (
    assignments,
    codes,
    decode,
    encode,
    local_dims,
    partial_masks,
)

NONE = frozenset[tuple[int, ...]]()


def rows_of(
    sizes: tuple[int, ...],
    axis_sizes: tuple[int, ...],
    *,
    shardable: set[int] | None = None,
    exact: bool = False,
    split: frozenset[tuple[int, ...]] = NONE,
    allowed: tuple[frozenset[int] | None, ...] = (),
) -> set[tuple[int, ...]]:
    factors = frozenset(range(len(sizes)) if shardable is None else shardable)
    rows = assignments(sizes, factors, exact, split, axis_sizes, allowed)
    found = [tuple(row) for row in rows.tolist()]
    assert len(set(found)) == len(found)
    return set(found)


def test_each_axis_shards_one_factor_or_none() -> None:
    assert rows_of((8, 8), (2,)) == {(-1,), (0,), (1,)}
    assert rows_of((8, 8), (2, 2)) == set(product((-1, 0, 1), repeat=2))


def test_the_unsharded_strategy_comes_first() -> None:
    assert assignments((8, 8), frozenset({0, 1}), False, NONE, (2, 4))[0].tolist() == [-1, -1]


def test_factors_that_must_stay_whole_are_left_alone() -> None:
    assert rows_of((8, 8), (2,), shardable={1}) == {(-1,), (1,)}


def test_a_factor_is_not_cut_in_more_parts_than_it_has_elements() -> None:
    assert rows_of((2,), (2, 2)) == {(-1, -1), (0, -1), (-1, 0)}


def test_uneven_shards_only_where_xla_pads() -> None:
    assert rows_of((6,), (4,)) == {(-1,), (0,)}
    assert rows_of((6,), (4,), exact=True) == {(-1,)}
    assert rows_of((6,), (2,), exact=True) == {(-1,), (0,)}


def test_minor_factor_of_a_merged_dimension_needs_the_major_one_cut_whole() -> None:
    # A dimension of 2 x 8: axis sizes 2 and 4, major to minor.
    split = frozenset({(0, 1)})
    assert rows_of((2, 8), (2, 4), split=split) == {
        (-1, -1),
        (0, -1),  # the major factor, whole
        (0, 1),  # and then the minor one
    }


def test_minor_factor_takes_axes_that_come_later_in_the_mesh() -> None:
    # Axes of a dimension are written in mesh order, so the minor factor's cannot come first.
    split = frozenset({(0, 1)})
    assert (1, 0) not in rows_of((4, 4), (4, 4), split=split)
    assert (0, 1) in rows_of((4, 4), (4, 4), split=split)


def test_merged_dimensions_are_cut_evenly() -> None:
    assert rows_of((6, 8), (4,), split=frozenset({(0, 1)})) == {(-1,)}


def test_fixed_axes_keep_their_factor() -> None:
    one, none, either = frozenset({1}), frozenset({-1}), frozenset({-1, 0})
    assert rows_of((8, 8), (2, 2), allowed=(one, None)) == {(1, -1), (1, 0), (1, 1)}
    assert rows_of((8, 8), (2, 2), allowed=(none, either)) == {(-1, -1), (-1, 0)}


def test_codes_count_in_base_rank_plus_one() -> None:
    # Axis 0 on dimension 1, axis 1 on dimension 0: 2 * 3**0 + 1 * 3**1.
    rows = np.array([[1, 0], [-1, -1], [0, 0]])
    assert codes(rows, ((0,), (1,))).tolist() == [5, 0, 4]


def test_codes_of_a_value_leave_out_factors_that_it_has_not() -> None:
    rows = np.array([[0], [1], [2]])
    assert codes(rows, ((2,), (0,))).tolist() == [2, 0, 1]


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_codes_round_trip(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 4))
    axes = data.draw(st.integers(1, 4))
    dims = data.draw(st.lists(st.integers(-1, rank - 1), min_size=axes, max_size=axes))
    sharding = tuple(tuple(a for a, d in enumerate(dims) if d == dim) for dim in range(rank))
    code = encode(sharding, axes)
    assert decode(code, rank, axes) == sharding
    row = np.array([dims])
    assert codes(row, tuple((d,) for d in range(rank)))[0] == code


def test_largest_shard_is_rounded_up() -> None:
    rows = np.array([[-1, -1], [0, -1], [0, 1], [1, 1]])
    assert local_dims(rows, (10, 7), ((0,), (1,)), (4, 2)).tolist() == [
        [10, 7],
        [3, 7],
        [3, 4],
        [10, 1],
    ]


def test_dimension_of_several_factors_is_cut_by_each() -> None:
    rows = np.array([[0, 1]])
    assert local_dims(rows, (16, 3), ((0, 1), ()), (2, 4)).tolist() == [[2, 3]]


def test_partial_sums_are_told_by_axis() -> None:
    rows = np.array([[2, -1], [0, 2], [2, 2], [1, 0]])
    assert partial_masks(rows, frozenset({2})).tolist() == [0b01, 0b10, 0b11, 0]


@pytest.mark.parametrize("axis_sizes", [(2, 4), (3, 2), (2, 2, 2)])
def test_strategies_of_a_plain_node_are_all_assignments_that_fit(
    axis_sizes: tuple[int, ...],
) -> None:
    sizes = (4, 6, 3)
    expected = set()
    for row in product((-1, 0, 1, 2), repeat=len(axis_sizes)):
        parts = [1, 1, 1]
        for factor, size in zip(row, axis_sizes, strict=True):
            if factor >= 0:
                parts[factor] *= size
        if all(p <= s for p, s in zip(parts, sizes, strict=True)):
            expected.add(row)
    assert rows_of(sizes, axis_sizes) == expected
