"""The logical mesh: named axes laid on the physical dimensions of a slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.axis_names import AXIS_NAME_HELP, is_axis_name
from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.hardware_profiles.slices import Slice, parse_slice

TORUS_DIMENSIONS = ("x", "y", "z")
DCN_DIMENSION = "slice"
CORE_DIMENSION = "core"


@dataclass(frozen=True)
class PhysicalDimension:
    """One physical dimension of a slice: `size` positions, with wraparound links or not."""

    name: str
    size: int
    wraps: bool


def physical_dimensions(of: Slice) -> tuple[PhysicalDimension, ...]:
    """Physical dimensions of a slice, major to minor.

    "slice" (over the data-centre network) where there are several slices, the torus dimensions
    "x", "y", "z" (those of size 1 too), and "core" where a chip has two JAX devices.
    """
    dimensions = [
        PhysicalDimension(name, size, wraps)
        for name, size, wraps in zip(TORUS_DIMENSIONS, of.shape, of.wraps, strict=False)
    ]
    if of.count > 1:
        dimensions.insert(0, PhysicalDimension(DCN_DIMENSION, of.count, False))
    if of.chip.jax_devices_per_chip.value > 1:
        cores = of.chip.jax_devices_per_chip.value
        dimensions.append(PhysicalDimension(CORE_DIMENSION, cores, False))
    return tuple(dimensions)


@dataclass(frozen=True)
class Segment:
    """The part of a mesh axis that lies along one physical dimension.

    Attributes:
      dimension: name of the physical dimension.
      size: positions of the axis along it.
      stride: positions of the dimension between neighbours of the axis.
      extent: length of the whole dimension.
      wraps: whether the dimension has wraparound links.
    """

    dimension: str
    size: int
    stride: int
    extent: int
    wraps: bool

    @property
    def closes(self) -> bool:
        """Whether the axis goes all the way round a dimension that wraps: a ring."""
        return self.wraps and self.size * self.stride == self.extent


@dataclass(frozen=True)
class MeshAxis:
    """A named mesh axis: segments major to minor, none for an axis of size 1."""

    name: str
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Devices along the axis."""
        return prod(segment.size for segment in self.segments)


@dataclass(frozen=True)
class AxisRef:
    """A mesh axis, or the sub-axis of it that Shardy writes "name":(pre_size)size.

    The axis of n devices is seen as [pre_size, size, n / (pre_size * size)], major to minor, and
    the middle part is meant. Without `size` it is the whole axis.
    """

    name: str
    pre_size: int = 1
    size: int | None = None


class Device(Protocol):
    """What a JAX TPU device tells of its place; `slice_index` is there with several slices."""

    @property
    def coords(self) -> Sequence[int]:
        """Chip coordinates x, y, z in its slice."""

    @property
    def core_on_chip(self) -> int:
        """0, or 1 for the second device of a chip."""


@dataclass(frozen=True)
class LogicalMesh:
    """Mesh axes, major to minor, that use every device of a slice exactly once."""

    slice: Slice
    axes: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names) or not all(map(is_axis_name, names)):
            raise InputError(
                f"mesh axis names {names} are not distinct names",
                where="mesh",
                do=f"give every axis a name of its own, of {AXIS_NAME_HELP}",
            )
        dimensions = {dimension.name: dimension for dimension in physical_dimensions(self.slice)}
        pieces: dict[str, list[Segment]] = {name: [] for name in dimensions}
        for axis in self.axes:
            for segment in axis.segments:
                on = dimensions.get(segment.dimension)
                if on is None or (segment.extent, segment.wraps) != (on.size, on.wraps):
                    raise InputError(
                        f"axis {axis.name!r} has a segment that is not on {self.slice.name}",
                        where="mesh",
                        do="build meshes with enumerate_meshes or meshes_for_shape",
                    )
                pieces[segment.dimension].append(segment)
        for name, segments in pieces.items():
            covered = 1
            for segment in sorted(segments, key=lambda segment: segment.stride):
                covered = covered * segment.size if segment.stride == covered else -1
            if covered != dimensions[name].size:
                raise InputError(
                    f"the mesh axes do not use each position of dimension {name!r} of "
                    f"{self.slice.name} exactly once",
                    where="mesh",
                    do="build meshes with enumerate_meshes or meshes_for_shape",
                )

    @cached_property
    def _hash(self) -> int:
        return hash((self.slice, self.axes))

    def __hash__(self) -> int:
        return self._hash

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis by name, major to minor."""
        return {axis.name: axis.size for axis in self.axes}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each axis, major to minor."""
        return tuple(axis.size for axis in self.axes)

    @property
    def key(self) -> str:
        """One line that tells this mesh from every other: slice, names, sizes and layout."""
        return f"{self.slice.name} [{self.describe()}]"

    def describe(self) -> str:
        """The layout as people read it: "data=16 on x, model=16 on y"."""
        return ", ".join(
            f"{axis.name}={axis.size}"
            + (f" on {', '.join(map(_describe, axis.segments))}" if axis.segments else "")
            for axis in self.axes
        )

    def axis(self, name: str) -> MeshAxis:
        """The axis of that name.

        Raises:
          InputError: the mesh has none; lists those it has.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise InputError(
            f"there is no mesh axis {name!r}",
            where=self.describe(),
            do=f"use {', '.join(self.shape)}",
        )

    def segments(self, axes: Iterable[AxisRef | str]) -> tuple[Segment, ...]:
        """Where a group of devices along some axes or sub-axes lies.

        Segments of one dimension that continue each other are joined, so an outer and an inner
        part together are the whole dimension; those of size 1 are left out. A sub-axis that
        cuts a segment where the segment cannot be cut counts as the whole segment.

        Raises:
          InputError: an axis is not of this mesh, or a sub-axis does not divide it.
        """
        refs = (AxisRef(axis) if isinstance(axis, str) else axis for axis in axes)
        pieces = {piece for ref in refs for piece in _resolve(self.axis(ref.name), ref)}
        joined: list[Segment] = []
        for piece in sorted(pieces, key=lambda piece: (piece.dimension, piece.stride)):
            last = joined[-1] if joined else None
            if (
                last is not None
                and last.dimension == piece.dimension
                and last.stride * last.size == piece.stride
            ):
                size = last.size * piece.size
                joined[-1] = Segment(piece.dimension, size, last.stride, last.extent, last.wraps)
            else:
                joined.append(piece)
        return tuple(joined)

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes the same mesh."""
        return {
            "slice": self.slice.name,
            "axes": [
                {
                    "name": axis.name,
                    "segments": [
                        {"dimension": part.dimension, "size": part.size, "stride": part.stride}
                        for part in axis.segments
                    ],
                }
                for axis in self.axes
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], chip: ChipProfile | None = None) -> LogicalMesh:
        """Read what `to_json` wrote; `chip` is the profile where it is not a bundled one.

        Raises:
          InputError: it is malformed, or not a mesh of that slice.
        """
        try:
            on = parse_slice(data["slice"], chip)
            dimensions = {dimension.name: dimension for dimension in physical_dimensions(on)}
            axes = tuple(
                MeshAxis(
                    str(axis["name"]),
                    tuple(
                        Segment(
                            part["dimension"],
                            int(part["size"]),
                            int(part["stride"]),
                            dimensions[part["dimension"]].size,
                            dimensions[part["dimension"]].wraps,
                        )
                        for part in axis["segments"]
                    ),
                )
                for axis in data["axes"]
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"the mesh is malformed ({type(error).__name__}: {error})",
                where="mesh",
                do="give an object as LogicalMesh.to_json writes it",
            ) from error
        return cls(on, axes)


def _describe(segment: Segment) -> str:
    if segment.size == segment.extent:
        return segment.dimension
    outermost = segment.stride * segment.size == segment.extent
    part = "inner" if segment.stride == 1 else "outer" if outermost else "middle"
    return f"{segment.dimension} ({part} {segment.size} of {segment.extent})"


def _resolve(axis: MeshAxis, ref: AxisRef) -> list[Segment]:
    if ref.size is None:
        return [segment for segment in axis.segments if segment.size > 1]
    if ref.pre_size < 1 or ref.size < 1 or axis.size % (ref.pre_size * ref.size):
        raise InputError(
            f"sub-axis ({ref.pre_size}){ref.size} does not divide axis {axis.name!r} "
            f"of {axis.size}",
            where="mesh",
            do="give a pre-size and a size whose product divides the axis",
        )
    top = axis.size // ref.pre_size
    bottom = top // ref.size
    pieces = []
    below = axis.size
    for segment in axis.segments:
        above, below = below, below // segment.size
        low, high = max(bottom, below), min(top, above)
        if low >= high:
            continue
        if high % low or low % below or above % high:
            pieces.append(segment)
            continue
        stride = segment.stride * (low // below)
        pieces.append(
            Segment(segment.dimension, high // low, stride, segment.extent, segment.wraps)
        )
    return pieces


def device_coordinates(mesh: LogicalMesh) -> NDArray[np.int64]:
    """Physical coordinates of every mesh position.

    Returns: int array of shape `mesh.sizes` + (number of physical dimensions,), the last in the
      order of `physical_dimensions(mesh.slice)`.
    """
    names = [dimension.name for dimension in physical_dimensions(mesh.slice)]
    coordinates = np.zeros((*mesh.sizes, len(names)), dtype=np.int64)
    for position, axis in enumerate(mesh.axes):
        index = np.arange(axis.size)
        below = axis.size
        for segment in axis.segments:
            below //= segment.size
            along = (index // below % segment.size) * segment.stride
            shape = [1] * len(mesh.axes)
            shape[position] = axis.size
            coordinates[..., names.index(segment.dimension)] += along.reshape(shape)
    return coordinates


def order_devices(mesh: LogicalMesh, devices: Sequence[Device]) -> NDArray[np.object_]:
    """Arrange real devices as the mesh is laid, for `jax.sharding.Mesh(array, names)`.

    Args:
      mesh: the logical mesh.
      devices: JAX devices of the slice, in any order: each with `coords` and `core_on_chip`, and
        `slice_index` where there are several slices.

    Returns: object array of shape `mesh.sizes`.

    Raises:
      InputError: the devices are not those of the slice.
    """
    dimensions = physical_dimensions(mesh.slice)
    lowest = np.min([list(device.coords) for device in devices], axis=0) if devices else []
    slices = sorted({getattr(device, "slice_index", 0) for device in devices})
    by_place: dict[tuple[int, ...], Device] = {}
    for device in devices:
        place = {
            DCN_DIMENSION: slices.index(getattr(device, "slice_index", 0)),
            CORE_DIMENSION: device.core_on_chip,
        } | {
            name: int(at - low)
            for name, at, low in zip(TORUS_DIMENSIONS, device.coords, lowest, strict=False)
        }
        by_place[tuple(place[dimension.name] for dimension in dimensions)] = device
    wanted = device_coordinates(mesh).reshape(-1, len(dimensions))
    missing = [tuple(map(int, row)) for row in wanted if tuple(map(int, row)) not in by_place]
    if missing or len(devices) != mesh.slice.devices:
        raise InputError(
            f"{len(devices)} devices do not make up {mesh.slice.name}, which has "
            f"{mesh.slice.devices}" + (f"; none is at {missing[0]}" if missing else ""),
            where="devices",
            do="pass all devices of one such slice, or plan for the slice you have",
        )
    ordered = np.empty(len(wanted), dtype=object)
    ordered[:] = [by_place[tuple(map(int, row))] for row in wanted]
    return ordered.reshape(mesh.sizes)
