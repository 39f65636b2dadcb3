"""The sections of a plan's page, for the report and for the service."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shardwright.hardware_profiles.logical_mesh import LogicalMesh
from shardwright.planner.plan_schema import PlanModel, TensorModel
from shardwright.reports import views
from shardwright.reports.facts import (
    advice_texts,
    group_collectives,
    other_pins,
    ranked_variants,
    seconds_by_kind,
    short_source,
)
from shardwright.reports.figures import memory_figure
from shardwright.reports.numbers import (
    Unit,
    column,
    count,
    op_text,
    quantity,
    spec_text,
    type_text,
)
from shardwright.reports.torus import COLOURS, lay_out
from shardwright.reports.torus_svg import torus_data, torus_layers
from shardwright.reports.tree import Branch, tensor_tree

_OPEN_ALL_UP_TO = 60
_LEAST_TORUS_WIDTH = 600
"""Pixels to which a picture of the torus may be made smaller; beyond that it scrolls."""


@cache
def environment() -> Environment:
    """Templates with everything escaped, and the formats of numbers as filters."""
    made = Environment(
        loader=PackageLoader("shardwright.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "count": count,
        "op": op_text,
        "quantity": quantity,
        "short_source": short_source,
        "spec": spec_text,
        "tensor_type": _tensor_type,
    }
    return made


def _tensor_type(tensor: TensorModel) -> str:
    return type_text(tensor.dtype, tensor.shape)


def plan_title(plan: PlanModel) -> str:
    """What a plan is of: "llama3-8b on v5e:16x16"."""
    return f"{plan.program.name} on {plan.topology}"


def plan_headline(plan: PlanModel) -> Markup:
    """The facts that decide whether to run a plan."""
    return _render("_facts.html", headline=views.headline(plan))


def plan_sections(plan: PlanModel) -> Markup:
    """Everything else of a plan's page, from its mesh to its versions."""
    mesh = views.logical_mesh(plan)
    return _render(
        "_plan.html",
        plan=plan,
        estimate=plan.estimate,
        solver=plan.solver,
        **_mesh_context(plan, mesh),
        **_time_context(plan),
        **_memory_context(plan),
        **_sharding_context(plan),
        **_alternatives_context(plan),
        **_variants_context(plan),
    )


def _render(template: str, **context: Any) -> Markup:
    return Markup(environment().get_template(template).render(context))


def _with_text(rows: Sequence[Any], values: Sequence[float], unit: Unit) -> tuple[str, list[Any]]:
    """Rows as dicts with their value in a unit that suits the column, and its part of the most."""
    name, texts = column(values, unit)
    most = max(values, default=0.0) or 1.0
    return name, [
        {**vars(row), "text": text, "part": value / most}
        for row, text, value in zip(rows, texts, values, strict=True)
    ]


def _mesh_context(plan: PlanModel, mesh: LogicalMesh) -> dict[str, Any]:
    layout = lay_out(mesh)
    rows = views.axis_rows(mesh)
    wrapping = [name for name in (layout.across, layout.down) if layout.wraps(name)]
    told = "Squares are chips, " + ("their halves devices, " if layout.cores > 1 else "")
    told += "numbers and colours their groups"
    told += "; colours repeat" if any(row.groups > COLOURS for row in rows) else ""
    told += ". Thick links join chips of one group, one group is outlined. "
    if wrapping:
        told += f"Stubs at the edges are wraparound links of {' and '.join(wrapping)}. "
    if layout.planes:
        joins = f"Along {layout.planes}, chips at the same place of neighbouring planes are linked"
        told += joins + (", the last with the first. " if layout.wraps(layout.planes) else ". ")
    if not any(dimension.wraps for dimension in layout.dimensions):
        told += "No dimension wraps around. "
    if layout.left_out:
        told += f"{layout.left_out} more planes look alike and are not drawn. "
    return {
        "layout": views.layout_text(plan),
        "axes": rows,
        "coordinates": ", ".join(d.name for d in layout.dimensions),
        "torus": Markup(torus_layers(mesh, f"Mesh {mesh.describe()} on {mesh.slice.name}")),
        "torus_data": torus_data(mesh),
        "torus_wide": layout.width > _LEAST_TORUS_WIDTH,
        "torus_help": told,
    }


def _time_context(plan: PlanModel) -> dict[str, Any]:
    estimate = plan.estimate
    groups = group_collectives(estimate)
    compute_unit, compute = _with_text(
        estimate.compute, [line.seconds for line in estimate.compute], "s"
    )
    by_kind = seconds_by_kind(groups)
    kinds_unit, kind_texts = column(list(by_kind.values()), "s")
    most = max(by_kind.values(), default=0.0) or 1.0
    size_unit, sizes = column([one.nbytes for one in groups], "B")
    time_unit, times = column([one.seconds for one in groups], "s")
    slowest = max((one.seconds for one in groups), default=0.0) or 1.0
    return {
        "compute_part": estimate.compute_time_s / (estimate.step_time_s or 1.0),
        "hidden_s": estimate.hidden_time_s,
        "compute_unit": compute_unit,
        "compute_rows": compute,
        "kinds_unit": kinds_unit,
        "kind_rows": [
            {"kind": kind, "axes": axes, "text": text, "part": seconds / most}
            for ((kind, axes), seconds), text in zip(by_kind.items(), kind_texts, strict=True)
        ],
        "collectives_bytes": size_unit,
        "collectives_seconds": time_unit,
        "collectives": [
            {**vars(one), "size": size, "time": seconds, "part": one.seconds / slowest}
            for one, size, seconds in zip(groups, sizes, times, strict=True)
        ],
    }


def _memory_context(plan: PlanModel) -> dict[str, Any]:
    estimate = plan.estimate
    kinds = views.peak_kinds(estimate)
    peak_unit, kind_texts = column([one.nbytes for one in kinds], "B")
    buffers = views.buffer_rows(estimate)
    buffers_unit, buffer_rows = _with_text(buffers, [one.nbytes for one in buffers], "B")
    return {
        "memory_fraction": plan.options.memory_fraction,
        "memory_figure": memory_figure(estimate, plan.options.memory_fraction),
        "memory_bar": _memory_bar(plan, kinds),
        "peak_source": _peak_source(plan),
        "peak_unit": peak_unit,
        "peak_kinds": [
            {**vars(one), "text": text} for one, text in zip(kinds, kind_texts, strict=True)
        ],
        "buffers_unit": buffers_unit,
        "buffers": buffer_rows,
    }


def _peak_source(plan: PlanModel) -> str:
    memory = plan.estimate.memory
    if memory is None or not memory.positions:
        return ""
    totals = [sum(row) for row in zip(*memory.nbytes.values(), strict=True)]
    number = memory.source_of[totals.index(max(totals))]
    return memory.sources[number] if number >= 0 else ""


def _memory_bar(plan: PlanModel, kinds: Sequence[views.PeakKind]) -> list[dict[str, Any]]:
    """Pieces of the bar of memory: kinds one after the other, as parts of the capacity."""
    peak, capacity = plan.estimate.peak_memory_bytes, plan.estimate.memory_capacity_bytes
    if not kinds:
        return [{"start": 0.0, "part": min(1.0, peak / capacity), "fill": "temporary"}]
    pieces, start = [], 0.0
    for one in kinds:
        pieces.append({"start": start, "part": one.nbytes / capacity, "fill": one.kind})
        start += one.nbytes / capacity
    return pieces


def _sharding_context(plan: PlanModel) -> dict[str, Any]:
    program = plan.program
    aliased = {result for result, _ in program.aliases}
    results = [t for number, t in enumerate(program.outputs) if number not in aliased]
    inputs = tensor_tree(program.inputs, plan.mesh_axes, plan.options.pinned.__contains__)
    outputs: Branch = tensor_tree(results, plan.mesh_axes)
    leaves = inputs.count + outputs.count
    return {
        "inputs": inputs,
        "outputs": outputs,
        "aliased": len(aliased),
        "leaf_count": leaves,
        "open_all": leaves <= _OPEN_ALL_UP_TO,
        "other_pins": other_pins(plan),
        "advice": advice_texts(plan),
        "constraints": views.constraint_rows(plan.constraints),
    }


def _alternatives_context(plan: PlanModel) -> dict[str, Any]:
    rows = views.mesh_rows(plan)
    seconds = [row.step_time_s or 0.0 for row in rows]
    seconds_unit, times = column(seconds, "s")
    bytes_unit, sizes = column([row.peak_memory_bytes or 0.0 for row in rows], "B")
    return {
        "planned": sum(row.step_time_s is not None for row in rows),
        "mesh_seconds": seconds_unit,
        "mesh_bytes": bytes_unit,
        "meshes": [
            {
                **vars(row),
                "time": time if row.step_time_s is not None else "",
                "size": size if row.peak_memory_bytes is not None else "",
            }
            for row, time, size in zip(rows, times, sizes, strict=True)
        ],
    }


def _variants_context(plan: PlanModel) -> dict[str, Any]:
    forms = ranked_variants(plan)
    seconds_unit, times = column([form.step_time_s or 0.0 for form in forms], "s")
    bytes_unit, sizes = column([form.peak_memory_bytes or 0.0 for form in forms], "B")
    return {
        "variant_seconds": seconds_unit,
        "variant_bytes": bytes_unit,
        "variants": [
            {
                **vars(form),
                "time": time if form.step_time_s is not None else "",
                "size": size if form.peak_memory_bytes is not None else "",
            }
            for form, time, size in zip(forms, times, sizes, strict=True)
        ],
    }


def device_count(plan: PlanModel) -> int:
    """Devices of the slice."""
    return prod(plan.mesh_axes.values())
