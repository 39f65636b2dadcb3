"""A plan, or the price of a hand-made sharding, as people read it in a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.cli_layout import layout_section
from shardwright.cli_text import source_text, table
from shardwright.reports.facts import (
    advice_texts,
    certificate,
    chosen_mesh,
    group_collectives,
    local_bytes,
    other_pins,
    ranked_meshes,
    ranked_variants,
    standing,
)
from shardwright.reports.numbers import column, count, op_text, quantity, spec_text, type_text
from shardwright.reports.tensors import TensorGroup, group_inputs, ungrouped

if TYPE_CHECKING:
    from shardwright.planner.plan_schema import (
        EstimateModel,
        MeshModel,
        PlanModel,
        SolverModel,
        TensorModel,
    )

_SHOWN_TENSORS = 12
_SHOWN_COLLECTIVES = 10
_SHOWN_LINES = 5
_SHOWN_MESHES = 6
_SHOWN_NOTES = 5
_BAR_WIDTH = 40
_VALUE_WIDTH = 11
_INDENT = 2
_UNBOUNDED = 10_000
_WIDE = 96
_GAP = 2
_LEAST_SPEC_WIDTH = 20


def plan_view(
    plan: PlanModel,
    *,
    name: str = "",
    everything: bool = False,
    width: int = 100,
) -> RenderableType:
    """A whole plan.

    Args:
      plan: the plan.
      name: of the program, where people know it by another than its own.
      everything: every tensor, source line, collective, mesh and warning instead of those that
        matter most.
      width: columns to lay the tables out for.
    """
    chosen = chosen_mesh(plan)
    layout = _axes(plan.mesh_axes) if chosen is None else chosen.layout
    facts = _step_facts(plan.estimate, plan.program.tokens_per_step, plan.program.unit)
    facts.append(("memory", _memory(plan.estimate, plan.options.memory_fraction)))
    facts.append(("solver", _solver(plan.solver)))
    return Group(
        _title(name or plan.program.name, plan.topology, plan.mesh_axes),
        _facts([("mesh", Text(layout)), *facts]),
        *layout_section(plan),
        *_tensors(plan, everything, width),
        *(_results(plan) if everything else ()),
        *_compute(plan.estimate, everything, width),
        *_collectives(plan.estimate, everything, width),
        *(_fullest(plan) if everything else ()),
        *_variants(plan),
        *_refined(plan),
        *_meshes(plan, chosen, everything),
        *_notes(plan, everything),
    )


def evaluation_view(
    estimate: EstimateModel,
    *,
    name: str,
    topology: str,
    mesh: dict[str, int],
    tokens_per_step: float | None,
    unit: str,
    memory_fraction: float,
    everything: bool = False,
    width: int = 100,
) -> RenderableType:
    """What a hand-made sharding costs.

    Args:
      tokens_per_step, unit: of a reference model: what a step works on, and how many of them.
      memory_fraction: part of the memory that may be used.
      everything, width: as for `plan_view`.
    """
    facts = _step_facts(estimate, tokens_per_step, unit)
    facts.append(("memory", _memory(estimate, memory_fraction)))
    return Group(
        _title(name, topology, mesh),
        _facts([("mesh", Text(_axes(mesh))), *facts]),
        *_compute(estimate, everything, width),
        *_collectives(estimate, everything, width),
    )


def _axes(mesh: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())


def _title(name: str, topology: str, mesh: dict[str, int]) -> Text:
    devices = prod(mesh.values())
    noun = "device" if devices == 1 else "devices"
    return Text.assemble((name, "bold"), " on ", (topology, "bold"), f", {devices} {noun}")


def _facts(facts: Sequence[tuple[str, Text]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for name, text in facts:
        grid.add_row(name, text)
    return Padding(grid, (1, 0, 0, _INDENT), expand=False)


def _filled(part: float) -> int:
    """Columns of a bar; an edited plan may say that a part is less than nothing."""
    return round(_BAR_WIDTH * min(1.0, max(0.0, part)))


def _step_facts(
    estimate: EstimateModel, tokens_per_step: float | None, unit: str
) -> list[tuple[str, Text]]:
    step, exposed = estimate.step_time_s, estimate.exposed_collective_time_s
    compute = _filled(estimate.compute_time_s / step) if step else _BAR_WIDTH
    bar = Text.assemble(
        quantity(step, "s").ljust(_VALUE_WIDTH),
        ("█" * compute, "cyan"),
        ("▒" * (_BAR_WIDTH - compute), "yellow"),
    )
    parts = Text.assemble(
        " " * _VALUE_WIDTH,
        ("█ ", "cyan"),
        f"compute {quantity(estimate.compute_time_s, 's')}   ",
        ("▒ ", "yellow"),
        f"exposed communication {quantity(exposed, 's')}   ",
        f"hidden {quantity(estimate.hidden_time_s, 's')}",
    )
    mfu = f"{100 * estimate.mfu:.1f} %"
    if tokens_per_step is not None and step:
        mfu = f"{mfu.ljust(_VALUE_WIDTH)}{count(tokens_per_step / step)} {unit}/s"
    facts = [("step time", bar), ("", parts), ("MFU", Text(mfu))]
    if estimate.host_copy_time_s:
        copies = f"{quantity(estimate.host_copy_time_s, 's')} to and from the memory of the host"
        facts.insert(2, ("copies", Text(copies)))
    return facts


def _memory(estimate: EstimateModel, fraction: float) -> Text:
    peak, capacity = estimate.peak_memory_bytes, estimate.memory_capacity_bytes
    part = peak / capacity
    filled = _filled(part)
    over = "" if part <= fraction else ", does not fit"
    return Text.assemble(
        quantity(peak, "B").ljust(_VALUE_WIDTH),
        ("█" * filled, "green" if not over else "red"),
        ("░" * (_BAR_WIDTH - filled), "dim"),
        f" {100 * part:.0f} % of {quantity(capacity, 'B')}, {100 * fraction:.0f} % allowed",
        (over, "red"),
    )


def _solver(solver: SolverModel) -> Text:
    return Text.assemble(solver.status.ljust(_VALUE_WIDTH), certificate(solver))


def _section(title: str, detail: str, body: RenderableType) -> tuple[RenderableType, ...]:
    heading = Text.assemble((title, "bold"), (f"  {detail}", "dim"))
    return Text(), heading, Padding(body, (0, 0, 0, _INDENT), expand=False)


def _more(shown: int, total: int, order: str) -> str:
    return f"{order}; {shown} of {total}, --all shows every one" if shown < total else order


def _tensors(plan: PlanModel, everything: bool, width: int) -> tuple[RenderableType, ...]:
    groups = ungrouped(plan.program) if everything else group_inputs(plan.program)
    shown = groups if everything else groups[:_SHOWN_TENSORS]

    def size_of(group: TensorGroup) -> float:
        return group.count * local_bytes(group.first, plan.mesh_axes)

    unit, sizes = column([size_of(group) for group in shown], "B")
    heading = f"{unit} a device"
    rows = table("argument", "type", "sharding", f">{heading}")
    for group, size in zip(shown, sizes, strict=True):
        path = Text(group.path)
        if group.also:
            path.append(f" + {', '.join(group.also)}", "dim")
        if group.first.path in plan.options.pinned:
            path.append(" pinned", "yellow")
        rows.add_row(*_tensor_cells(path, group.first), size)
    if Console(width=_UNBOUNDED).measure(rows).maximum > width - _INDENT:
        path_width = max(len(group.path) for group in shown)
        type_width = max(len(str(cell)) for cell in rows.columns[1].cells)
        rows.columns[1].no_wrap = True
        left = width - _INDENT - path_width - type_width - len(heading) - 3 * _GAP
        if left < _LEAST_SPEC_WIDTH:
            del rows.columns[1]
            left += type_width + _GAP
        if left >= _LEAST_SPEC_WIDTH:
            rows.columns[0].width = path_width
    order = "in order" if everything else "state first, then by size"
    return _section("Shardings", _more(len(shown), len(groups), order), rows)


def _results(plan: PlanModel) -> tuple[RenderableType, ...]:
    aliased = {result for result, _ in plan.program.aliases}
    rows = table("result", "type", "sharding")
    for index, tensor in enumerate(plan.program.outputs):
        if index not in aliased:
            rows.add_row(*_tensor_cells(Text(tensor.path), tensor))
    detail = f"{len(aliased)} more take over an argument's buffer and keep its sharding"
    return _section("Results", detail if aliased else "in order", rows)


def _tensor_cells(path: Text, tensor: TensorModel) -> tuple[Text, Text, Text]:
    return (
        path,
        Text(type_text(tensor.dtype, tensor.shape)),
        Text(spec_text(tensor.spec), "cyan" if any(tensor.spec) else "dim"),
    )


def _compute(estimate: EstimateModel, everything: bool, width: int) -> tuple[RenderableType, ...]:
    lines = estimate.compute
    if not lines:
        return ()
    shown = lines if everything else lines[:_SHOWN_LINES]
    unit, times = column([line.seconds for line in shown], "s")
    rows = table(f">{unit}", ">part", "most by", "line")
    for line, seconds in zip(shown, times, strict=True):
        part = line.seconds / estimate.compute_time_s if estimate.compute_time_s else 0.0
        place = source_text(
            line.source or "no line of the program", most=60 if width >= _WIDE else 40
        )
        rows.add_row(seconds, f"{100 * part:.0f} %", op_text(line.op), place)
    order = f"{quantity(estimate.compute_time_s, 's')} a step in all, by source line, longest first"
    return _section("Compute", _more(len(shown), len(lines), order), rows)


def _collectives(
    estimate: EstimateModel, everything: bool, width: int
) -> tuple[RenderableType, ...]:
    ranked = group_collectives(estimate)
    if not ranked:
        return _section("Collectives", "none", Text("no device talks to another"))
    shown = ranked if everything else ranked[:_SHOWN_COLLECTIVES]
    size_unit, sizes = column([one.nbytes for one in shown], "B")
    time_unit, times = column([one.seconds for one in shown], "s")
    rows = table("collective", "axes", f">{size_unit}", ">times", f">{time_unit}", "async", "for")
    for one, size, seconds in zip(shown, sizes, times, strict=True):
        place = source_text(one.source, most=24 if width >= _WIDE else 16)
        rows.add_row(
            one.kind,
            ", ".join(one.axes),
            size,
            f"{one.count:,.0f}",
            seconds,
            Text("yes" if one.can_hide else "no", "dim"),
            Text.assemble(op_text(one.op), " ", place),
        )
    total = quantity(estimate.collective_time_s, "s")
    order = f"{total} a step in all, largest first"
    return _section("Collectives", _more(len(shown), len(ranked), order), rows)


def _fullest(plan: PlanModel) -> tuple[RenderableType, ...]:
    buffers = plan.estimate.peak_buffers
    unit, sizes = column([buffer.nbytes for buffer in buffers], "B")
    rows = table("buffer", f">{unit}")
    for buffer, size in zip(buffers, sizes, strict=True):
        rows.add_row(_buffer_name(buffer.name, plan.program.inputs), size)
    return _section("Memory at its fullest", "on each device, largest first", rows)


def _buffer_name(name: str, arguments: Sequence[TensorModel]) -> Text:
    if match := re.fullmatch(r"argument (\d+)", name):
        number = int(match[1])
        return Text(arguments[number].path if number < len(arguments) else name)
    if match := re.fullmatch(r"(\w+) near (.*)", name):
        return Text.assemble(match[1].replace("_", "-"), " near ", source_text(match[2], most=50))
    return source_text(name, most=60)


def _meshes(
    plan: PlanModel, chosen: MeshModel | None, everything: bool
) -> tuple[RenderableType, ...]:
    meshes = plan.meshes_considered
    planned, others = ranked_meshes(plan)
    shown = [*planned, *others] if everything else planned[:_SHOWN_MESHES]
    time_unit, times = column([mesh.step_time_s or 0.0 for mesh in shown], "s")
    size_unit, sizes = column([mesh.peak_memory_bytes or 0.0 for mesh in shown], "B")
    rows = table("mesh", f">{time_unit}", f">{size_unit}", "")
    for mesh, seconds, size in zip(shown, times, sizes, strict=True):
        rows.add_row(
            Text(mesh.layout),
            "" if mesh.step_time_s is None else seconds,
            "" if mesh.peak_memory_bytes is None else size,
            Text("chosen", "green") if mesh is chosen else standing(mesh, chosen),
        )
    # What follows the colon differs from mesh to mesh: it is told in the rows.
    statuses = [mesh.status.partition(":")[0] for mesh in others]
    told = [f"{len(planned)} planned in {quantity(plan.solver.wall_time_s, 's')}"]
    told += [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    return _section("Meshes considered", _more(len(shown), len(meshes), ", ".join(told)), rows)


def _variants(plan: PlanModel) -> tuple[RenderableType, ...]:
    if not plan.variants:
        return ()
    forms = ranked_variants(plan)
    time_unit, times = column([form.step_time_s or 0.0 for form in forms], "s")
    size_unit, sizes = column([form.peak_memory_bytes or 0.0 for form in forms], "B")
    rows = table("variant", f">{time_unit}", f">{size_unit}", "")
    for form, seconds, size in zip(forms, times, sizes, strict=True):
        rows.add_row(
            Text(form.name, "green" if form.name == plan.variant else ""),
            "" if form.step_time_s is None else seconds,
            "" if form.peak_memory_bytes is None else size,
            form.status,
        )
    return _section("Variants", f"{len(forms)} forms of the step", rows)


def _refined(plan: PlanModel) -> tuple[RenderableType, ...]:
    if not plan.refined:
        return ()
    rows = table("mesh", ">predicted", ">compiled", ">peak", "")
    steps = [one.compiled_step_s for one in plan.refined if one.compiled_step_s]
    for one in plan.refined:
        step, peak = one.compiled_step_s, one.compiled_peak_bytes
        rows.add_row(
            Text(f"{one.layout}, {one.variant}" if one.variant else one.layout),
            quantity(one.predicted_step_s, "s"),
            "" if step is None else quantity(step, "s"),
            "" if peak is None else quantity(peak, "B"),
            Text("fastest compiled", "green") if step == min(steps) else one.problem,
        )
    return _section("Compiled", f"{len(plan.refined)} plans, the best predicted first", rows)


def _notes(plan: PlanModel, everything: bool) -> tuple[RenderableType, ...]:
    options = [f"{key}={value}" for key, value in plan.compiler_options.items()]
    sections: list[RenderableType] = []
    for title, style, notes in (
        ("Replicated for want of a sharding rule", "yellow", plan.replicated_ops),
        ("Kernels of unknown FLOPs, counted by their bytes alone", "yellow", plan.unpriced_ops),
        ("Assumed", "yellow", plan.assumptions),
        ("Sizes that would be faster on this mesh", "", advice_texts(plan)),
        ("Pinned besides arguments", "", other_pins(plan)),
        ("Compiler options", "", options),
    ):
        if notes:
            shown = notes if everything else notes[:_SHOWN_NOTES]
            sections += _section(
                title,
                _more(len(shown), len(notes), f"{len(notes)}"),
                Text("\n".join(shown), style),
            )
    return tuple(sections)
