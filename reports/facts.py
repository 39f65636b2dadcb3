"""What people want to know of a plan, computed once for terminals, pages and pictures."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import PurePath

from shardwright.cost_models.memory import dtype_bytes
from shardwright.planner.plan_schema import (
    CollectiveModel,
    EstimateModel,
    MeshModel,
    PlanModel,
    SolverModel,
    TensorModel,
    VariantModel,
)
from shardwright.planner.spec_patterns import spec_text
from shardwright.reports.numbers import quantity

_PLACED = re.compile(r"(?P<what>.+) at (?P<source>\S.*:\d+)")

STAGES = {
    "load": "loading",
    "trace": "tracing the program",
    "queue": "waiting for the server",
    "read": "reading the program",
    "graph": "building the op graph",
    "kernels": "compiling the solver's kernels (first run)",
    "search": "searching meshes",
    "polish": "polishing the best",
    "compile": "compiling the best",
    "plan": "writing the plan",
    "annotate": "annotating the program",
    "write": "writing the plan",
    "done": "writing the plan",
}
"""What people call the stages of planning."""


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives that differ in nothing people look at.

    Attributes:
      nbytes: bytes on one device of the larger of input and output, of one run.
      count: runs in one step of all of them.
      seconds: in one step of all of them.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    count: float
    seconds: float
    can_hide: bool
    op: str
    source: str
    type: tuple[str, tuple[int, ...]]


def group_collectives(estimate: EstimateModel) -> list[CollectiveGroup]:
    """The collectives of a step, alike ones told once, most seconds first."""
    alike: dict[tuple[object, ...], list[CollectiveModel]] = defaultdict(list)
    for one in estimate.collectives:
        key = (one.kind, one.algorithm, *one.axes, one.nbytes, one.can_hide, one.op, one.source)
        alike[key].append(one)
    groups = [
        CollectiveGroup(
            kind=_kind(same[0]),
            axes=tuple(same[0].axes),
            nbytes=same[0].nbytes,
            count=sum(one.count for one in same),
            seconds=sum(one.seconds * one.count for one in same),
            can_hide=same[0].can_hide,
            op=same[0].op,
            source=same[0].source,
            type=(same[0].dtype, tuple(same[0].shape)),
        )
        for same in alike.values()
    ]
    return sorted(groups, key=lambda group: -group.seconds)


def _kind(one: CollectiveModel) -> str:
    by = f" by {one.algorithm}" if one.algorithm else ""
    return one.kind.replace("_", "-") + by


def seconds_by_kind(groups: Sequence[CollectiveGroup]) -> dict[tuple[str, tuple[str, ...]], float]:
    """(kind, axes) -> seconds in one step, most first."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for group in groups:
        key = (group.kind, group.axes)
        found[key] = found.get(key, 0.0) + group.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def chosen_mesh(plan: PlanModel) -> MeshModel | None:
    """The mesh that the plan is for: of those with its axes, the fastest planned."""
    candidates = [
        mesh
        for mesh in plan.meshes_considered
        if mesh.axes == plan.mesh_axes and mesh.step_time_s is not None
    ]
    return min(candidates, key=lambda mesh: mesh.step_time_s or 0.0, default=None)


def ranked_meshes(plan: PlanModel) -> tuple[list[MeshModel], list[MeshModel]]:
    """The meshes that were planned, the chosen one first and then by step time, and the others."""
    chosen = chosen_mesh(plan)
    planned = [mesh for mesh in plan.meshes_considered if mesh.step_time_s is not None]
    planned.sort(key=lambda mesh: (mesh is not chosen, mesh.step_time_s))
    return planned, [mesh for mesh in plan.meshes_considered if mesh.step_time_s is None]


def ranked_variants(plan: PlanModel) -> list[VariantModel]:
    """The forms of the step: the chosen one, then by time, by bound, and those that do not fit."""

    def rank(form: VariantModel) -> tuple[bool, bool, bool, float]:
        told = form.step_time_s if form.step_time_s is not None else form.bound_s
        return form.name != plan.variant, form.step_time_s is None, told is None, told or 0.0

    return sorted(plan.variants, key=rank)


def standing(mesh: MeshModel, chosen: MeshModel | None) -> str:
    """How a mesh compares with the chosen one: "+3.0 %" of its step time, or what became of it."""
    if mesh.step_time_s is None or chosen is None or not chosen.step_time_s:
        return mesh.status
    percent = round(100 * (mesh.step_time_s / chosen.step_time_s - 1), 1)
    return f"{percent:+.1f} %" if percent else "0.0 %"


def certificate(solver: SolverModel) -> str:
    """What is proven about a plan, in a sentence."""
    if solver.status == "optimal":
        return "no sharding costs less on this mesh by the integer program, proven"
    if solver.gap is not None:
        return f"none costs over {100 * solver.gap:.2g} % less on this mesh by the integer program"
    return "how far from the best on this mesh is not known"


def local_shape(tensor: TensorModel, mesh_axes: Mapping[str, int]) -> list[int]:
    """The shape of the largest shard of a tensor."""
    return [
        ceil(size / prod(mesh_axes[axis] for axis in axes))
        for size, axes in zip(tensor.shape, tensor.spec, strict=True)
    ]


def local_bytes(tensor: TensorModel, mesh_axes: Mapping[str, int]) -> float:
    """Bytes of a tensor on one device, without the padding of tiles."""
    return prod(local_shape(tensor, mesh_axes)) * dtype_bytes(tensor.dtype)


def short_source(source: str, most: int = 40) -> str:
    """A source line short enough to read: without what precedes an installed package's folder.

    Args:
      source: "path:line".
      most: characters; longer paths lose their first directories.
    """
    path = PurePath(source)
    parts = path.parts
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
        if len("/".join(parts)) <= most:
            return "/".join(parts)
    if not parts or len(source) <= most:
        return source
    kept = [parts[-1]]
    for part in reversed(parts[:-1]):
        if len("/".join([part, *kept])) + 2 > most:
            break
        kept.insert(0, part)
    return "/".join(["…", *kept])


def split_source(name: str) -> tuple[str, str]:
    """A buffer's name as what it is and the source line it comes from, "" where there is none."""
    match = _PLACED.fullmatch(name)
    return (match["what"], match["source"]) if match else (name, "")


def other_pins(plan: PlanModel) -> list[str]:
    """Pins of what is no argument: of results, and of what source lines make."""
    arguments = {tensor.path for tensor in plan.program.inputs}
    return [
        f"{name} as {spec_text(spec)}"
        for name, spec in plan.options.pinned.items()
        if name not in arguments
    ]


def advice_texts(plan: PlanModel) -> list[str]:
    """Sizes that would be faster, a line each: what, from and to, and what it saves."""
    found = []
    for one in plan.size_advice:
        also = f" and {one.also} more" if one.also else ""
        where = f"dimension {one.dimension} of {one.argument}{also}" if one.argument else "inside"
        found.append(
            f"{one.size} to {one.better}, {where}: {quantity(one.saved_s, 's')} less a step "
            f"({100 * one.saved_part:.1f} %)"
        )
    return found
