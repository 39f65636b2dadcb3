"""What a plan predicts beside what a compiler made of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from shardwright.hardware_profiles.logical_mesh import DCN_DIMENSION, LogicalMesh
from shardwright.planner.compiled import CompiledCollective
from shardwright.planner.compiled_kernels import KernelComparison
from shardwright.planner.plan_schema import BufferModel, CollectiveModel, EstimateModel

AGREES = 0.05
"""Figures that differ by no more than this part count as the same."""
_NEGLIGIBLE = 0.01
"""Collectives that move less than this part of all bytes need no explanation."""
_SHOWN_BUFFERS = 20


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CollectiveComparison(_Model):
    """The collectives of one kind over the same mesh axes, of one step on one device.

    Bytes are of the larger of input and output, times runs.
    """

    kind: str
    axes: list[str]
    predicted_bytes: float
    predicted_runs: float
    compiled_bytes: float
    compiled_runs: float
    asynchronous_bytes: float = Field(description="compiled ones that other work runs beside")
    cause: str = Field(description="why the two differ, where it is known; else empty")


class OperationComparison(_Model):
    """The collectives of one kind and axes that belong to one line of the program."""

    kind: str
    axes: list[str]
    source: str = Field(description='"file:line", or the name that JAX gave the operation')
    predicted_bytes: float
    compiled_bytes: float


class MemoryComparison(_Model):
    """Memory of one device.

    Attributes are bytes. `compiled_used` is arguments, temporaries and results that alias no
    argument: what the program takes from the device, gaps between buffers included.
    """

    predicted_peak: float
    compiled_peak: float | None = Field(description="what the compiler says is alive together")
    compiled_used: float
    arguments: float
    temporaries: float
    outputs: float
    aliased: float
    predicted_buffers: list[BufferModel]
    compiled_buffers: list[BufferModel]


class TimeComparison(_Model):
    """Seconds of one step.

    The compiler's compute is its estimated cycles of all kernels at the chip's clock: a heuristic
    of its scheduler. Its collectives are priced as predicted ones are, and its step follows the
    schedule: what runs beside what (see `compiled_schedule`).
    """

    predicted_step: float
    predicted_compute: float
    predicted_collectives: float
    compiled_step: float | None = None
    compiled_compute: float | None = None
    compiled_collectives: float | None = None


class OutputComparison(_Model):
    """One result as computed by the planned program and by one device."""

    path: str
    difference: float = Field(description="largest, as a part of the largest value expected")


class Verification(_Model):
    """A plan beside the program that a compiler made of it."""

    program: str
    topology: str
    mesh_axes: dict[str, int]
    compiler: str
    compiler_version: str
    compile_seconds: float
    fits: bool
    problem: str = Field(description="what the compiler says where it made no program")
    collectives: list[CollectiveComparison]
    operations: list[OperationComparison]
    memory: MemoryComparison
    time: TimeComparison
    kernels: list[KernelComparison] = Field(
        default=[], description="of the lines that were predicted to compute longest"
    )
    outputs: list[OutputComparison] = Field(description="on CPU, where the program is run too")
    notes: list[str]

    @property
    def predicted_bytes(self) -> float:
        """Bytes of all predicted collectives."""
        return sum(row.predicted_bytes for row in self.collectives)

    @property
    def compiled_bytes(self) -> float:
        """Bytes of all compiled collectives."""
        return sum(row.compiled_bytes for row in self.collectives)

    @property
    def largest_difference(self) -> float:
        """Of all results, where the program was run; 0 where it was not."""
        return max((output.difference for output in self.outputs), default=0.0)


@dataclass
class _Sum:
    nbytes: float = 0.0
    runs: float = 0.0
    hidden: float = 0.0


Key = tuple[str, tuple[str, ...]]


def axes_across(mesh: LogicalMesh) -> frozenset[str]:
    """The axes of a mesh that lie on the network between slices alone."""
    return frozenset(
        axis.name
        for axis in mesh.axes
        if {segment.dimension for segment in axis.segments} == {DCN_DIMENSION}
    )


def _stages(
    told: CollectiveModel, mesh: dict[str, int], across: frozenset[str]
) -> Iterator[tuple[list[str], float]]:
    """A predicted collective as the compiler writes it: axes and bytes within and across slices.

    Source: as `shardwright.cost_models.collectives`: what crosses slices are shards.
    """
    within = [axis for axis in told.axes if axis not in across]
    beyond = [axis for axis in told.axes if axis in across]
    if within:
        yield within, told.nbytes
    if beyond:
        sharded = told.kind in ("all_gather", "reduce_scatter", "all_reduce")
        yield beyond, told.nbytes / (math.prod(mesh[axis] for axis in within) if sharded else 1)


def compare_collectives(
    estimate: EstimateModel,
    compiled: Sequence[CompiledCollective],
    mesh: dict[str, int],
    across: frozenset[str] = frozenset(),
) -> list[CollectiveComparison]:
    """Collectives by kind and axes, those that move most first, with causes of differences.

    Args:
      across: `axes_across` of the mesh.
    """
    predicted: dict[Key, _Sum] = defaultdict(_Sum)
    for priced in estimate.collectives:
        for axes, nbytes in _stages(priced, mesh, across):
            found = predicted[priced.kind, whole_axes(axes, mesh)]
            found.nbytes += nbytes * priced.count
            found.runs += priced.count
    made: dict[Key, _Sum] = defaultdict(_Sum)
    for one in compiled:
        if one.group > 1:
            found = made[one.kind, whole_axes(one.axes(mesh), mesh)]
            found.nbytes += one.nbytes * one.count
            found.runs += one.count
            found.hidden += one.nbytes * one.count if one.asynchronous else 0.0
    total = sum(found.nbytes for found in (*predicted.values(), *made.values()))
    rows = []
    for key in predicted.keys() | made.keys():
        told, got = predicted.get(key, _Sum()), made.get(key, _Sum())
        cause = ""
        if abs(told.nbytes - got.nbytes) > AGREES * max(told.nbytes, got.nbytes):
            if abs(told.nbytes - got.nbytes) > _NEGLIGIBLE * total:
                cause = _cause(key, predicted, made, compiled)
        elif told.runs > got.runs:
            cause = f"{told.runs - got.runs:.0f} run together with others of the same groups"
        rows.append(
            CollectiveComparison(
                kind=key[0],
                axes=list(key[1]),
                predicted_bytes=told.nbytes,
                predicted_runs=told.runs,
                compiled_bytes=got.nbytes,
                compiled_runs=got.runs,
                asynchronous_bytes=got.hidden,
                cause=cause,
            )
        )
    rows.sort(key=lambda row: -max(row.predicted_bytes, row.compiled_bytes))
    return rows


def _cause(
    key: Key,
    predicted: dict[Key, _Sum],
    made: dict[Key, _Sum],
    compiled: Sequence[CompiledCollective],
) -> str:
    kind, axes = key
    more = made.get(key, _Sum()).nbytes - predicted.get(key, _Sum()).nbytes

    def excess(other: str) -> float:
        """By how much more of another kind over the same axes was compiled than predicted."""
        at = (other, axes)
        return made.get(at, _Sum()).nbytes - predicted.get(at, _Sum()).nbytes

    def replaces(a: float, b: float) -> bool:
        return a * b < 0 and abs(a + b) <= 2 * AGREES * max(abs(a), abs(b))

    if {kind, "reduce_scatter"} <= {"all_reduce", "reduce_scatter"}:
        other = "reduce_scatter" if kind == "all_reduce" else "all_reduce"
        if replaces(more, excess(other)):
            return "reduced whole and sliced, where a reduce-scatter was predicted"
    if kind in ("all_gather", "all_reduce"):
        other = "all_reduce" if kind == "all_gather" else "all_gather"
        if replaces(more, excess(other)):
            return "gathered by a dynamic-update-slice and an all-reduce"
    windowed = any(one.windowed for one in compiled)
    if kind == "collective_permute" and windowed:
        return "matrix products go round in permutes (windowed einsum)"
    if windowed and kind in ("all_gather", "reduce_scatter") and more < 0:
        return "inside matrix products, as permutes (windowed einsum)"
    return ""


def whole_axes(axes: Iterable[str], mesh: dict[str, int]) -> tuple[str, ...]:
    """Axes in the order of the mesh; of parts of axes ("x:2") their axis."""
    named = {axis.partition(":")[0] for axis in axes}
    return tuple(axis for axis in mesh if axis in named)


def compare_operations(
    estimate: EstimateModel,
    compiled: Sequence[CompiledCollective],
    mesh: dict[str, int],
    across: frozenset[str] = frozenset(),
) -> list[OperationComparison]:
    """Collectives by kind, axes and line of the program, those that move most first.

    The compiler keeps no line for some, such as gathers of arguments: their name stands for it.
    """
    sums: dict[tuple[Key, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for told in estimate.collectives:
        for axes, nbytes in _stages(told, mesh, across):
            key = (told.kind, whole_axes(axes, mesh))
            sums[key, told.source or told.op][0] += nbytes * told.count
    for one in compiled:
        if one.group > 1:
            key = (one.kind, whole_axes(one.axes(mesh), mesh))
            sums[key, one.source or one.op_name][1] += one.nbytes * one.count
    rows = [
        OperationComparison(
            kind=kind, axes=list(axes), source=source, predicted_bytes=told, compiled_bytes=got
        )
        for ((kind, axes), source), (told, got) in sums.items()
    ]
    rows.sort(key=lambda row: -max(row.predicted_bytes, row.compiled_bytes))
    return rows


def explain(rows: Sequence[CollectiveComparison], memory: MemoryComparison) -> Iterator[str]:
    """What differs and why, in sentences."""
    for row in rows:
        if row.cause:
            over = " x ".join(row.axes) or "no axis"
            yield f"{row.kind} over {over}: {row.cause}"
    gaps = memory.compiled_used - (memory.compiled_peak or memory.compiled_used)
    if memory.compiled_buffers and gaps > AGREES * memory.compiled_used:
        yield (
            f"memory: gaps between buffers take {gaps / 1e9:.2f} GB of "
            f"{memory.compiled_used / 1e9:.2f} GB"
        )


def shown_buffers(named: Iterable[tuple[str, float]]) -> list[BufferModel]:
    """The largest of some buffers as plan data."""
    largest = sorted(named, key=lambda pair: -pair[1])[:_SHOWN_BUFFERS]
    return [BufferModel(name=name, nbytes=nbytes, kind="") for name, nbytes in largest]
