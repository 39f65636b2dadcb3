"""What the sections of a plan's page show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.hardware_profiles.chip import parse_chip
from shardwright.hardware_profiles.logical_mesh import LogicalMesh
from shardwright.planner.plan_schema import ConstraintModel, EstimateModel, PlanModel
from shardwright.reports.facts import (
    certificate,
    chosen_mesh,
    ranked_meshes,
    split_source,
    standing,
)
from shardwright.reports.figures import KINDS
from shardwright.reports.numbers import count, op_text, quantity, spec_text
from shardwright.reports.torus import axis_groups, describe_axis, members
from shardwright.reports.torus_svg import shown_axes

_LISTED_MEMBERS = 4


@dataclass(frozen=True)
class Fact:
    """A headline: a value, what it is of, and whether to warn."""

    name: str
    value: str
    detail: str


def logical_mesh(plan: PlanModel) -> LogicalMesh:
    """The mesh of a plan on the torus of its slice.

    Raises:
      InputError: the plan is damaged.
    """
    return LogicalMesh.from_json(plan.mesh, parse_chip(plan.chip))


def layout_text(plan: PlanModel) -> str:
    """The plan's mesh in words: "data=16 on x, model=16 on y"."""
    chosen = chosen_mesh(plan)
    return logical_mesh(plan).describe() if chosen is None else chosen.layout


def headline(plan: PlanModel) -> list[Fact]:
    """What decides whether to run the plan."""
    estimate = plan.estimate
    step, tokens = estimate.step_time_s, plan.program.tokens_per_step
    devices = prod(plan.mesh_axes.values())
    exposed = estimate.exposed_collective_time_s
    flops = quantity(estimate.matrix_flops, "FLOP")
    exposed_part = f"{100 * exposed / step:.1f} %" if step else "0 %"
    facts = [
        Fact("Step time", quantity(step, "s"), f"{exposed_part} of it exposed communication"),
        Fact(
            "MFU",
            f"{100 * estimate.mfu:.1f} %",
            f"{flops} of matrix products a step",
        ),
    ]
    if tokens is not None and step:
        each = count(tokens / step / devices)
        rate = f"{plan.program.unit.capitalize()}/s"
        facts.append(Fact(rate, count(tokens / step), f"{each} a device"))
    allowed = f"{100 * plan.options.memory_fraction:.0f} % allowed"
    part = estimate.peak_memory_bytes / estimate.memory_capacity_bytes
    over = ", does not fit" if part > 1 else ""
    facts.append(
        Fact(
            "Peak memory a device",
            quantity(estimate.peak_memory_bytes, "B"),
            f"{100 * part:.0f} % of {quantity(estimate.memory_capacity_bytes, 'B')}, "
            f"{allowed}{over}",
        )
    )
    facts.append(Fact("Solver", plan.solver.status, certificate(plan.solver)))
    return facts


@dataclass(frozen=True)
class AxisRow:
    """One mesh axis: how its devices are joined, and who is in its first group."""

    name: str
    size: int
    joined: str
    groups: int
    first: str


def axis_rows(mesh: LogicalMesh) -> list[AxisRow]:
    """The axes of a mesh in words: what the picture of the torus shows."""
    rows = []
    for name in shown_axes(mesh):
        groups = axis_groups(mesh, name)
        places = members(groups, int(groups.group.reshape(-1)[0]))
        listed = " ".join(f"({','.join(map(str, place))})" for place in places[:_LISTED_MEMBERS])
        more = f" … {len(places)} in all" if len(places) > _LISTED_MEMBERS else ""
        rows.append(
            AxisRow(name, groups.axis.size, describe_axis(groups), groups.count, listed + more)
        )
    return rows


@dataclass(frozen=True)
class PeakKind:
    """What one kind of buffer takes of the memory at its fullest."""

    kind: str
    name: str
    nbytes: float
    part: float


def peak_kinds(estimate: EstimateModel) -> list[PeakKind]:
    """What fills memory at its fullest, by kind, most first; empty for plans of older versions."""
    memory = estimate.memory
    if memory is None or not memory.positions:
        return []
    totals = [sum(row) for row in zip(*memory.nbytes.values(), strict=True)]
    at = totals.index(max(totals))
    found = [
        PeakKind(kind, KINDS.get(kind, kind), row[at], row[at] / (totals[at] or 1))
        for kind, row in memory.nbytes.items()
    ]
    return sorted((one for one in found if one.nbytes), key=lambda one: -one.nbytes)


@dataclass(frozen=True)
class BufferRow:
    """A buffer that is alive when memory is fullest."""

    what: str
    source: str
    kind: str
    nbytes: float


def buffer_rows(estimate: EstimateModel) -> list[BufferRow]:
    """The largest buffers at the peak."""
    rows = []
    for buffer in estimate.peak_buffers:
        what, source = split_source(buffer.name)
        what = what.replace("all_gather", "all-gather").replace("reduce_scatter", "reduce-scatter")
        rows.append(BufferRow(what, source, buffer.kind, buffer.nbytes))
    return rows


@dataclass(frozen=True)
class MeshRow:
    """A mesh that was considered."""

    layout: str
    step_time_s: float | None
    peak_memory_bytes: float | None
    standing: str
    chosen: bool


def mesh_rows(plan: PlanModel) -> list[MeshRow]:
    """The meshes considered, the chosen one first, then by step time, then those not planned."""
    chosen = chosen_mesh(plan)
    planned, others = ranked_meshes(plan)
    return [
        MeshRow(
            layout=mesh.layout,
            step_time_s=mesh.step_time_s,
            peak_memory_bytes=mesh.peak_memory_bytes,
            standing="chosen" if mesh is chosen else standing(mesh, chosen),
            chosen=mesh is chosen,
        )
        for mesh in [*planned, *others]
    ]


@dataclass(frozen=True)
class ConstraintRow:
    """The sharding of values inside the step that are alike."""

    source: str
    op: str
    made: str
    given: str
    count: int


def constraint_rows(constraints: Sequence[ConstraintModel]) -> list[ConstraintRow]:
    """Shardings of what is neither argument nor result, by source line in program order."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for constraint in constraints:
        site = constraint.site
        if site.kind == "argument":
            continue
        made = spec_text(constraint.made)
        given = "" if constraint.given is None else spec_text(constraint.given)
        op = op_text(site.op) if site.op else site.kind
        key = (constraint.source, op, made, given if given != made else "")
        counts[key] = counts.get(key, 0) + 1
    return [ConstraintRow(*key, number) for key, number in counts.items()]
