"""`shardwright verify`: a plan beside what a compiler makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright import cli_options as options
from shardwright.cli_console import print_view
from shardwright.cli_planned import load_planned
from shardwright.cli_text import source_text, table
from shardwright.cli_work import model_options, planning
from shardwright.reports.numbers import op_text, quantity

if TYPE_CHECKING:
    from shardwright.planner.verification_report import Verification

_SHOWN_OPERATIONS = 12
_SHOWN_BUFFERS = 8
_SHOWN_KERNELS = 8
_SAME = 0.05


class CompilerName(StrEnum):
    """The compilers that judge a plan."""

    tpu = "tpu"
    cpu = "cpu"


def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's JSON file.")],
    target: Annotated[
        str | None,
        typer.Argument(
            help="What was planned, as for `shardwright plan`; by default what the plan says.",
            show_default=False,
        ),
    ] = None,
    compiler: Annotated[
        CompilerName,
        typer.Option(
            help="tpu compiles for the planned slice (no TPU is needed; a minute or more); cpu "
            "compiles for CPU devices, runs the program and compares with one device."
        ),
    ] = CompilerName.tpu,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write the annotated module and the compiled HLO here."
        ),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for the compiler.")] = 1800.0,
    args: options.Arguments = None,
    donate: options.Donate = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    layers: options.Layers = None,
    remat: options.Remat = None,
    settings: options.Settings = None,
    everything: options.All = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Compiles a program under its plan, and compares with what the plan predicts.

    TARGET and its options are those that were planned, which the plan tells. Exit codes: 0
    compared, 2 bad input, 3 the compiler finds no room for the program.
    """
    with planning(quiet or as_json) as report:
        from shardwright.planner.plan import Plan
        from shardwright.planner.search import Progress
        from shardwright.planner.verification import verify as judge

        loaded_plan = Plan.load(plan)
        chosen = model_options(settings, batch, sequence, layers, remat)
        loaded = load_planned(
            loaded_plan.data,
            plan,
            target=target,
            args=args,
            donate=donate,
            options=chosen,
            named_by="the second argument",
        )
        report(Progress("compiling the program"))
        found = judge(
            loaded_plan,
            loaded.program,
            *loaded.args,
            compiler=compiler.value,
            time_limit_s=time_limit,
            keep=keep,
        )
    if as_json:
        print(found.model_dump_json(indent=1))
    else:
        print_view(verification_view(found, everything=everything))
    if not found.fits:
        raise typer.Exit(3)


def verification_view(found: Verification, *, everything: bool = False) -> RenderableType:
    """A verification for the terminal."""
    mesh = " x ".join(f"{name} {size}" for name, size in found.mesh_axes.items())
    parts: list[RenderableType] = [
        Text(f"{found.program} on {found.topology}, mesh {mesh}", style="bold"),
        Text(f"compiled by {found.compiler_version} in {found.compile_seconds:.0f} s", style="dim"),
    ]
    if not found.fits:
        parts += [Text(), Text(f"The compiler finds no room for it: {found.problem}", style="red")]
        return Group(*parts)
    parts += [Text(), _summary(found)]
    if found.collectives:
        parts += [Text(), Text("Collectives of one step on one device"), _collectives(found)]
    if found.operations and (everything or found.compiler == "tpu"):
        most = len(found.operations) if everything else _SHOWN_OPERATIONS
        parts += [Text(), Text("By line of the program"), _operations(found, most)]
    if found.kernels:
        most = len(found.kernels) if everything else _SHOWN_KERNELS
        parts += [Text(), Text("Compute by line of the program"), _kernels(found, most)]
    if found.memory.compiled_buffers:
        most = len(found.memory.compiled_buffers) if everything else _SHOWN_BUFFERS
        parts += [Text(), Text("Memory where it is fullest"), _buffers(found, most)]
    if found.outputs:
        parts += [Text(), *_outputs(found)]
    if found.notes:
        parts += [Text(), *(Text(f"* {note}") for note in found.notes)]
    return Group(*parts)


def _summary(found: Verification) -> Table:
    shown = table("", ">predicted", ">compiled", ">predicted / compiled")
    memory, time = found.memory, found.time
    shown.add_row(
        "collectives",
        quantity(found.predicted_bytes, "B"),
        quantity(found.compiled_bytes, "B"),
        _ratio(found.predicted_bytes, found.compiled_bytes),
    )
    if memory.compiled_peak and found.compiler == "tpu":
        shown.add_row(
            "memory, alive together",
            quantity(memory.predicted_peak, "B"),
            quantity(memory.compiled_peak, "B"),
            _ratio(memory.predicted_peak, memory.compiled_peak),
        )
    if found.compiler == "tpu":
        shown.add_row(
            "memory, with gaps",
            quantity(memory.predicted_peak, "B"),
            quantity(memory.compiled_used, "B"),
            _ratio(memory.predicted_peak, memory.compiled_used),
        )
    if time.compiled_step is not None:
        shown.add_row(
            "step, by the schedule",
            quantity(time.predicted_step, "s"),
            quantity(time.compiled_step, "s"),
            _ratio(time.predicted_step, time.compiled_step),
        )
    if time.compiled_compute is not None:
        shown.add_row(
            "compute",
            quantity(time.predicted_compute, "s"),
            quantity(time.compiled_compute, "s"),
            _ratio(time.predicted_compute, time.compiled_compute),
        )
    return shown


def _ratio(predicted: float, compiled: float) -> Text:
    if not compiled:
        return Text("-" if predicted else "1.000", style="dim")
    ratio = predicted / compiled
    return Text(f"{ratio:.3f}", style="" if abs(ratio - 1) <= _SAME else "yellow")


def _collectives(found: Verification) -> Table:
    shown = table("kind", "axes", ">predicted", ">runs", ">compiled", ">runs", ">ratio", "why")
    for row in found.collectives:
        shown.add_row(
            row.kind,
            " x ".join(row.axes) or "-",
            quantity(row.predicted_bytes, "B"),
            f"{row.predicted_runs:.0f}",
            quantity(row.compiled_bytes, "B"),
            f"{row.compiled_runs:.0f}",
            _ratio(row.predicted_bytes, row.compiled_bytes),
            Text(row.cause, style="dim"),
        )
    return shown


def _operations(found: Verification, most: int) -> Table:
    shown = table("kind", "axes", ">predicted", ">compiled", "line or name")
    for row in found.operations[:most]:
        shown.add_row(
            row.kind,
            " x ".join(row.axes) or "-",
            quantity(row.predicted_bytes, "B"),
            quantity(row.compiled_bytes, "B"),
            source_text(row.source),
        )
    return shown


def _kernels(found: Verification, most: int) -> Table:
    shown = table(">predicted", ">compiled", ">ratio", "operation", "line")
    for row in found.kernels[:most]:
        shown.add_row(
            quantity(row.predicted_s, "s"),
            quantity(row.compiled_s, "s"),
            _ratio(row.predicted_s, row.compiled_s),
            op_text(row.op),
            source_text(row.source),
        )
    return shown


def _buffers(found: Verification, most: int) -> Table:
    shown = table(">predicted", "buffer", ">compiled", "buffer")
    predicted, compiled = found.memory.predicted_buffers, found.memory.compiled_buffers
    for number in range(min(most, max(len(predicted), len(compiled)))):
        cells: list[str] = []
        for buffers in (predicted, compiled):
            known = number < len(buffers)
            cells += [quantity(buffers[number].nbytes, "B") if known else ""]
            cells += [buffers[number].name if known else ""]
        shown.add_row(*cells)
    return shown


def _outputs(found: Verification) -> Iterator[Text]:
    worst = max(found.outputs, key=lambda output: output.difference)
    yield Text(
        f"Run on CPU, {len(found.outputs)} results differ from one device's by at most "
        f"{worst.difference:.1e} of their largest value ({worst.path})"
    )
