"""`shardwright ci`: planning in continuous integration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from shardwright import cli_options as options
from shardwright.cli_compare import Workers
from shardwright.cli_console import make_console, print_note, print_view
from shardwright.cli_text import table
from shardwright.cli_work import planning
from shardwright.errors import InputError
from shardwright.reports.numbers import quantity

if TYPE_CHECKING:
    from shardwright.batch.ci_config import Config
    from shardwright.batch.ci_lock import Lock
    from shardwright.batch.ci_verdicts import Result

ci = typer.Typer(
    help="Plans the jobs of shardwright.toml and compares them with shardwright.lock.json.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Jobs = Annotated[
    list[str] | None,
    typer.Argument(metavar="JOB...", help="Only these jobs.", show_default=False),
]
ConfigPath = Annotated[Path, typer.Option("--config", "-c", help="The jobs, a TOML file.")]
LockPath = Annotated[
    Path | None,
    typer.Option("--lock", help="The lock; shardwright.lock.json beside the jobs by default."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Plan everything, also what is unchanged.")]
Markdown = Annotated[
    Path | None, typer.Option(help="Write a summary in Markdown.", rich_help_panel="Reports")
]
Junit = Annotated[Path | None, typer.Option(help="Write JUnit XML.", rich_help_panel="Reports")]
JsonFile = Annotated[
    Path | None, typer.Option("--json-file", help="Write JSON.", rich_help_panel="Reports")
]
_DEFAULT_CONFIG = Path("shardwright.toml")


@ci.command()
def check(
    jobs: Jobs = None,
    config: ConfigPath = _DEFAULT_CONFIG,
    lock: LockPath = None,
    fresh: Fresh = False,
    markdown: Markdown = None,
    junit: Junit = None,
    json_file: JsonFile = None,
    workers: Workers = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Plans the jobs and compares them with their budgets and the lock.

    What is unchanged since the lock is not planned again. Exit codes: 0 all pass, 2 a job or the
    configuration is wrong, 3 a job does not fit, 4 is over budget, 5 is slower than the lock, 6
    shards saved state otherwise, 7 is not in the lock; the first of these that any job has.
    """
    from shardwright.batch import ci_reports
    from shardwright.batch.ci_run import stale_entries
    from shardwright.batch.ci_verdicts import exit_code

    shows = _progress(quiet or as_json, verdicts=True)
    loaded, known, results, _ = _run(config, lock, jobs or (), fresh, True, workers, shows)
    for path, make in (
        (markdown, ci_reports.as_markdown),
        (junit, ci_reports.as_junit),
        (json_file, ci_reports.as_json),
    ):
        if path is not None:
            _write(path, make(results))
    if as_json:
        print(ci_reports.as_json(results))
    else:
        print_view(_view(results))
    if not quiet and (stale := stale_entries(known, loaded)):
        print_note(f"the lock still has {', '.join(stale)}; `shardwright ci update` drops them")
    return exit_code(results)


@ci.command()
def update(
    jobs: Jobs = None,
    config: ConfigPath = _DEFAULT_CONFIG,
    lock: LockPath = None,
    fresh: Fresh = False,
    workers: Workers = None,
    quiet: options.Quiet = False,
) -> int:
    """Plans the jobs and writes the lock anew, whatever changed.

    What is unchanged since the lock is not planned again. Exit codes: 0 written, 2 a job or the
    configuration is wrong, 3 a job does not fit, 4 a job is over budget; jobs without a plan are
    left out of the lock.
    """
    from shardwright.batch.ci_lock import save_lock
    from shardwright.batch.ci_run import updated_lock
    from shardwright.batch.ci_verdicts import EXIT_CODES

    shows = _progress(quiet, verdicts=False)
    loaded, known, results, lock_path = _run(config, lock, jobs or (), fresh, False, workers, shows)
    save_lock(updated_lock(results, known, loaded, whole=not jobs), lock_path)
    kept = {"not-planned", "does-not-fit", "over-budget"}
    results = [
        r.model_copy(update={"faults": [f for f in r.faults if f.kind in kept], "notes": []})
        for r in results
    ]
    print_view(_view(results))
    if not quiet:
        print_note(f"written to {lock_path}")
    return min((EXIT_CODES[f.kind] for r in results for f in r.faults), default=0)


def _run(
    config: Path,
    lock: Path | None,
    jobs: Sequence[str],
    fresh: bool,
    price_keeping: bool,
    workers: int | None,
    shows: AbstractContextManager[Callable[[Result, int], None]],
) -> tuple[Config, Lock | None, list[Result], Path]:
    from shardwright.batch.ci_config import LOCK_NAME, load_config
    from shardwright.batch.ci_lock import load_lock

    loaded = load_config(config)
    lock_path = (lock or config.parent / LOCK_NAME).absolute()
    known = load_lock(lock_path)
    with planning(quiet=True), shows as report, contextlib.chdir(config.parent):
        from shardwright.batch.ci_run import run_jobs

        results = run_jobs(
            loaded,
            known,
            names=jobs,
            fresh=fresh,
            price_keeping=price_keeping,
            workers=workers,
            on_result=report,
        )
    return loaded, known, results, lock_path


@contextlib.contextmanager
def _progress(quiet: bool, *, verdicts: bool) -> Iterator[Callable[[Result, int], None]]:
    from shardwright.batch.ci_reports import verdict

    console = make_console(stderr=True)
    done = 0

    def report(result: Result, count: int) -> None:
        nonlocal done
        done += 1
        if not quiet:
            how = {"lock": "unchanged", "solved": "planned", None: "has no plan"}[result.source]
            told = f", {verdict(result)}" if verdicts or result.source is None else ""
            text = f"{done} of {count}: {result.job} on {result.topology} {how}{told}"
            console.print(text, highlight=False, soft_wrap=True)

    yield report


def _view(results: Sequence[Result]) -> Group:
    from shardwright.batch.ci_reports import change_text, memory_text, summary_text, verdict

    shown = table("job", "slice", ">step", ">beside lock", ">exposed", ">memory", ">MFU", "")
    for result in results:
        entry = result.entry
        cells = ["", "", "", "", ""]
        if entry is not None:
            cells = [
                quantity(entry.step_time_s, "s"),
                change_text(result),
                quantity(entry.exposed_collective_time_s, "s"),
                memory_text(result),
                f"{100 * entry.mfu:.1f} %",
            ]
        style = "green" if result.passed else "red"
        shown.add_row(result.job, result.topology, *cells, Text(verdict(result), style))
    parts: list[Text] = []
    for result in results:
        told = [(f.message, "red") for f in result.faults] + [(n, "dim") for n in result.notes]
        if told:
            parts.append(Text(f"\n{result.job} on {result.topology}", "bold"))
            parts += [Text(f"  {message}", style) for message, style in told]
    return Group(shown, *parts, Text(f"\n{summary_text(results)}", "bold"))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the report cannot be written ({error.strerror})",
            where=str(path),
            do="Give another path",
        ) from None
