"""In which order meshes are tried, so that good ones come soon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.skeleton import Kind
from shardwright.planner.strategies import assignments

Steps = frozenset[tuple[str, int, int]]
"""Physical dimension, stride and size of the smallest steps that a mesh axis is made of."""


class GoodMeshes:
    """Remembers how fast meshes were, and which other ones that promises something of.

    A mesh that splits an axis of another can do all that the other can, so that it is likely to be
    at least nearly as fast.
    """

    def __init__(self) -> None:
        self._step_s: list[tuple[LogicalMesh, float]] = []

    def note(self, mesh: LogicalMesh, step_s: float) -> None:
        """Remembers the step time on a mesh, or a bound of it."""
        self._step_s.append((mesh, step_s))

    def next_of(self, meshes: Sequence[LogicalMesh]) -> LogicalMesh:
        """The one to try next: in the order given, but of equally many axes the most promising."""
        first = meshes[0]
        alike = [mesh for mesh in meshes if len(mesh.axes) == len(first.axes)]
        if len(first.axes) < 3:
            return first
        return min(alike, key=self._promise)

    def _promise(self, mesh: LogicalMesh) -> float:
        """The step time of the fastest mesh that this one splits an axis of."""
        return min((s for other, s in self._step_s if splits(mesh, other)), default=float("inf"))


def splits(fine: LogicalMesh, coarse: LogicalMesh) -> bool:
    """Whether every axis of `coarse` is made of whole axes of `fine`."""
    parts = [axis_steps(fine, number) for number in range(len(fine.axes))]
    return len(fine.axes) > len(coarse.axes) and all(
        part <= whole or not part & whole
        for part in parts
        for whole in (axis_steps(coarse, number) for number in range(len(coarse.axes)))
    )


def axis_steps(mesh: LogicalMesh, number: int) -> Steps:
    """The smallest steps along physical dimensions that an axis of a mesh is made of."""
    found = set()
    for segment in mesh.axes[number].segments:
        stride, left = segment.stride, segment.size
        factor = 2
        while left > 1:
            if left % factor:
                factor += 1
                continue
            found.add((segment.dimension, stride, factor))
            stride, left = stride * factor, left // factor
    return frozenset(found)


def aligned_first(meshes: Sequence[LogicalMesh], kinds: Iterable[Kind]) -> list[LogicalMesh]:
    """The meshes with those first whose axes suit how the program divides its dimensions.

    A dimension that is reshaped into several (a batch into groups, say) can be cut over all devices
    without moving anything only where axes fill the outer part whole before they cut the inner
    one: 32768 images in 512 groups of 64, over 2048 devices, by axes of 512 and 4. A mesh comes
    first for each such dimension that it can cut so and other meshes can not.
    """
    split = {tuple(kind.sizes[f] for f in dim) for kind in kinds for dim in kind.split_dims}

    def aligned(mesh: LogicalMesh) -> int:
        axes = tuple(mesh.shape.values())
        return sum(_cuts_whole(sizes, axes) for sizes in split)

    return sorted(meshes, key=lambda mesh: -aligned(mesh))


def _cuts_whole(sizes: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    dim = tuple(range(len(sizes)))
    rows = assignments(sizes, frozenset(dim), False, frozenset([dim]), axes)
    return bool((rows >= 0).all(axis=1).any())
