"""`shardwright calibrate`: what a chip's kernels reach, as the TPU compiler estimates it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from shardwright import cli_inputs as inputs
from shardwright.cli_console import print_note, print_view
from shardwright.cli_text import table
from shardwright.cli_work import planning

if TYPE_CHECKING:
    from shardwright.planner.calibration import Calibrated


def calibrate(
    chip: Annotated[str, typer.Argument(metavar="CHIP", help="A chip's name or profile.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write terms and samples here, as JSON."),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(help="Compile this family of programs only; may be given several times."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compiles small programs for a chip and fits the compute model to the compiler's estimates.

    It takes some minutes and no TPU. Matrix products, attention, convolutions, elementwise kernels,
    reductions, gathers, scatters and sorts are compiled in bf16, f32 and, where the chip has it,
    int8. What was measured on devices corrects the fit. The file's "terms" go into a profile of
    your own under "calibration"; those of the bundled chips come with the package.
    """
    if out is not None:
        inputs.check_output(out)
    with planning(quiet) as report:
        from shardwright.hardware_profiles import load_chip
        from shardwright.planner.calibration import calibrate as run
        from shardwright.planner.calibration import check_families
        from shardwright.planner.search import Progress

        families = check_families(family or ())
        profile = load_chip(chip)
        found = run(
            profile,
            families,
            lambda sample: report(Progress(f"compiled {sample.family} in {sample.dtype}")),
        )
    print_view(calibration_view(found))
    if out is not None:
        out.write_text(found.to_json(), encoding="utf-8")
        print_note(f"written to {out}")


def calibration_view(found: Calibrated) -> RenderableType:
    """Terms and agreement for the terminal."""
    agreement = table("family", "samples", "estimated", "median error", "worst")
    for one in found.families:
        errors = (one.median_error, one.worst_error)
        shown = ["-" if error is None else f"{error:.1%}" for error in errors]
        agreement.add_row(one.family, str(one.samples), str(one.estimated), *shown)
    terms = table("term", "value")
    for name, value in _terms(found):
        terms.add_row(name, value)
    head = f"{found.chip} at {found.clock_hz / 1e6:.0f} MHz, by {found.terms.compiler}"
    return Group(Text(head, style="bold"), agreement, terms)


def _terms(found: Calibrated) -> Iterator[tuple[str, str]]:
    for name, value in found.terms.model_dump().items():
        label = name.replace("_", " ")
        if isinstance(value, float):
            yield label, f"{value:.4g}"
        elif name.endswith("correction"):
            yield label, f"{value['factor']:.3f} ({value['source']})"
        elif isinstance(value, dict):
            yield label, ", ".join(f"{key} {cycles:.3g}" for key, cycles in value.items())
