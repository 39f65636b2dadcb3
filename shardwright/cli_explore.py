"""`shardwright explore`: a workload on hypothetical chips and tori."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright import cli_inputs as inputs
from shardwright import cli_options as options
from shardwright.cli_console import make_console, print_note, print_view
from shardwright.cli_work import model_options, planning
from shardwright.errors import DoesNotFitError, InputError

if TYPE_CHECKING:
    from shardwright.planner.explore_model import ExplorationModel


def explore(
    target: options.Target,
    base: Annotated[
        str,
        typer.Option(
            "--base",
            "-t",
            help="The slice that everything is told against: v5p:4x4x4.",
            show_default=False,
        ),
    ],
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="KNOB=VALUES",
            help="What varies: multiples of a resource of the base's chip (flops, vector, "
            "hbm_bandwidth, memory, ici_bandwidth, latency, dcn_bandwidth), as in "
            "ici_bandwidth=0.5..2, =0.5..2:3 or =0.5,1,2; torus=2d,3d or =8x8,4x4x4. Repeatable.",
            show_default=False,
        ),
    ],
    minimise: Annotated[
        list[str] | None,
        typer.Option(
            "--minimise",
            metavar="OBJECTIVE",
            help="An objective of the Pareto front: step_time, chips, memory_used or a resource; "
            "repeatable. By default the step time and every resource that varies.",
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", help="Write a .json file or an .html page; repeatable."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Keep points in this file as they are done; given again, goes on from there."
        ),
    ] = None,
    memory_fraction: options.MemoryFraction = 0.9,
    time_limit: Annotated[
        float, typer.Option(help="Seconds of search at the first point of each torus.")
    ] = 12.0,
    seed: Annotated[int, typer.Option(help="Of the solver's random choices.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(help="Points planned at a time; as many as cores by default.", min=1),
    ] = None,
    chip: options.Chip = None,
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
    """Plans a workload on hypothetical chips and tori, and shows the Pareto front.

    Exit codes: 0 at least one point has a plan, 2 bad input, 3 it fits on none.
    """
    from shardwright.hardware_profiles import load_chip, parse_slice
    from shardwright.planner.explore_model import check_names
    from shardwright.planner.explore_space import checked_vary, parse_vary, points_of

    inputs.check_time_limit(time_limit)
    inputs.check_memory_fraction(memory_fraction)
    profile = None if chip is None else load_chip(chip)
    parse_slice(base, profile)
    varied: dict[str, tuple[float | str, ...]] = {}
    for text in vary:
        knob, values = parse_vary(text)
        varied[knob] = tuple(dict.fromkeys((*varied.get(knob, ()), *values)))
    varied = checked_vary(varied)
    if minimise is not None:
        check_names(minimise)
    for path in output or ():
        _check_form(path)
        inputs.check_output(path)
    chosen_options = model_options(settings, batch, sequence, layers, remat)

    from shardwright.cli_explore_view import exploration_progress, exploration_view

    console = make_console(stderr=True)
    points = len(points_of(varied))
    with (
        planning(quiet=True),
        exploration_progress(console, points, quiet=quiet or as_json) as report,
    ):
        loaded = inputs.load_target(target, args, donate or (), chosen_options)
        from shardwright.planner.explore import explore as explore_hardware

        made = explore_hardware(
            loaded.program,
            *loaded.args,
            base=base,
            vary=varied,
            minimise=minimise,
            donate_argnums=loaded.donate,
            memory_fraction=memory_fraction,
            time_limit_s=time_limit,
            seed=seed,
            model_flops=loaded.model_flops,
            tokens_per_step=loaded.tokens_per_step,
            unit=loaded.unit,
            chip=profile,
            journal=journal,
            workers=workers,
            name=loaded.name,
            on_progress=report,
        )
    for path in output or ():
        path.write_text(_text(made.data, path, made.to_json()), encoding="utf-8")
    if as_json:
        print(made.to_json())
    else:
        print_view(exploration_view(made.data, everything))
        if output and not quiet:
            print_note(f"written to {', '.join(map(str, output))}")
    if not any(point.planned for point in made.points):
        raise _no_plan(made.data)


def _text(data: ExplorationModel, path: Path, as_json: str) -> str:
    if path.suffix == ".json":
        return as_json + "\n"
    from shardwright.reports.explore_page import exploration_page

    return exploration_page(data)


def _check_form(path: Path) -> None:
    if path.suffix not in (".json", ".html", ".htm"):
        raise InputError(
            f"{path.suffix or 'no suffix'} is no form of exploration",
            where=str(path),
            do="Give --output points.json or page.html",
        )
    if path.suffix != ".json":
        from shardwright.cli_compare import need_reports

        need_reports()


def _no_plan(data: ExplorationModel) -> Exception:
    if {point.status for point in data.points} == {"does-not-fit"}:
        return DoesNotFitError(
            "the program fits on none of these slices",
            do="Vary memory upwards, take a larger base, or change the program as told above",
        )
    return InputError(
        "none of these points has a plan", where="explore", do="See above why each has none"
    )
