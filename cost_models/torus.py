"""Seconds of collectives on a torus: pure functions of bytes and of the axes they run over.

Every function takes the bytes of one array and the torus axes the group of devices spans, and
returns seconds without the fixed part of a collective. Bytes may be a number or a numpy array.

Source of the formulas: Austin et al., How to Scale Your Model (2025), "Sharded Matrices and How
to Multiply Them", section "Communication primitives"; cited as "the book" below. An axis that
wraps is a bidirectional ring, any other a line; several axes use their links at once. Every
time is the larger of a latency (hops times the latency of one) and a transfer time proportional
to the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Bytes = TypeVar("Bytes", float, NDArray[np.float64])


@dataclass(frozen=True)
class TorusAxis:
    """Where a group of devices lies along one dimension of the torus.

    Attributes:
      size: devices of the group along the axis.
      wraps: the group closes into a ring; else it is a line.
      bandwidth: bytes/s of one link, one way.
      hop_latency: seconds for a hop between neighbouring chips.
      stride: chips between neighbours of the group. `stride` such groups interleave and run the
        same collective at the same time, so each has that share of the links.
      sharers: further groups on the same links: 2 where both devices of a chip run a collective
        of their own.
    """

    size: int
    wraps: bool
    bandwidth: float
    hop_latency: float = 0.0
    stride: int = 1
    sharers: int = 1

    def __post_init__(self) -> None:
        if min(self.size, self.stride, self.sharers) < 1 or self.bandwidth <= 0:
            raise ValueError(f"sizes are at least 1 and bandwidths positive: {self}")

    @property
    def _bandwidth_in(self) -> float:
        """Bytes/s that the group's worst placed device takes in along the axis."""
        directions = 2 if self.wraps else 1
        return directions * self.bandwidth / (self.stride * self.sharers)

    @property
    def _longest_path_s(self) -> float:
        hops = self.size // 2 if self.wraps else self.size - 1
        return hops * self.stride * self.hop_latency


class Line(NamedTuple):
    """A time that grows with bytes: max(floor_s, bytes * s_per_byte) seconds."""

    floor_s: float
    s_per_byte: float

    def seconds(self, nbytes: Bytes) -> Bytes:
        """Seconds for `nbytes`, elementwise for an array."""
        if isinstance(nbytes, np.ndarray):
            return np.maximum(self.floor_s, nbytes * self.s_per_byte)
        return max(self.floor_s, nbytes * self.s_per_byte)

    def scaled(self, times: float) -> Line:
        """The line of a collective that runs `times` in a row."""
        return Line(self.floor_s * times, self.s_per_byte * times)


FREE = Line(0.0, 0.0)


def gather_line(axes: Sequence[TorusAxis]) -> Line:
    """Line of an all-gather, by bytes gathered; of a reduce-scatter, by bytes unreduced.

    A device takes in (N-1)/N of the array over all its incoming links. On a ring of even size
    the book's algorithm sends whole shards N/2 hops both ways, so the farthest shard arrives
    twice and the whole array is paid for: V / (2 B).
    """
    axes = [axis for axis in axes if axis.size > 1]
    if not axes:
        return FREE
    even_ring = any(axis.wraps and axis.size % 2 == 0 and axis.size > 2 for axis in axes)
    devices = prod(axis.size for axis in axes)
    received = 1.0 if even_ring else (devices - 1) / devices
    return Line(
        sum(axis._longest_path_s for axis in axes),
        received / sum(axis._bandwidth_in for axis in axes),
    )


def all_to_all_line(axes: Sequence[TorusAxis]) -> Line:
    """Line of an all-to-all, by bytes each device holds.

    Every device sends an equal part to every other by the shortest way. Along a ring of n that
    loads each link with n/8 of a device's array (the book's V / 4W for V = n arrays), along a
    line its middle link with n/4; with several axes the most loaded dimension decides.
    """
    axes = [axis for axis in axes if axis.size > 1]
    if not axes:
        return FREE
    return Line(
        sum(axis._longest_path_s for axis in axes), max(_all_to_all_load(axis) for axis in axes)
    )


def _all_to_all_load(axis: TorusAxis) -> float:
    pairs = axis.size**2 // 4
    per_link = pairs / (2 * axis.size) if axis.wraps else pairs / axis.size
    return per_link * axis.stride * axis.sharers / axis.bandwidth


def permute_line(axes: Sequence[TorusAxis]) -> Line:
    """Line of a collective-permute, by bytes each device holds.

    Which permutation it is decides the time: a shift by one loads every link with one array, a
    random one loads links as an all-to-all does. The larger of the two is taken.
    """
    axes = [axis for axis in axes if axis.size > 1]
    if not axes:
        return FREE
    loads = [
        max(axis.stride * axis.sharers / axis.bandwidth, _all_to_all_load(axis)) for axis in axes
    ]
    return Line(sum(axis._longest_path_s for axis in axes), max(loads))


def halo_line(axes: Sequence[TorusAxis]) -> Line:
    """Line of a halo exchange, by bytes sent to each neighbour.

    The last axis is the minor one: neighbours are `stride` chips apart along it. With further
    axes, neighbours across its ends are as far apart as the line is long.
    """
    axes = [axis for axis in axes if axis.size > 1]
    if not axes:
        return FREE
    latency = (
        axes[0].stride * axes[0].hop_latency
        if len(axes) == 1
        else sum(axis._longest_path_s for axis in axes)
    )
    return Line(latency, max(axis.stride * axis.sharers / axis.bandwidth for axis in axes))


def all_gather(gathered_bytes: Bytes, axes: Sequence[TorusAxis]) -> Bytes:
    """Seconds of an all-gather.

    Args:
      gathered_bytes: size of the gathered array that each device holds afterwards, in bytes.
      axes: the axes gathered over.

    Source: the book: max(T_min * sum |X_i| / 2, V / (W * axes)) with W = 2 * bandwidth where the
      axes wrap; (|X| - 1) * max(T_min, V / |X| / bandwidth) on a line (its Pop Quiz 2).
    """
    return gather_line(axes).seconds(gathered_bytes)


def reduce_scatter(unreduced_bytes: Bytes, axes: Sequence[TorusAxis]) -> Bytes:
    """Seconds of a reduce-scatter: those of the all-gather that undoes it.

    Args:
      unreduced_bytes: size of the array that each device holds before, in bytes.
      axes: the axes reduced and scattered over.
    """
    return gather_line(axes).seconds(unreduced_bytes)


def all_reduce(array_bytes: Bytes, axes: Sequence[TorusAxis]) -> Bytes:
    """Seconds of an all-reduce: a reduce-scatter and an all-gather.

    Args:
      array_bytes: size of the array, the same before and after, in bytes.
      axes: the axes reduced over.
    """
    return gather_line(axes).scaled(2).seconds(array_bytes)


def all_to_all(local_bytes: Bytes, axes: Sequence[TorusAxis]) -> Bytes:
    """Seconds of an all-to-all.

    Args:
      local_bytes: size of the array that each device holds before and after, in bytes.
      axes: the axes exchanged over.

    Source: the book, section "Our final communication primitive: the AllToAll": on a
      bidirectional ring a quarter of the all-gather of the array over the axis, V / (4 W).
    """
    return all_to_all_line(axes).seconds(local_bytes)


def collective_permute(local_bytes: Bytes, axes: Sequence[TorusAxis]) -> Bytes:
    """Seconds of a collective-permute of any pattern (`permute_line`).

    Args:
      local_bytes: size of the array that each device sends, in bytes.
      axes: the axes along which senders and receivers differ.
    """
    return permute_line(axes).seconds(local_bytes)


def halo_exchange(halo_bytes: Bytes, axes: Sequence[TorusAxis]) -> Bytes:
    """Seconds to send a halo to both neighbours along an axis.

    Args:
      halo_bytes: bytes sent to each neighbour.
      axes: where the mesh axis lies, major to minor.
    """
    return halo_line(axes).seconds(halo_bytes)
