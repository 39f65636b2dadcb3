"""Bytes that arrays take in HBM, and the peak memory of a program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.errors import InputError

FloatArray = NDArray[np.float64]

_LANES = 128
_TILE_ROWS = 8
_VECTOR_TILE = 1024
_POWERS_OF_TWO = np.array([1.0, 1, 2, 4, 4, 8, 8, 8, 8])
"""The next power of two of 0 to 8."""
_BITS = re.compile(r"(?:float|bfloat|complex|uint|int|bf|si|ui|f|c|i|u|s)(\d+)")


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element in HBM: half for a 4-bit type, one for a boolean.

    Args:
      dtype: as StableHLO ("bf16", "f8E4M3FN", "i1") or numpy ("bfloat16", "bool") names it.

    Raises:
      InputError: the type is not known.
    """
    name = dtype.lower()
    if name in ("i1", "bool", "pred"):
        return 1.0
    if name.startswith("complex<"):
        return 2 * dtype_bytes(name.removeprefix("complex<").removesuffix(">"))
    match = _BITS.match(name)
    if match is None:
        raise InputError(
            f"element type {dtype!r} is not known",
            do="use a StableHLO or numpy name such as bf16, f32, i8 or f8E4M3FN",
        )
    return int(match.group(1)) / 8


def tiled_bytes(shapes: ArrayLike, dtype: str) -> FloatArray:
    """HBM bytes of arrays, with the padding of TPU tiles.

    The two minor-most dimensions are cut into tiles: the minor one is padded to a multiple of 128
    lanes, the other to a multiple of 8 rows, or of the next power of two where it has fewer rows,
    but of at least as many as are packed into 32 bits (2 for bf16, 4 for 8-bit types). A vector is
    padded to 1024 elements, or to the next power of two of at least 128 packed words. A scalar
    takes one word of 128 lanes. XLA picks the order of dimensions that needs least padding,
    and so does this: where the layout of an intermediate array is bound by the operations around
    it, it may take more.

    Args:
      shapes: integers [..., rank], local shapes.
      dtype: element type, see `dtype_bytes`.

    Returns:
      Bytes [...].

    Source: XLA documentation, "Tiled layout", for what a tile is; libtpu 0.0.42.1 for which tiles
      and which order: `memory_analysis().argument_size_in_bytes` of the shapes in
      tests/data/tiled_bytes.json, all reproduced exactly.
    """
    sizes = np.asarray(shapes, dtype=np.float64)
    rank = sizes.shape[-1] if sizes.ndim else 0
    element = dtype_bytes(dtype)
    packed = max(1.0, 4 / element)
    if rank == 0:
        return np.full(sizes.shape[:-1], _LANES * packed * element)
    if rank == 1:
        tile = np.clip(_next_power_of_two(sizes[..., 0]), _LANES * packed, _VECTOR_TILE)
        return _round_up(sizes[..., 0], tile) * element
    filled = np.maximum(np.moveaxis(sizes, -1, 0), 1).copy()
    lane_waste = _round_up(filled, _LANES) / filled
    tile_rows = np.maximum(_POWERS_OF_TWO[np.minimum(filled, _TILE_ROWS).astype(np.int64)], packed)
    row_waste = _round_up(filled, tile_rows) / filled
    waste = np.full(sizes.shape[:-1], np.inf)
    for lanes in range(rank):
        for rows in range(rank):
            if rows != lanes:
                np.minimum(waste, lane_waste[lanes] * row_waste[rows], out=waste)
    nbytes: FloatArray = np.rint(sizes.prod(axis=-1) * waste) * element
    return nbytes


def _next_power_of_two(sizes: FloatArray) -> FloatArray:
    powers: FloatArray = np.exp2(np.ceil(np.log2(np.maximum(sizes, 1))))
    return powers


def _round_up(sizes: FloatArray, multiple: float | FloatArray) -> FloatArray:
    rounded: FloatArray = np.ceil(sizes / multiple) * multiple
    return rounded


@dataclass(frozen=True)
class Buffer:
    """Memory of `nbytes`, held in the half-open interval of program points [start, end).

    `kind` says what sort of data it holds, for sums by kind.
    """

    name: str
    start: int
    end: int
    nbytes: float
    kind: str = ""


@dataclass(frozen=True)
class PeakMemory:
    """Memory at the fullest program point.

    Attributes:
      bytes: sum of the live buffers.
      time: the first program point at which it is reached.
      live: the buffers that fill it, the largest first.
    """

    bytes: float
    time: int
    live: tuple[Buffer, ...]


def peak_memory(buffers: Sequence[Buffer]) -> PeakMemory:
    """The largest sum of sizes of buffers that are alive together.

    Fragmentation is not counted.

    Raises:
      ValueError: a buffer ends before it starts.
    """
    for buffer in buffers:
        if buffer.end < buffer.start:
            raise ValueError(f"buffer {buffer.name!r} ends at {buffer.end}, before {buffer.start}")
    held = [buffer for buffer in buffers if buffer.end > buffer.start]
    if not held:
        return PeakMemory(0.0, 0, ())
    sizes = np.array([buffer.nbytes for buffer in held], dtype=np.float64)
    points = np.array([(buffer.start, buffer.end) for buffer in held])
    times, places = np.unique(points.ravel(), return_inverse=True)
    change = np.zeros(len(times))
    np.add.at(change, places.reshape(points.shape)[:, 0], sizes)
    np.add.at(change, places.reshape(points.shape)[:, 1], -sizes)
    time = int(times[int(np.argmax(np.cumsum(change)))])
    live = sorted(
        (buffer for buffer in held if buffer.start <= time < buffer.end),
        key=lambda buffer: -buffer.nbytes,
    )
    return PeakMemory(float(sum(buffer.nbytes for buffer in live)), time, tuple(live))


@dataclass(frozen=True)
class MemoryOverTime:
    """Memory by kind of buffer at some program points, in order.

    Attributes:
      times: the program points.
      by_kind: kind of buffer -> bytes at each of them.
    """

    times: tuple[int, ...]
    by_kind: dict[str, tuple[float, ...]]


def memory_over_time(buffers: Sequence[Buffer], most_points: int) -> MemoryOverTime:
    """The memory of a program as a step function: what is held from each point to the next.

    Where memory changes at more than `most_points` points, those are kept at which it is fullest
    and emptiest in each of equally many spans, so that the peak and the shape of the curve stay.

    Args:
      buffers: as for `peak_memory`.
      most_points: at least 4.
    """
    held = [buffer for buffer in buffers if buffer.end > buffer.start]
    if not held:
        return MemoryOverTime((), {})
    kinds = list(dict.fromkeys(buffer.kind for buffer in held))
    times = np.unique([point for buffer in held for point in (buffer.start, buffer.end)])
    change = np.zeros(len(kinds) * len(times))
    row_of = np.array([kinds.index(buffer.kind) for buffer in held]) * len(times)
    sizes = [buffer.nbytes for buffer in held]
    np.add.at(change, row_of + np.searchsorted(times, [b.start for b in held]), sizes)
    np.subtract.at(change, row_of + np.searchsorted(times, [b.end for b in held]), sizes)
    bytes_by_kind = np.cumsum(change.reshape(len(kinds), len(times)), axis=1)
    kept = _extremes(bytes_by_kind.sum(axis=0), most_points)
    return MemoryOverTime(
        tuple(int(time) for time in times[kept]),
        {
            kind: tuple(float(held_bytes) for held_bytes in row[kept])
            for kind, row in zip(kinds, bytes_by_kind, strict=True)
        },
    )


def _extremes(values: FloatArray, most: int) -> NDArray[np.int64]:
    """Places of the first, the last, and of the largest and smallest value of each span."""
    if len(values) <= most:
        return np.arange(len(values))
    spans = np.array_split(np.arange(len(values)), (most - 2) // 2)
    kept = {0, len(values) - 1}
    for span in spans:
        kept |= {int(span[np.argmax(values[span])]), int(span[np.argmin(values[span])])}
    return np.array(sorted(kept), dtype=np.int64)
