"""Where the devices of a logical mesh lie on the torus, laid out flat for drawing.

A plane of the torus is a grid of chips; a third dimension becomes a row of planes, and so do
several slices. The two devices of a chip share its cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.hardware_profiles.logical_mesh import (
    CORE_DIMENSION,
    DCN_DIMENSION,
    TORUS_DIMENSIONS,
    LogicalMesh,
    MeshAxis,
    PhysicalDimension,
    device_coordinates,
    physical_dimensions,
)

COLOURS = 8
"""Groups are told apart by this many colours, which repeat where there are more groups."""
_MOST_DRAWN_DEVICES = 12_288
_SMALLEST_CELL, _LARGEST_CELL = 5, 30
_WIDTH = 1080
_SECOND_AXIS_SHIFT = 3


@dataclass(frozen=True)
class AxisGroups:
    """Which devices talk to each other in a collective over one mesh axis.

    Attributes:
      group: the number of the group of each device; indexed by physical coordinates in the order
        of `physical_dimensions`.
      position: the place of each device along the axis.
      colour: of each device's group, below `COLOURS`; neighbouring groups differ.
      count: how many groups there are.
    """

    axis: MeshAxis
    group: NDArray[np.int64]
    position: NDArray[np.int64]
    colour: NDArray[np.int64]
    count: int


def axis_groups(mesh: LogicalMesh, name: str) -> AxisGroups:
    """The groups of devices that differ only in their position along a mesh axis."""
    place = list(mesh.shape).index(name)
    sizes = mesh.sizes
    others = sizes[:place] + sizes[place + 1 :]
    indices = np.indices(sizes)
    rest = [index for number, index in enumerate(indices) if number != place]
    group = np.ravel_multi_index(rest, others) if rest else np.zeros(sizes, dtype=np.int64)
    count = prod(others)
    colour = group % COLOURS
    if count > COLOURS:
        shifts = [_SECOND_AXIS_SHIFT**number for number in range(len(rest))][::-1]
        shifted = [s * index for s, index in zip(shifts, rest, strict=True)]
        colour = np.sum(shifted, axis=0) % COLOURS
    extents = tuple(dimension.size for dimension in physical_dimensions(mesh.slice))
    where = tuple(np.moveaxis(device_coordinates(mesh), -1, 0))

    def by_place(values: NDArray[np.int64]) -> NDArray[np.int64]:
        placed = np.full(extents, -1, dtype=np.int64)
        placed[where] = values
        return placed

    return AxisGroups(
        axis=mesh.axis(name),
        group=by_place(group),
        position=by_place(indices[place]),
        colour=by_place(colour),
        count=count,
    )


@dataclass(frozen=True)
class Panel:
    """One plane of one slice, with its top left corner."""

    slice_index: int
    plane: int
    left: float
    top: float


@dataclass(frozen=True)
class TorusLayout:
    """A slice laid out flat: lengths in pixels.

    Attributes:
      dimensions: physical dimensions in the order of `physical_dimensions`.
      across, down, planes: names of the dimensions that run across a panel, down it and from
        panel to panel; "" where the slice has no such dimension.
      cell: width of a chip.
      pitch: from one chip to the next.
      left_out: panels that are not drawn because there are too many.
    """

    dimensions: tuple[PhysicalDimension, ...]
    across: str
    down: str
    planes: str
    cell: float
    pitch: float
    panels: tuple[Panel, ...]
    left_out: int
    width: float
    height: float

    @property
    def cores(self) -> int:
        """Devices of a chip."""
        return self.size(CORE_DIMENSION)

    def size(self, name: str) -> int:
        """Positions along a dimension; 1 where the slice has no such dimension."""
        return next((d.size for d in self.dimensions if d.name == name), 1)

    def wraps(self, name: str) -> bool:
        """Whether a dimension has wraparound links."""
        return any(d.wraps for d in self.dimensions if d.name == name)


def lay_out(mesh: LogicalMesh) -> TorusLayout:
    """Lays a slice out flat.

    The longest dimension runs across, the shortest of three from panel to panel.
    """
    dimensions = physical_dimensions(mesh.slice)
    torus = [d for d in dimensions if d.name in TORUS_DIMENSIONS and d.size > 1]
    order = sorted(torus, key=lambda d: (-d.size, d.name))
    across, down, planes = [d.name for d in order] + [""] * (3 - len(order))
    sizes = {d.name: d.size for d in dimensions}
    columns, rows = sizes.get(across, 1), sizes.get(down, 1)
    panels_a_slice, slices = sizes.get(planes, 1), sizes.get(DCN_DIMENSION, 1)
    total = panels_a_slice * slices
    drawn = max(1, min(total, _MOST_DRAWN_DEVICES // (columns * rows * sizes.get("core", 1))))
    cell, gap, margin, title = _measures(columns, rows, drawn)
    pitch = cell + gap
    panel_width = columns * pitch + 2 * margin
    panel_height = rows * pitch + 2 * margin + title
    per_row = max(1, min(drawn, int(_WIDTH // panel_width)))
    panels = tuple(
        Panel(
            slice_index=number // panels_a_slice,
            plane=number % panels_a_slice,
            left=margin + (number % per_row) * panel_width,
            top=margin + title + (number // per_row) * panel_height,
        )
        for number in range(drawn)
    )
    return TorusLayout(
        dimensions=dimensions,
        across=across,
        down=down,
        planes=planes,
        cell=cell,
        pitch=pitch,
        panels=panels,
        left_out=total - drawn,
        width=per_row * panel_width,
        height=-(-drawn // per_row) * panel_height,
    )


def _measures(columns: int, rows: int, panels: int) -> tuple[float, float, float, float]:
    """Cell, gap, margin and height of a panel's title that make the picture fill its width."""
    wanted = _WIDTH / (columns * 1.3 + 2)
    if panels > 1:
        per_row = max(1, round((panels * rows / columns) ** 0.5))
        wanted = _WIDTH / (min(panels, per_row + 1) * (columns * 1.3 + 2))
    cell = float(np.clip(round(wanted), _SMALLEST_CELL, _LARGEST_CELL))
    gap = max(1.0, round(cell * 0.25))
    margin = max(8.0, round(cell * 0.7))
    return cell, gap, margin, 20.0


def describe_axis(groups: AxisGroups) -> str:
    """How the devices of a group are joined: "ring of 16 along x", "line of 4 along y"."""
    parts = []
    for segment in groups.axis.segments:
        if segment.size == 1:
            continue
        if segment.dimension == DCN_DIMENSION:
            parts.append(f"{segment.size} slices over the data-centre network")
        elif segment.dimension == CORE_DIMENSION:
            parts.append(f"the {segment.size} devices of a chip")
        else:
            shape = "ring" if segment.closes else "line"
            every = f", every {_ordinal(segment.stride)} chip" if segment.stride > 1 else ""
            parts.append(f"{shape} of {segment.size} along {segment.dimension}{every}")
    return " × ".join(parts) or "single devices"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def members(groups: AxisGroups, group: int) -> list[tuple[int, ...]]:
    """Physical coordinates of the devices of a group, in the order of the axis."""
    places = np.argwhere(groups.group == group)
    positions = groups.position[tuple(places.T)]
    return [tuple(int(c) for c in places[i]) for i in np.argsort(positions)]
