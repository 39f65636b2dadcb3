"""Seconds of collectives over the axes of a logical mesh, and which links they occupy.

A collective is priced as a fixed part and one or two stages in a row: over the links within a
slice (ICI, and the link between the two devices of a chip at the same time), and over the
data-centre network (DCN) between slices. Bandwidths, latencies and the fixed part come from the
chip's profile; its ICI bandwidth is the effective one (45e9 bytes/s one way on v5e, of 50e9
nominal), which is the one the published worked answers use.

Twisted tori are priced as plain ones. All-gather, reduce-scatter and all-reduce over whole
dimensions are bound by the links into a chip, which a twist does not change. An all-to-all over
the whole slice could gain: its mean shortest path on the twisted torus, over six links, is 1.75
times shorter than the busiest dimension of the plain one at 4x4x8 and 1.39 times at 4x8x8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.cost_models.algorithms import Group, line_of, registered
from shardwright.cost_models.torus import (
    Line,
    TorusAxis,
    all_to_all_line,
    gather_line,
    halo_line,
    permute_line,
)
from shardwright.errors import InputError
from shardwright.extensions import load_extensions
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.hardware_profiles.logical_mesh import (
    CORE_DIMENSION,
    DCN_DIMENSION,
    AxisRef,
    LogicalMesh,
    Segment,
)

Collective = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "collective_permute",
    "halo_exchange",
]
COLLECTIVES: tuple[Collective, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "collective_permute",
    "halo_exchange",
)

_LINES: dict[str, Callable[[Sequence[TorusAxis]], Line]] = {
    "all_gather": gather_line,
    "reduce_scatter": gather_line,
    "all_reduce": gather_line,
    "all_to_all": all_to_all_line,
    "collective_permute": permute_line,
    "halo_exchange": halo_line,
}


_LANES = 128
_SCATTERS_TRANSPOSED = frozenset({"tpu7x"})


@dataclass(frozen=True)
class Stage:
    """A part of a collective that keeps some links busy: `line` over physical `dimensions`."""

    dimensions: tuple[str, ...]
    line: Line


@dataclass(frozen=True)
class CollectiveModel:
    """The time of one kind of collective over given axes, as a function of bytes alone.

    Attributes:
      overhead_s: the fixed part.
      stages: what runs after it, one stage after the other.
    """

    overhead_s: float
    stages: tuple[Stage, ...]

    @overload
    def seconds(self, nbytes: float) -> float: ...
    @overload
    def seconds(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]: ...
    def seconds(self, nbytes: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """Seconds for `nbytes`; elementwise for an array. Nothing to send takes no time."""
        if isinstance(nbytes, np.ndarray):
            total = np.full(nbytes.shape, self.overhead_s)
            for stage in self.stages:
                total += np.maximum(stage.line.floor_s, nbytes * stage.line.s_per_byte)
            return np.where(nbytes > 0, total, 0.0)
        if nbytes <= 0:
            return 0.0
        return self.overhead_s + sum(stage.line.seconds(nbytes) for stage in self.stages)

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Physical dimensions whose links it uses."""
        return tuple(name for stage in self.stages for name in stage.dimensions)

    def occupied_s(self, nbytes: float) -> dict[str, float]:
        """Seconds that the links of each physical dimension are in use for `nbytes`.

        Collectives whose dimensions differ can overlap; those that share one cannot.
        """
        return {
            name: stage.line.seconds(nbytes) if nbytes > 0 else 0.0
            for stage in self.stages
            for name in stage.dimensions
        }


@overload
def collective_seconds(
    kind: Collective, nbytes: float, axes: Sequence[AxisRef | str], mesh: LogicalMesh
) -> float: ...
@overload
def collective_seconds(
    kind: Collective,
    nbytes: NDArray[np.float64],
    axes: Sequence[AxisRef | str],
    mesh: LogicalMesh,
) -> NDArray[np.float64]: ...
def collective_seconds(
    kind: Collective,
    nbytes: float | NDArray[np.float64],
    axes: Sequence[AxisRef | str],
    mesh: LogicalMesh,
) -> float | NDArray[np.float64]:
    """Seconds of a collective, fixed part included.

    Args:
      kind: which collective.
      nbytes: a number or an array of numbers of bytes, which are for
        all_gather: the gathered array that each device holds afterwards;
        reduce_scatter: the unreduced array that each device holds before;
        all_reduce: the array;
        all_to_all and collective_permute: the local array that each device holds before;
        halo_exchange: what is sent to each neighbour.
      axes: mesh axes or sub-axes the group of devices spans; for a halo exchange the sharded
        axes of the dimension, major to minor.
      mesh: the logical mesh.

    Returns: seconds, of the form of `nbytes`; 0 over axes of size 1 and for no bytes.

    Raises:
      InputError: the kind is not known, or an axis is not of the mesh.

    An all-reduce is a reduce-scatter and an all-gather with one fixed part. Where algorithms of
    the user's own are registered, the cheapest counts for each number of bytes.
    """
    seconds = collective_model(kind, tuple(axes), mesh).seconds(nbytes)
    for _, rival in registered_models(kind, tuple(axes), mesh):
        seconds = np.minimum(seconds, rival.seconds(nbytes))
    return seconds if isinstance(seconds, np.ndarray) else float(seconds)


def chosen_algorithm(
    kind: Collective, nbytes: float, axes: Sequence[AxisRef | str], mesh: LogicalMesh
) -> str:
    """The registered algorithm that takes least; "" where the built-in one does.

    Args and Raises: those of `collective_seconds`.
    """
    best, least = "", collective_model(kind, tuple(axes), mesh).seconds(nbytes)
    for name, rival in registered_models(kind, tuple(axes), mesh):
        seconds = rival.seconds(nbytes)
        if seconds < least:
            best, least = name, seconds
    return best


@lru_cache(maxsize=1 << 16)
def registered_models(
    kind: Collective, axes: tuple[AxisRef | str, ...], mesh: LogicalMesh
) -> tuple[tuple[str, CollectiveModel], ...]:
    """The algorithms that the user has registered for a kind, by name, where they apply."""
    load_extensions()
    formulas = registered(kind)
    segments = mesh.segments(axes) if formulas else ()
    if not segments:
        return ()
    chip = mesh.slice.chip
    sizes = {CORE_DIMENSION: 1, DCN_DIMENSION: 1}
    for segment in segments:
        if segment.dimension in sizes:
            sizes[segment.dimension] *= segment.size
    torus = [segment for segment in segments if segment.dimension not in sizes]
    group = Group(
        kind,
        _torus_axes(torus, chip, chip.jax_devices_per_chip.value // sizes[CORE_DIMENSION]),
        sizes[CORE_DIMENSION],
        sizes[DCN_DIMENSION],
        chip,
    )
    dimensions = tuple(dict.fromkeys(segment.dimension for segment in segments))
    found = []
    for name, formula in formulas.items():
        line = line_of(name, formula, group)
        if line is not None:
            stage = Stage(dimensions, line)
            found.append((name, CollectiveModel(chip.collective_overhead_s.value, (stage,))))
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def collective_model(
    kind: Collective, axes: tuple[AxisRef | str, ...], mesh: LogicalMesh
) -> CollectiveModel:
    """The time of a collective as a function of bytes; kept once made.

    Args and Raises: those of `collective_seconds`.
    """
    if kind not in _LINES:
        raise InputError(
            f"there is no collective {kind!r}", do=f"use one of {', '.join(COLLECTIVES)}"
        )
    chip = mesh.slice.chip
    segments = mesh.segments(axes)
    across = [segment for segment in segments if segment.dimension == DCN_DIMENSION]
    within = [segment for segment in segments if segment.dimension != DCN_DIMENSION]
    stages = []
    if within:
        stages.append(_within_slice(kind, within, chip))
    if across:
        local = prod(segment.size for segment in within)
        stages.append(_across_slices(kind, across, local, chip))
    times = 2 if kind == "all_reduce" else 1
    stages = [Stage(stage.dimensions, stage.line.scaled(times)) for stage in stages]
    return CollectiveModel(chip.collective_overhead_s.value if stages else 0.0, tuple(stages))


def _within_slice(kind: Collective, segments: Sequence[Segment], chip: ChipProfile) -> Stage:
    """The stage over ICI and, at the same time, over the link between the devices of a chip.

    A chip's two devices share its ICI links. A group that holds both takes each byte of a
    gathered array in once for the two and hands half of it over between them; in an exchange
    each device has bytes of its own, so the links carry both devices' whether the group holds
    one or both.
    """
    devices = chip.jax_devices_per_chip.value
    cores = [segment for segment in segments if segment.dimension == CORE_DIMENSION]
    torus = [segment for segment in segments if segment.dimension != CORE_DIMENSION]
    shares_one_copy = bool(cores) and kind in ("all_gather", "reduce_scatter", "all_reduce")
    line = _LINES[kind](_torus_axes(torus, chip, 1 if shares_one_copy else devices))
    if cores and chip.core_link_bandwidth is not None:
        between = _LINES[kind]([TorusAxis(2, False, chip.core_link_bandwidth.value)])
        line = Line(
            line.floor_s + chip.hop_latency_s.value, max(line.s_per_byte, between.s_per_byte)
        )
    return Stage(tuple(dict.fromkeys(segment.dimension for segment in segments)), line)


def _torus_axes(
    segments: Sequence[Segment], chip: ChipProfile, sharers: int
) -> tuple[TorusAxis, ...]:
    return tuple(
        TorusAxis(
            segment.size,
            segment.closes,
            chip.ici_link_bandwidth.value,
            chip.hop_latency_s.value,
            segment.stride,
            sharers,
        )
        for segment in segments
    )


def _across_slices(
    kind: Collective, segments: Sequence[Segment], local: int, chip: ChipProfile
) -> Stage:
    """The stage over the data-centre network.

    Every device talks to its peers in the other slices through its share of its host's network
    interfaces. An array that is gathered or scattered within the slice too crosses the network
    in shards: each device handles 1 / `local` of it.

    Source: Austin et al., How to Scale Your Model (2025), "How to Parallelize a Transformer for
      Training", section on scaling across pods: bytes over the bandwidth that leaves a slice.
    """
    slices = prod(segment.size for segment in segments)
    leaving = (slices - 1) / slices
    if kind in ("all_gather", "reduce_scatter", "all_reduce"):
        share = leaving / local
    elif kind == "all_to_all":
        share = leaving
    else:
        share = 1.0
    line = Line(chip.dcn_latency_s.value, share / chip.device_dcn_bandwidth)
    return Stage((DCN_DIMENSION,), line)


def lowered_collective(
    kind: Collective, nbytes: float, axes: Sequence[AxisRef | str], mesh: LogicalMesh
) -> Collective:
    """The collective that the TPU compiler really emits, to be priced with the same bytes.

    Over the whole of a large enough mesh a reduce-scatter becomes an all-reduce and a slice, and
    an all-gather that is not too large a dynamic-update-slice and an all-reduce; the chip's
    profile says from how many devices and up to which size. Over part of the mesh both stay.

    Args and Raises: those of `collective_seconds`.
    """
    rule = mesh.slice.chip.whole_mesh_as_all_reduce.value
    devices = prod(segment.size for segment in mesh.segments(axes))
    if devices < mesh.slice.devices:
        return kind
    if kind == "all_gather":
        least, most = rule.all_gather_min_devices, rule.all_gather_max_bytes
    elif kind == "reduce_scatter":
        least, most = rule.reduce_scatter_min_devices, None
    else:
        return kind
    becomes = least is not None and devices >= least and (most is None or nbytes <= most)
    return "all_reduce" if becomes else kind


def splits_lane_tiles(
    width: ArrayLike, element_bytes: float, chip: ChipProfile
) -> NDArray[np.bool_]:
    """Whether a reduce-scatter along the minor dimension becomes an all-reduce and a slice.

    It goes round a ring both ways, half of each shard in either direction. Where the half of a
    shard of 16-bit elements is not whole tiles of 128 lanes, the compiler takes an all-reduce;
    TPU7x scatters a transposed copy. Shards that are no whole tiles themselves are padded.

    Args:
      width: of a shard, in elements.
      element_bytes: of the scattered array.
      chip: that of the mesh.

    Source: products of bf16 and f32 in shards of 64 to 1024, compiled by libtpu 0.0.42.1 for v4,
      v5e, v5p, v6e and TPU7x.
    """
    odd: NDArray[np.bool_] = np.mod(width, 2 * _LANES) == _LANES
    return odd & (element_bytes == 2 and chip.generation not in _SCATTERS_TRANSPOSED)


def compiled_collective(
    kind: Collective,
    nbytes: float,
    axes: Sequence[AxisRef | str],
    mesh: LogicalMesh,
    *,
    splits_tiles: bool = False,
) -> tuple[Collective, float]:
    """What the TPU compiler makes of a collective, and its seconds.

    Args and Raises: those of `collective_seconds`.
      splits_tiles: a reduce-scatter for which `splits_lane_tiles` holds.
    """
    if splits_tiles and kind == "reduce_scatter":
        compiled: Collective = "all_reduce"
    else:
        compiled = lowered_collective(kind, nbytes, axes, mesh)
    seconds = float(collective_seconds(compiled, nbytes, axes, mesh))
    if compiled != kind:
        for _, rival in registered_models(kind, tuple(axes), mesh):
            if rival.seconds(nbytes) < seconds:
                compiled, seconds = kind, rival.seconds(nbytes)
    return compiled, seconds
