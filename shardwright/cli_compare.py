"""`shardwright compare`: one program on many slices."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright import cli_inputs as inputs
from shardwright import cli_options as options
from shardwright.cli_console import make_console, print_note, print_view
from shardwright.cli_quantities import parse_count, parse_duration
from shardwright.cli_remote import check_server, compare_on_server
from shardwright.cli_work import model_options, planning
from shardwright.errors import DoesNotFitError, InputError

if TYPE_CHECKING:
    from shardwright.planner.comparison_rows import ComparisonModel

Topologies = Annotated[
    list[str] | None,
    typer.Option(
        "--topologies",
        "-t",
        help="Slices, globs and generations, with commas or repeated: v5e:16x16, v5p:4x4x*, v6e, "
        "all.",
        show_default=False,
    ),
]
Prices = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prices of chips: a TOML or JSON file with a table chip_hour.",
        rich_help_panel="Costs and goals",
    ),
]
Workers = Annotated[
    int | None, typer.Option(help="Slices planned at a time; as many as cores by default.", min=1)
]


def compare(
    target: options.Target,
    topologies: Topologies = None,
    chips: Annotated[
        str | None,
        typer.Option(
            metavar="LEAST..MOST",
            help="Keeps slices of globs and generations with so many chips: 64..512.",
        ),
    ] = None,
    prices: Prices = None,
    target_tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the whole run, such as 1T, whose time and cost are then told.",
            rich_help_panel="Costs and goals",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Time that the run may take: 36h, 14d.", rich_help_panel="Costs and goals"
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Money that the run may cost, in the currency of the prices.",
            rich_help_panel="Costs and goals",
        ),
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            help="Of a program that is not a reference model.", rich_help_panel="Costs and goals"
        ),
    ] = None,
    save_plans: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Write each slice's plan into this directory."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the table to this .json file, or a page to .html."
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Write the charts as PNG files.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Write the charts as SVG files.")
    ] = None,
    memory_fraction: options.MemoryFraction = 0.9,
    time_limit: Annotated[float, typer.Option(help="Seconds of search for each slice.")] = 12.0,
    seed: Annotated[int, typer.Option(help="Of the solver's random choices.")] = 0,
    workers: Workers = None,
    chip: options.Chip = None,
    server: options.Server = None,
    api_key: options.ApiKey = None,
    args: options.Arguments = None,
    donate: options.Donate = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    layers: options.Layers = None,
    remat: options.Remat = None,
    settings: options.Settings = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Plans one program on many slices and says which wins.

    Exit codes: 0 at least one slice has a plan, 2 bad input, 3 it fits on none, 4 the server
    failed.
    """
    check_server(server, api_key)
    if server is not None and (chip is not None or workers is not None):
        given = "--chip" if chip is not None else "--workers"
        raise InputError(
            f"{given} is for work on this machine", where="--server", do="Leave one of them out"
        )
    from shardwright.hardware_profiles import load_chip
    from shardwright.planner.prices import load_prices
    from shardwright.planner.slice_choice import choose_slices, parse_chip_range

    patterns = [part for text in topologies or ["all"] for part in text.split(",") if part.strip()]
    profile = None if chip is None else load_chip(chip)
    slices = choose_slices(
        patterns,
        None if chips is None else parse_chip_range(chips),
        () if profile is None else (profile,),
    )
    priced = None if prices is None else load_prices(prices)
    goal_tokens = None if target_tokens is None else parse_count(target_tokens, "--target-tokens")
    goal_time = None if deadline is None else parse_duration(deadline, "--deadline")
    if budget is not None and budget <= 0:
        raise InputError(f"{budget:g} buys nothing", where="--budget", do="Give more than 0")
    chosen_options = model_options(settings, batch, sequence, layers, remat)
    if output is not None:
        _check_form(output)
        inputs.check_output(output)
        if output.suffix != ".json":
            need_reports()
    if save_plans is not None:
        _make_directory(save_plans)

    from shardwright.cli_comparison_view import comparison_progress, comparison_view

    console = make_console(stderr=True)
    with (
        planning(quiet=True),
        comparison_progress(console, len(slices), quiet=quiet or as_json) as report,
    ):
        loaded = inputs.load_target(target, args, donate or (), chosen_options)
        asked: dict[str, Any] = {
            "topologies": [one.name for one in slices],
            "memory_fraction": memory_fraction,
            "time_limit_s": time_limit,
            "seed": seed,
            "model_flops": loaded.model_flops,
            "tokens_per_step": tokens_per_step or loaded.tokens_per_step,
            "unit": loaded.unit,
            "prices": priced,
            "target_tokens": goal_tokens,
            "deadline_s": goal_time,
            "budget": budget,
            "name": loaded.name,
            "on_progress": report,
        }
        if server is not None:
            made = compare_on_server(server, api_key, loaded, **asked)
        else:
            from shardwright.planner.comparison import compare as compare_slices

            made = compare_slices(
                loaded.program,
                *loaded.args,
                donate_argnums=loaded.donate,
                chip=profile,
                workers=workers,
                **asked,
            )
    if output is not None:
        page = output.suffix != ".json"
        output.write_text(_page(made.data) if page else made.to_json() + "\n", encoding="utf-8")
    for folder, form in ((png, "png"), (svg, "svg")):
        if folder is not None:
            _write_charts(made.data, folder, form)
    if save_plans is not None:
        for topology, plan in made.plans.items():
            plan.save(save_plans / f"{topology.replace(':', '-').replace('*', 'x')}.json")
    if as_json:
        print(made.to_json())
    else:
        print_view(comparison_view(made.data))
        if save_plans is not None and not quiet:
            print_note(f"{len(made.plans)} plans written to {save_plans}")
    if not made.plans:
        raise _failure(made.rows)


def _failure(rows: object) -> Exception:
    statuses = {row.status for row in rows}  # type: ignore[attr-defined]
    if statuses == {"does-not-fit"}:
        return DoesNotFitError(
            "the program fits on none of these slices",
            do="Add larger ones, or change the program as told above",
        )
    return InputError(
        "none of these slices has a plan", where="compare", do="See above why each has none"
    )


def _check_form(output: Path) -> None:
    if output.suffix not in (".json", ".html", ".htm"):
        raise InputError(
            f"{output.suffix or 'no suffix'} is no form of comparison",
            where=str(output),
            do="Give --output table.json or page.html",
        )


def _page(comparison: ComparisonModel) -> str:
    need_reports()
    from shardwright.reports.comparison_page import comparison_page

    return comparison_page(comparison)


def _write_charts(comparison: ComparisonModel, folder: Path, form: str) -> None:
    from shardwright.reports.pictures import write_comparison_pictures

    files = write_comparison_pictures(comparison, folder, "svg" if form == "svg" else "png")
    print_note(f"written to {folder}: {', '.join(file.name for file in files)}")


def need_reports() -> None:
    """Refuses to begin what ends in a page that cannot be made.

    Raises:
      InputError: what makes pages is not installed.
    """
    if find_spec("jinja2") is None or find_spec("plotly") is None:
        raise InputError(
            "pages need jinja2 and plotly",
            where="--output",
            do='Install them: pip install "shardwright[report]"',
        )


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the directory cannot be made ({error.strerror})",
            where=str(path),
            do="Give --save-plans another",
        ) from None
