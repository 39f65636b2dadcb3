"""`shardwright sweep`: plans of a whole grid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardwright import cli_inputs as inputs
from shardwright import cli_options as options
from shardwright.cli_compare import Prices, Topologies, Workers
from shardwright.cli_console import make_console, print_note
from shardwright.cli_specs import parse_setting
from shardwright.cli_work import planning
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.batch.journal import Record
    from shardwright.batch.sweep import Runner

Values = str | None
_GRID = "The grid: values with commas"


def _values(text: str, help_text: str) -> Any:
    return typer.Option(text, metavar="V,V,...", help=help_text, rich_help_panel=_GRID)


def sweep(
    models: Annotated[
        str,
        typer.Option(
            "--models",
            "-m",
            metavar="MODEL,...",
            help="Reference models, functions (module:function) or files.",
            rich_help_panel=_GRID,
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="The table: .parquet, .csv or .json. Finished points are kept beside it in "
            "a .jsonl file, from which a run that was stopped goes on.",
            show_default=False,
        ),
    ],
    topologies: Topologies = None,
    chips: Annotated[
        str | None,
        typer.Option(
            metavar="LEAST..MOST",
            help="Keeps slices of globs and generations with so many chips: 64..512.",
        ),
    ] = None,
    batch: Annotated[Values, _values("--batch", "Sequences a step.")] = None,
    sequence: Annotated[Values, _values("--sequence", "Tokens a sequence.")] = None,
    layers: Annotated[Values, _values("--layers", "Numbers of layers.")] = None,
    remat: Annotated[Values, _values("--remat", "none, full or dots.")] = None,
    microbatches: Annotated[
        Values, _values("--microbatches", "Parts that a batch is worked on in.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=V,V,...",
            help="Values of any other option of the models; repeatable.",
            rich_help_panel=_GRID,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Plan on this Ray cluster; `local` starts one here."),
    ] = None,
    workers: Workers = None,
    prices: Prices = None,
    memory_fraction: Annotated[
        float, typer.Option(help="Part of a device's memory that may be used, up to 1.")
    ] = 0.9,
    time_limit: Annotated[float, typer.Option(help="Seconds of search for each point.")] = 12.0,
    seed: Annotated[int, typer.Option(help="Of the solver's random choices.")] = 0,
    args: options.Arguments = None,
    donate: options.Donate = None,
    quiet: options.Quiet = False,
) -> None:
    """Plans every combination of models, options and slices, and writes one table.

    Every finished point is saved at once; the same command goes on where it was stopped.
    """
    from shardwright.batch.grid import grid
    from shardwright.batch.sweep import local_runner, run_sweep
    from shardwright.batch.tables import check_table, write_table
    from shardwright.planner.prices import load_prices
    from shardwright.planner.slice_choice import choose_slices, parse_chip_range

    check_table(output)
    inputs.check_output(output)
    slices = choose_slices(
        _split(",".join(topologies or ["all"])), None if chips is None else parse_chip_range(chips)
    )
    named = {
        "batch": batch,
        "sequence": sequence,
        "layers": layers,
        "remat": remat,
        "microbatches": microbatches,
    }
    points = grid(
        _split(models),
        [one.name for one in slices],
        _options(named, settings or ()),
        args=args,
        donate=tuple(donate or ()),
        memory_fraction=memory_fraction,
        time_limit_s=time_limit,
        seed=seed,
    )
    runner: Runner = local_runner(workers)
    if ray is not None:
        from shardwright.batch.ray_runner import ray_runner

        runner = ray_runner(None if ray == "local" else ray)
    priced = None if prices is None else load_prices(prices)
    journal = output.with_name(output.name + ".jsonl")
    with planning(quiet=True), _progress(quiet) as report:
        records = run_sweep(points, journal, runner=runner, prices=priced, on_record=report)
    write_table(records, output)
    if not quiet:
        planned = sum(record.row.fits for record in records)
        print_note(f"{planned} of {len(records)} points have a plan; written to {output}")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _options(named: dict[str, str | None], settings: Sequence[str]) -> dict[str, list[Any]]:
    found = {name: text for name, text in named.items() if text is not None}
    for setting in settings:
        key, equals, values = setting.partition("=")
        if not equals or not key.strip():
            raise InputError(
                f"{setting!r} is not key=values", where="--set", do="Write --set d_ff=8192,14336"
            )
        found[key.strip()] = values
    return {
        name: [parse_setting(f"{name}={value}")[1] for value in _split(text)]
        for name, text in found.items()
    }


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Record, int, int], None]]:
    from shardwright.cli_comparison_view import outcome_text

    console = make_console(stderr=True)
    if quiet:
        yield lambda record, done, count: None
    elif console.is_terminal:
        columns = (
            TextColumn("points"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)

            def report(record: Record, done: int, count: int) -> None:
                bar.update(task, completed=done, total=count, description=record.point.describe())

            yield report
    else:

        def report_line(record: Record, done: int, count: int) -> None:
            text = f"{done} of {count}: {record.point.describe()}: {outcome_text(record.row)}"
            console.print(text, highlight=False, soft_wrap=True)

        yield report_line
