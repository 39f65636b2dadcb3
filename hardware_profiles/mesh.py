"""Ways to lay logical meshes on a slice.

Names of enumerated axes say where they lie: "x" is the whole dimension x, "xy" is x and y
together, "x_outer" and "x_inner" are the strided and the contiguous part of a split x, "slice"
goes over the data-centre network and "core" over the two devices of a chip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, permutations, product
from math import log2, prod

from shardwright.errors import InputError
from shardwright.hardware_profiles.logical_mesh import (
    CORE_DIMENSION,
    DCN_DIMENSION,
    TORUS_DIMENSIONS,
    AxisRef,
    LogicalMesh,
    MeshAxis,
    PhysicalDimension,
    Segment,
    device_coordinates,
    order_devices,
    physical_dimensions,
)
from shardwright.hardware_profiles.slices import Slice

__all__ = [
    "AxisRef",
    "LogicalMesh",
    "MeshAxis",
    "PhysicalDimension",
    "Segment",
    "device_coordinates",
    "enumerate_meshes",
    "meshes_for_shape",
    "order_devices",
    "physical_dimensions",
]

Layout = tuple[tuple[Segment, ...], ...]


def enumerate_meshes(on: Slice, max_axes: int = 3, limit: int = 64) -> tuple[LogicalMesh, ...]:
    """The sensible ways to lay 1 to `max_axes` mesh axes on a slice, most plausible first.

    Whole dimensions come first, alone or merged; then dimensions split in two, at most two of
    them on a two-dimensional torus and one on a three-dimensional. Layouts that differ only by
    exchanging equal dimensions count once. The data-centre dimension and the two cores of a
    chip are never split.

    Args:
      on: the slice.
      max_axes: the most axes a mesh may have.
      limit: the most meshes returned; the least plausible are left out.
    """
    dimensions = [dimension for dimension in physical_dimensions(on) if dimension.size > 1]
    torus = sum(dimension.name in TORUS_DIMENSIONS for dimension in dimensions)
    most_splits = 2 if torus <= 2 else 1
    found: dict[Layout, tuple[object, ...]] = {}
    for pieces in product(*(_whole_or_split(dimension) for dimension in dimensions)):
        splits = sum(len(parts) - 1 for parts in pieces)
        if splits > most_splits:
            continue
        flat = [segment for parts in pieces for segment in parts]
        for layout in _partitions(flat, max_axes):
            canonical = _canonical(layout, dimensions, named_axes=False)
            if canonical not in found:
                found[canonical] = _plausibility(canonical, splits, min(max_axes, torus))
    ordered = sorted(found, key=lambda layout: found[layout])
    return tuple(
        LogicalMesh(
            on,
            tuple(MeshAxis(_name(segments), segments) for segments in layout)
            or (MeshAxis("x", ()),),
        )
        for layout in ordered[:limit]
    )


def _whole(dimension: PhysicalDimension) -> Segment:
    return Segment(dimension.name, dimension.size, 1, dimension.size, dimension.wraps)


def _whole_or_split(dimension: PhysicalDimension) -> list[tuple[Segment, ...]]:
    """The dimension whole, then in an outer and an inner part in every way that divides it."""
    ways: list[tuple[Segment, ...]] = [(_whole(dimension),)]
    if dimension.name in TORUS_DIMENSIONS:
        size, wraps = dimension.size, dimension.wraps
        for inner in range(2, size // 2 + 1):
            if size % inner == 0:
                outer = Segment(dimension.name, size // inner, inner, size, wraps)
                ways.append((outer, Segment(dimension.name, inner, 1, size, wraps)))
    return ways


def _partitions(pieces: Sequence[Segment], most: int) -> Iterator[list[list[Segment]]]:
    """Ways to put pieces into at most `most` axes, no axis with two parts of one dimension."""
    if not pieces:
        yield []
        return
    *rest, last = pieces
    for groups in _partitions(rest, most):
        for index, group in enumerate(groups):
            if all(segment.dimension != last.dimension for segment in group):
                yield [*groups[:index], [*group, last], *groups[index + 1 :]]
        if len(groups) < most:
            yield [*groups, [last]]


def _exchanges(dimensions: Sequence[PhysicalDimension]) -> list[dict[str, str]]:
    """Renamings of the torus dimensions among those of equal size and wraparound."""
    torus = [dimension for dimension in dimensions if dimension.name in TORUS_DIMENSIONS]
    return [
        {old.name: new.name for old, new in zip(torus, order, strict=True)}
        for order in permutations(torus)
        if all(
            (old.size, old.wraps) == (new.size, new.wraps)
            for old, new in zip(torus, order, strict=True)
        )
    ]


_MAJOR_TO_MINOR = {
    name: rank for rank, name in enumerate((DCN_DIMENSION, *TORUS_DIMENSIONS, CORE_DIMENSION))
}


def _rank(segment: Segment) -> tuple[int, int, int]:
    return (_MAJOR_TO_MINOR[segment.dimension], -segment.stride, segment.size)


def _canonical(
    layout: Sequence[Sequence[Segment]],
    dimensions: Sequence[PhysicalDimension],
    named_axes: bool,
) -> Layout:
    """The same layout whatever equal dimensions are called, segments major to minor.

    Axes keep their order where they have names of their own, and else are put major to minor.
    """

    def ranks(axis: Sequence[Segment]) -> list[tuple[int, int, int]]:
        return [_rank(segment) for segment in axis]

    candidates = []
    for names in _exchanges(dimensions):
        axes = [
            tuple(sorted((_rename(segment, names) for segment in axis), key=_rank))
            for axis in layout
        ]
        candidates.append(tuple(axes if named_axes else sorted(axes, key=ranks)))
    return min(candidates, key=lambda axes: [ranks(axis) for axis in axes])


def _rename(segment: Segment, names: dict[str, str]) -> Segment:
    name = names.get(segment.dimension, segment.dimension)
    return Segment(name, segment.size, segment.stride, segment.extent, segment.wraps)


def _plausibility(layout: Layout, splits: int, usual_axes: int) -> tuple[object, ...]:
    sizes = [prod(segment.size for segment in axis) for axis in layout]
    spread = log2(max(sizes, default=1)) - log2(min(sizes, default=1))
    return (
        splits,
        abs(len(layout) - usual_axes),
        spread,
        [[_rank(segment) for segment in axis] for axis in layout],
    )


def _name(segments: Sequence[Segment]) -> str:
    def part(segment: Segment) -> str:
        if segment.size == segment.extent:
            return ""
        return "_inner" if segment.stride == 1 else "_outer"

    parts = [part(segment) for segment in segments]
    if len(set(parts)) > 1:
        return "_".join(segment.dimension + part(segment) for segment in segments)
    names = [segment.dimension for segment in segments]
    torus = "".join(name for name in names if name in TORUS_DIMENSIONS)
    others = {DCN_DIMENSION: 0, CORE_DIMENSION: 2}
    tokens = [*(name for name in names if others.get(name) == 0), torus]
    tokens += [name for name in names if others.get(name) == 2]
    return "_".join(token for token in tokens if token) + parts[0]


def meshes_for_shape(
    on: Slice, shape: Mapping[str, int], limit: int = 64
) -> tuple[LogicalMesh, ...]:
    """All layouts of a mesh with given axis names and sizes, best first.

    Best is the fewest cut dimensions; among equals, slices on the first axes, cores on the last,
    and the last axes on neighbouring chips.

    Args:
      on: the slice.
      shape: size of each axis by name, major to minor; sizes of 1 are allowed.
      limit: the most meshes returned.

    Raises:
      InputError: a size is not positive, or their product is not the number of devices; says
        the product, and which sizes would do.
    """
    if not shape or any(size < 1 for size in shape.values()):
        raise InputError(
            f"mesh {dict(shape)} has no axes or an axis smaller than 1",
            where="mesh",
            do=f"give sizes whose product is {on.devices}, the devices of {on.name}",
        )
    if prod(shape.values()) != on.devices:
        raise _wrong_product(on, shape)
    dimensions = [dimension for dimension in physical_dimensions(on) if dimension.size > 1]
    names = list(shape)
    found: dict[Layout, tuple[object, ...]] = {}
    by_pieces = sorted(_factorings(dimensions, tuple(shape.values())), key=_pieces)
    for _, alike in groupby(by_pieces, key=_pieces):
        for factors in alike:
            orders = [
                list(permutations([axis for axis, size in enumerate(sizes) if size > 1]))
                for sizes in factors
            ]
            for order in product(*orders):
                layout = _lay(dimensions, factors, order, len(names))
                equal = _canonical(layout, dimensions, named_axes=True)
                if equal not in found:
                    found[equal] = _preference(equal)
        if len(found) >= limit:
            break
    ordered = sorted(found, key=lambda layout: found[layout])
    return tuple(LogicalMesh(on, tuple(map(MeshAxis, names, layout))) for layout in ordered[:limit])


def _pieces(factors: Sequence[tuple[int, ...]]) -> int:
    return sum(size > 1 for sizes in factors for size in sizes)


def _wrong_product(on: Slice, shape: Mapping[str, int]) -> InputError:
    total = prod(shape.values())
    fitting = []
    for name, size in shape.items():
        others = total // size
        if on.devices % others == 0:
            changed = dict(shape) | {name: on.devices // others}
            fitting.append(", ".join(f"{axis}={value}" for axis, value in changed.items()))
    suggestion = f", for example {' or '.join(fitting)}" if fitting else ""
    return InputError(
        f"the sizes of mesh {dict(shape)} make {total} devices and {on.name} has {on.devices}",
        where="mesh",
        do=f"give sizes whose product is {on.devices}{suggestion}",
    )


def _factorings(
    dimensions: Sequence[PhysicalDimension], sizes: tuple[int, ...]
) -> Iterator[list[tuple[int, ...]]]:
    """Ways to share each dimension among the axes so that every axis gets its size."""
    if not dimensions:
        if all(size == 1 for size in sizes):
            yield []
        return
    first, *rest = dimensions
    for factors in _ordered_factors(first.size, len(sizes)):
        if all(size % factor == 0 for size, factor in zip(sizes, factors, strict=True)):
            left = tuple(size // factor for size, factor in zip(sizes, factors, strict=True))
            for more in _factorings(rest, left):
                yield [factors, *more]


def _ordered_factors(size: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (size,)
        return
    for factor in range(1, size + 1):
        if size % factor == 0:
            for rest in _ordered_factors(size // factor, parts - 1):
                yield (factor, *rest)


def _lay(
    dimensions: Sequence[PhysicalDimension],
    factors: Sequence[tuple[int, ...]],
    orders: Sequence[tuple[int, ...]],
    axes: int,
) -> Layout:
    """Give each axis its part of each dimension, outermost first in `orders`."""
    layout: list[list[Segment]] = [[] for _ in range(axes)]
    for dimension, sizes, order in zip(dimensions, factors, orders, strict=True):
        stride = dimension.size
        for axis in order:
            stride //= sizes[axis]
            layout[axis].append(
                Segment(dimension.name, sizes[axis], stride, dimension.size, dimension.wraps)
            )
    return tuple(tuple(axis) for axis in layout)


def _preference(layout: Layout) -> tuple[object, ...]:
    last = len(layout) - 1
    placed = [(axis, segment) for axis, segments in enumerate(layout) for segment in segments]
    return (
        len(placed),
        sum(axis for axis, segment in placed if segment.dimension == DCN_DIMENSION),
        sum(last - axis for axis, segment in placed if segment.dimension == CORE_DIMENSION),
        [max((segment.stride for segment in axis), default=1) for axis in reversed(layout)],
        [[_rank(segment) for segment in axis] for axis in layout],
    )
