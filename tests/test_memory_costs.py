"""Bytes in HBM and peak memory."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost_models.memory import Buffer, dtype_bytes, peak_memory, tiled_bytes
from shardwright.errors import InputError

COMPILED = json.loads((Path(__file__).parent / "data" / "tiled_bytes.json").read_text())["cases"]

buffers = st.builds(
    lambda name, start, length, nbytes: Buffer(str(name), start, start + length, nbytes),
    st.integers(),
    st.integers(0, 12),
    st.integers(0, 6),
    st.integers(0, 100),
)


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: f"{case['dtype']}{case['shape']}")
def test_arrays_take_the_bytes_that_the_tpu_compiler_gives_them(case):
    assert tiled_bytes(case["shape"], case["dtype"]) == case["bytes"]


def test_many_shapes_at_once_give_what_each_gives_alone():
    shapes = np.random.default_rng(0).integers(1, 300, size=(50, 2, 3))
    together = tiled_bytes(shapes, "bf16")
    assert together.shape == (50, 2)
    for index in np.ndindex(50, 2):
        assert together[index] == tiled_bytes(shapes[index], "bf16")


def test_an_array_without_elements_takes_no_bytes():
    assert tiled_bytes((0, 128), "f32") == 0
    assert tiled_bytes((0,), "f32") == 0


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("f32", 4), ("float32", 4), ("bf16", 2), ("bfloat16", 2), ("i1", 1), ("bool", 1),
        ("si8", 1), ("ui32", 4), ("i4", 0.5), ("int4", 0.5), ("f8E4M3FN", 1),
        ("float8_e5m2", 1), ("complex64", 8), ("i64", 8),
    ],
)  # fmt: skip
def test_elements_have_the_width_in_their_name(dtype, nbytes):
    assert dtype_bytes(dtype) == nbytes


def test_an_unknown_element_type_is_told():
    with pytest.raises(InputError, match="element type 'text' is not known"):
        dtype_bytes("text")


def test_peak_is_where_the_live_buffers_are_largest():
    peak = peak_memory(
        [
            Buffer("weights", 0, 10, 100),
            Buffer("early", 1, 4, 50),
            Buffer("late", 4, 8, 60),
            Buffer("small", 5, 6, 5),
        ]
    )
    assert peak.bytes == 165
    assert peak.time == 5
    assert [buffer.name for buffer in peak.live] == ["weights", "late", "small"]


def test_a_buffer_is_free_at_the_point_where_it_ends():
    assert peak_memory([Buffer("a", 0, 3, 10), Buffer("b", 3, 5, 10)]).bytes == 10


def test_no_buffers_take_no_memory():
    peak = peak_memory([])
    assert (peak.bytes, peak.live) == (0, ())


def test_a_buffer_cannot_end_before_it_starts():
    with pytest.raises(ValueError, match="'a' ends at 1, before 2"):
        peak_memory([Buffer("a", 2, 1, 10)])


@given(st.lists(buffers, max_size=12))
def test_peak_equals_the_largest_sum_over_every_point(held):
    peak = peak_memory(held)
    sums = [
        sum(buffer.nbytes for buffer in held if buffer.start <= time < buffer.end)
        for time in range(20)
    ]
    assert peak.bytes == max(sums)
    assert sum(buffer.nbytes for buffer in peak.live) == peak.bytes
