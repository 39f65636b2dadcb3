"""The collectives in a module after Shardy's passes, read into plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from shardwright.cost_models.collectives import compiled_collective
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh

_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_DIMENSION = re.compile(r"\{([^}]*)\}")
_AXES_ATTRIBUTE = {
    "sdy.all_gather": "gathering_axes",
    "sdy.all_slice": "slicing_axes",
    "sdy.all_reduce": "reduction_axes",
    "sdy.reduce_scatter": "reduce_scatter_axes",
    "sdy.all_to_all": "params",
}
KINDS = (*_AXES_ATTRIBUTE, "sdy.collective_permute")

StepKind = Literal[
    "all_gather", "all_slice", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute"
]

DimAxes = tuple[tuple[AxisRef, ...], ...]
"""For each dimension of a tensor, the mesh axes that shard it, major to minor."""


@dataclass(frozen=True)
class Step:
    """One collective on one tensor.

    Attributes:
      kind: "all_gather", "all_slice", "all_reduce", "reduce_scatter", "all_to_all" or
        "collective_permute".
      axes: the mesh axes (or sub-axes) that it runs over.
      divisor: in how many parts the global tensor is cut to give the array that the cost is
        told in (see `shardwright.cost_models.collectives`: the gathered array of an all-gather,
        the unreduced one of a reduce-scatter, the local one otherwise).
    """

    kind: StepKind
    axes: tuple[AxisRef, ...]
    divisor: float


@lru_cache(maxsize=1 << 14)
def parse_axes(text: str) -> tuple[AxisRef, ...]:
    """The axes named in a piece of Shardy's syntax, sub-axes as ("x", pre_size, size)."""
    return tuple(
        AxisRef(name, int(pre), int(size)) if size else AxisRef(name)
        for name, pre, size in _AXIS.findall(text)
    )


def parse_sharding(text: str) -> DimAxes:
    """The dimension shardings of `#sdy.sharding<@mesh, [{"x"}, {}]>`."""
    dimensions = text[text.index("[") : text.rindex("]") + 1]
    return tuple(parse_axes(d) for d in _DIMENSION.findall(dimensions))


def axis_size(axis: AxisRef, sizes: Mapping[str, int]) -> int:
    """The size of an axis, or of the part of it that is meant."""
    return axis.size if axis.size is not None else sizes[axis.name]


def shards(sharding: DimAxes, sizes: Mapping[str, int]) -> int:
    """In how many parts a sharding cuts a tensor."""
    return math.prod(axis_size(axis, sizes) for dim in sharding for axis in dim)


def read_step(op: Any, before: DimAxes, sizes: Mapping[str, int]) -> tuple[Step, DimAxes]:
    """Reads a collective operation.

    Args:
      op: one of the operations in `KINDS`.
      before: the sharding of its operand.
      sizes: mesh axis name -> size.

    Returns:
      The collective and the sharding of its result.
    """
    kind = cast(StepKind, op.name.removeprefix("sdy."))
    after = parse_sharding(str(op.attributes["out_sharding"]))
    if kind == "collective_permute":
        changed = {
            a.name: a for b, c in zip(before, after, strict=True) if b != c for a in (*b, *c)
        }
        axes: tuple[AxisRef, ...] = tuple(AxisRef(name) for name in changed)
    else:
        axes = parse_axes(str(op.attributes[_AXES_ATTRIBUTE[op.name]]))
    told_after = kind in ("all_gather", "all_reduce", "all_slice")
    return Step(kind, axes, shards(after if told_after else before, sizes)), after


def read_steps(
    op: Any, before: DimAxes, sizes: Mapping[str, int]
) -> Iterator[tuple[Step, DimAxes]]:
    """Reads a collective operation as the collectives that a plan makes of it, one by one.

    An all-gather along several dimensions is made one dimension at a time, the least first: in one
    go the TPU compiler gathers along a new leading dimension, and needs two copies to move the
    shards to their places. Everything else is one collective.

    Args and Yields: as `read_step`, for each collective in order.
    """
    step, after = read_step(op, before, sizes)
    if step.kind != "all_gather":
        yield step, after
        return
    gathered = [parse_axes(d) for d in _DIMENSION.findall(str(op.attributes["gathering_axes"]))]
    dims = sorted(
        (d for d, axes in enumerate(gathered) if axes),
        key=lambda d: math.prod(axis_size(axis, sizes) for axis in gathered[d]),
    )
    now = before
    for dim in dims:
        now = (*now[:dim], after[dim], *now[dim + 1 :])
        yield Step("all_gather", gathered[dim], shards(now, sizes)), now


def whole_axes(axes: Sequence[AxisRef], sizes: Mapping[str, int]) -> set[str]:
    """The mesh axes that are all there, whole or in parts."""
    parts: dict[str, int] = {}
    for axis in axes:
        parts[axis.name] = parts.get(axis.name, 1) * axis_size(axis, sizes)
    return {name for name, size in parts.items() if size == sizes[name]}


def merge_reduce_and_slice(
    reduce_axes: Sequence[AxisRef], slice_step: Step | None, sizes: Mapping[str, int]
) -> bool:
    """Whether an all-reduce followed by a slice is one reduce-scatter.

    The partitioner makes it one where every reduced axis is sliced over.
    """
    if slice_step is None or slice_step.kind != "all_slice":
        return False
    whole = whole_axes(slice_step.axes, sizes)
    return all(axis.name in whole or axis in slice_step.axes for axis in reduce_axes)


def compiled_step(
    step: Step, nbytes: float, mesh: LogicalMesh, *, splits_tiles: bool = False
) -> tuple[StepKind, float]:
    """What the TPU compiler makes of a collective on a tensor of `nbytes`, and its seconds.

    Args:
      splits_tiles: as of `compiled_collective`.
    """
    if step.kind == "all_slice":
        return step.kind, 0.0
    kind, seconds = compiled_collective(
        step.kind, nbytes / step.divisor, step.axes, mesh, splits_tiles=splits_tiles
    )
    return cast(StepKind, kind), seconds
