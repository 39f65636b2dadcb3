"""`shardwright diff`: what changed between two plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from shardwright import cli_options as options
from shardwright.cli_console import print_view
from shardwright.cli_text import source_text, table
from shardwright.cli_work import planning
from shardwright.reports.numbers import Unit, column, op_text, quantity, spec_text

if TYPE_CHECKING:
    from shardwright.planner.plan_diff import CostChange, PlanDiff, Quantity, TensorChange

_SHOWN = 12


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan's JSON file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    everything: options.All = False,
    as_json: options.AsJson = False,
) -> None:
    """Shows what changed from one plan to another, in order of seconds, and why."""
    with planning(quiet=True):
        from shardwright.planner.plan import Plan
        from shardwright.planner.plan_diff import diff_plans

        found = diff_plans(Plan.load(a).data, Plan.load(b).data)
    if as_json:
        print(found.model_dump_json(indent=1))
        return
    print_view(diff_view(found, everything))


def diff_view(found: PlanDiff, everything: bool = False) -> RenderableType:
    """A difference as people read it."""
    parts: list[RenderableType] = [
        Text.assemble(
            (found.name_a, "bold"),
            " on ",
            (found.topology_a, "bold"),
            " -> ",
            (found.name_b, "bold"),
            " on ",
            (found.topology_b, "bold"),
        ),
        Text(),
        _totals(found),
        Text(),
        Text.assemble(("Why", "bold"), "  ", _reasons(found)),
    ]
    if found.costs:
        parts += [Text(), *_costs(found.costs, everything)]
    if found.tensors:
        parts += [Text(), *_tensors(found.tensors, everything)]
    if found.same:
        parts += [Text(), Text("Both shard alike and cost the same.")]
    return Group(*parts)


def _reasons(found: PlanDiff) -> str:
    if found.reasons:
        return "; ".join(found.reasons)
    if found.same:
        return "nothing differs"
    return "both were asked the same: the search had another time or machine"


def _totals(found: PlanDiff) -> RenderableType:
    shown = table("", ">before", ">after", ">change", "")
    rows: tuple[tuple[str, Quantity, Unit], ...] = (
        ("step", found.step_time_s, "s"),
        ("compute", found.compute_time_s, "s"),
        ("exposed communication", found.exposed_collective_time_s, "s"),
        ("all communication", found.collective_time_s, "s"),
        ("peak memory", found.peak_memory_bytes, "B"),
    )
    for name, value, unit in rows:
        part = f"{100 * value.change / value.a:+.1f} %" if value.a else ""
        shown.add_row(
            name, quantity(value.a, unit), quantity(value.b, unit), signed(value.change, unit), part
        )
    mfu = found.mfu
    shown.add_row(
        "MFU", f"{100 * mfu.a:.1f} %", f"{100 * mfu.b:.1f} %", f"{100 * mfu.change:+.1f} points"
    )
    mesh = (", ".join(f"{k}={v}" for k, v in m.items()) for m in (found.mesh_a, found.mesh_b))
    shown.add_row("mesh", *mesh, "" if found.mesh_a == found.mesh_b else "changed")
    return shown


def signed(value: float, unit: Unit) -> str:
    """A difference with its sign: "+1.20 ms", "-3.40 GB", "0 s"."""
    if value == 0:
        return f"0 {unit}"
    return f"{'+' if value > 0 else '-'}{quantity(abs(value), unit)}"


def _costs(changes: Sequence[CostChange], everything: bool) -> list[RenderableType]:
    shown = changes if everything else changes[:_SHOWN]
    unit, sizes = column([abs(change.seconds.change) for change in shown], "s")
    view = table(f">{unit}", "what", "axes", "for", "")
    for change, size in zip(shown, sizes, strict=True):
        sign, style = ("+", "red") if change.seconds.change > 0 else ("-", "green")
        what = "other compute" if change.kind == "compute" and not change.op else change.kind
        place = Text.assemble(op_text(change.op), " ", source_text(change.source, most=32))
        told = [change.status] if change.status != "changed" else []
        status = ", ".join([*told, *(["runs ahead"] if change.ahead else [])])
        view.add_row(
            Text(sign + size, style), what, ", ".join(change.axes), place, Text(status, "dim")
        )
    return [_heading("Seconds of a step", len(shown), len(changes)), view]


def _tensors(changes: Sequence[TensorChange], everything: bool) -> list[RenderableType]:
    shown = changes if everything else changes[:_SHOWN]
    view = table("tensor", "before", "after", ">a device")
    for change in shown:
        more = f" and {change.count - 1} alike" if change.count > 1 else ""
        before, after = ("-" if spec is None else spec_text(spec) for spec in (change.a, change.b))
        if change.type_a != change.type_b:
            before = f"{change.type_a or ''} {before}".strip()
            after = f"{change.type_b or ''} {after}".strip()
        size = quantity(change.device_bytes.b, "B")
        delta = signed(change.device_bytes.change, "B")
        view.add_row(Text.assemble(change.path, (more, "dim")), before, after, f"{size} ({delta})")
    return [_heading("Shardings", len(shown), len(changes)), view]


def _heading(title: str, shown: int, count: int) -> Text:
    more = f"  {shown} of {count}, --all shows the rest" if shown < count else ""
    return Text.assemble((title, "bold"), (more, "dim"))
