"""The command line: `shardwright plan`, `show`, `evaluate`, `hardware` and `models`.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 a fault of Shardwright
itself, 2 bad input, 3 the program does not fit in the memory of the slice, 4 the planning service
cannot be reached or failed, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright import cli_inputs as inputs
from shardwright import cli_latency as latency
from shardwright import cli_layout as layouts
from shardwright import cli_options as options
from shardwright import cli_specs as specs
from shardwright import cli_variants as forms
from shardwright.cli_calibrate import calibrate
from shardwright.cli_ci import ci
from shardwright.cli_compare import compare
from shardwright.cli_console import (
    accept_any_text,
    print_error,
    print_note,
    print_view,
    result_width,
)
from shardwright.cli_diff import diff
from shardwright.cli_explain import explain
from shardwright.cli_explore import explore
from shardwright.cli_export import export
from shardwright.cli_keys import keys
from shardwright.cli_remote import check_server, evaluate_on_server, plan_on_server
from shardwright.cli_report import report
from shardwright.cli_serve import serve
from shardwright.cli_sweep import sweep
from shardwright.cli_trace import trace
from shardwright.cli_verify import verify
from shardwright.cli_work import model_options as _model_options
from shardwright.cli_work import planning as _planning
from shardwright.errors import DoesNotFitError, InputError, ServiceError, ShardwrightError
from shardwright.version import VERSION

if TYPE_CHECKING:
    from shardwright.hardware_profiles import ChipProfile
    from shardwright.planner.plan_schema import EstimateModel

_EXIT_FAULT, _EXIT_INPUT, _EXIT_DOES_NOT_FIT, _EXIT_SERVICE, _EXIT_INTERRUPTED = 1, 2, 3, 4, 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 bad input, 3 does not fit in memory, 4 the planning service "
    "cannot be reached or failed, 130 interrupted, 1 a fault of Shardwright itself (set "
    "SHARDWRIGHT_DEBUG=1 to see where).",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"shardwright {VERSION}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="The version, and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Plans the sharding of JAX programs on TPU slices."""


@app.command()
def plan(
    target: options.PlannedTarget = None,
    topology: options.ConfiguredTopology = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this JSON file.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=SIZE,...",
            help="The logical mesh, such as data=16,model=16; searched for where it is not given.",
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=SPEC",
            help="A sharding that must be kept, of arguments by path (* is any text), of results "
            "(result\\[0]) or of what a source line makes (train.py:33): for each dimension None, "
            "an axis, axes joined by +, or ? to leave it open, as in \"\\[0]\\['w']=None,data\" or "
            "train.py:33=data,?. Repeatable; needs --mesh.",
        ),
    ] = None,
    memory_fraction: options.MemoryFraction = 0.9,
    time_limit: Annotated[float, typer.Option(help="Seconds of search.")] = 12.0,
    seed: Annotated[int, typer.Option(help="Of the solver's random choices.")] = 0,
    refine: options.Refine = 0,
    layout: layouts.LayoutOption = layouts.Layout.FREE,
    names: layouts.NamesOption = None,
    chip: options.Chip = None,
    server: options.Server = None,
    api_key: options.ApiKey = None,
    args: options.Arguments = None,
    donate: options.Donate = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    layers: options.Layers = None,
    step: options.Step = None,
    context: options.Context = None,
    latency_limit: latency.LatencyLimit = None,
    remat: forms.Remat = None,
    microbatches: forms.Microbatches = None,
    stages: forms.Stages = None,
    optimizer_dtype: forms.OptimizerDtype = None,
    vary: forms.Vary = None,
    variants: forms.Variants = None,
    settings: options.Settings = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Plans the sharding of a program on a slice.

    Exit codes: 0 planned, 2 bad input, 3 no sharding fits in memory, 4 the server failed.
    """
    check_server(server, api_key)
    if refine and server is not None:
        raise InputError(
            "a server compiles nothing", where="--refine", do="Refine here, or leave --refine out"
        )
    layouts.check_layout(layout, names)
    if output is not None:
        inputs.check_output(output)
    inputs.check_time_limit(time_limit)
    inputs.check_memory_fraction(memory_fraction)
    axes = None if mesh is None else specs.parse_mesh(mesh)
    topology, axes = inputs.where_to_plan(target, topology, axes)
    pins = specs.parse_pins(pin or ())
    profile = _check_slice(topology, chip, axes)
    one_of, choices = forms.split_choices(
        {
            "remat": remat,
            "microbatches": microbatches,
            "stages": stages,
            "mu_dtype": optimizer_dtype,
        },
        vary,
    )
    model_options = one_of | _model_options(
        settings, batch, sequence, layers, step=step, context=context
    )
    with _planning(quiet or as_json) as report:
        loaded, several = forms.load(
            target, variants, args, donate or (), model_options, choices, remote=server is not None
        )
        varied = bool(choices or several)
        asked: dict[str, Any] = {
            "topology": topology,
            "mesh": axes,
            "pinned": pins,
            "memory_fraction": memory_fraction,
            "time_limit_s": time_limit,
            "seed": seed,
            "model_flops": None if varied else loaded.model_flops,
            "chip": profile,
            "tokens_per_step": None if varied else loaded.tokens_per_step,
            "on_progress": report,
        }
        within = None
        if latency_limit is not None:
            latency.check(varied, server)
            loaded, within = latency.largest(latency_limit, loaded, asked)
            made = within.plan
        elif server is not None:
            named = layouts.layout_options(layout, names, loaded.args)
            made = plan_on_server(server, api_key, loaded, choices=choices, **named, **asked)
        else:
            from shardwright.planner.planning import plan as make_plan

            made = make_plan(
                loaded.program if several is None else None,
                *(loaded.args if several is None else ()),
                variants=several,
                refine=refine,
                donate_argnums=loaded.donate,
                name=loaded.name,
                **layouts.layout_options(layout, names, loaded.args),
                **asked,
            )
        from shardwright.planner.origin import with_origin

        made.data = with_origin(
            made.data,
            variants or loaded.model or target or loaded.name,
            args=args,
            variant=made.data.variant if variants else None,
            options=forms.options_of(made.data, loaded),
            unit=loaded.unit,
        )
    if output is not None:
        made.save(output)
    if as_json:
        print(made.to_json())
        return
    from shardwright.cli_plan import plan_view

    print_view(
        plan_view(
            made.data,
            name=loaded.name,
            width=result_width(),
        )
    )
    if not quiet and within is not None:
        print_note(latency.trials_text(within))
    if not quiet:
        print_note(
            f"written to {output}" if output else "not saved: give -o plan.json to keep the plan"
        )


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's JSON file.")],
    everything: options.All = False,
    as_json: options.AsJson = False,
) -> None:
    """Shows a plan."""
    with _planning(quiet=True):
        from shardwright.planner.plan import Plan

        loaded = Plan.load(path)
    if as_json:
        print(loaded.to_json())
        return
    from shardwright.cli_plan import plan_view

    print_view(plan_view(loaded.data, everything=everything, width=result_width()))


@app.command()
def evaluate(
    target: options.Target,
    topology: options.Topology,
    mesh: Annotated[
        str,
        typer.Option(metavar="AXIS=SIZE,...", help="The logical mesh, such as data=16,model=16."),
    ],
    spec: Annotated[
        Path,
        typer.Option(
            help='A TOML or JSON file of lines such as "\\[0]*\\[\'w_up\']" = "None,data,model": a '
            "pattern of argument paths (* is any text) and their sharding. The first that matches "
            "counts; what none matches is replicated."
        ),
    ],
    memory_fraction: options.MemoryFraction = 0.9,
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
    everything: options.All = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Prices a sharding that you wrote, by the measure of plans.

    Exit codes: 0 priced, 2 bad input, 3 it does not fit in memory, 4 the server failed.
    """
    check_server(server, api_key)
    inputs.check_memory_fraction(memory_fraction)
    axes = specs.parse_mesh(mesh)
    profile = _check_slice(topology, chip, axes)
    model_options = _model_options(settings, batch, sequence, layers, remat)
    patterns = specs.read_spec_file(spec)
    with _planning(quiet or as_json):
        loaded = inputs.load_target(target, args, donate or (), model_options)
        in_specs, unmatched = specs.argument_specs(loaded, patterns)
        asked: dict[str, Any] = {
            "topology": topology,
            "mesh": axes,
            "in_specs": in_specs,
            "donate_argnums": loaded.donate,
            "model_flops": loaded.model_flops,
            "chip": profile,
        }
        if server is not None:
            estimate = evaluate_on_server(server, api_key, loaded, **asked)
        else:
            from shardwright.planner.hand_made import evaluate as price

            estimate = price(loaded.program, *loaded.args, **asked)
    if unmatched and not quiet:
        some = ", ".join(unmatched[:3]) + (", ..." if unmatched[3:] else "")
        print_note(f"no pattern matches {len(unmatched)} arguments, which are replicated: {some}")
    if as_json:
        print(estimate.model_dump_json(indent=1))
    else:
        from shardwright.cli_plan import evaluation_view

        print_view(
            evaluation_view(
                estimate,
                name=loaded.name,
                topology=topology,
                mesh=axes,
                tokens_per_step=loaded.tokens_per_step,
                unit=loaded.unit,
                memory_fraction=memory_fraction,
                everything=everything,
                width=result_width(),
            )
        )
    if estimate.peak_memory_bytes > memory_fraction * estimate.memory_capacity_bytes:
        raise _over_memory(estimate, memory_fraction)


@app.command()
def hardware(
    chip: Annotated[
        str | None, typer.Argument(help="A generation, or the path of a profile; else all.")
    ] = None,
    everything: options.All = False,
    as_json: options.AsJson = False,
) -> None:
    """Shows what is known of the TPU generations, with sources and legal slices.

    As JSON, one chip is a profile that --chip of other commands takes.
    """
    from shardwright.hardware_profiles import chip_names, load_chip

    profiles = [load_chip(name) for name in ([chip] if chip else chip_names())]
    if as_json:
        data = [profile.model_dump(mode="json") for profile in profiles]
        print(json.dumps(data[0] if chip else data, indent=1))
        return
    from shardwright.cli_tables import chip_view, chips_view

    print_view(chip_view(profiles[0], everything) if chip else chips_view(profiles))


@app.command()
def models(
    name: Annotated[
        str | None,
        typer.Argument(help="A model, or a file that describes one, for its options; else all."),
    ] = None,
    step: options.Step = None,
    as_toml: Annotated[
        bool, typer.Option("--toml", help="One model as a file to change and to plan.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Shows the reference models."""
    with _planning(quiet=True):
        from shardwright.models import build, model_names

        given = {} if step is None else {"step": step}
        found = [inputs.resolve(one, given) for one in ([name] if name else model_names())]
        built = [replace(build(base, **chosen), name=label) for base, label, chosen in found]
    if as_toml:
        from shardwright.cli_tables import meanings
        from shardwright.models.config import config_text

        if name is None:
            raise InputError(
                "a file describes one model", where="--toml", do="Name it: shardwright models NAME"
            )
        facts = built[0].facts()
        print(
            config_text(
                built[0].kind, built[0].name, facts["options"], meanings(type(built[0].options))
            ),
            end="",
        )
        return
    if as_json:
        data = [model.facts() for model in built]
        print(json.dumps(data[0] if name else data, indent=1))
        return
    from shardwright.cli_tables import model_view, models_view

    print_view(model_view(built[0]) if name else models_view(built))


app.command()(calibrate)
app.command()(compare)
app.command()(sweep)
app.command()(diff)
app.command()(explain)
app.command()(explore)
app.command()(export)
app.command()(report)
app.command()(serve)
app.command()(trace)
app.command()(verify)
app.add_typer(keys)
app.add_typer(ci, name="ci")


def _check_slice(
    topology: str, chip: Path | None, mesh: dict[str, int] | None
) -> ChipProfile | None:
    """Refuses a wrong slice or mesh before anything heavy is imported.

    Returns:
      the user's own chip profile, where one is given.
    """
    from shardwright.hardware_profiles import load_chip, meshes_for_shape, parse_slice

    profile = None if chip is None else load_chip(chip)
    on = parse_slice(topology, profile)
    if mesh is not None:
        meshes_for_shape(on, mesh, limit=1)
    return profile


def _over_memory(estimate: EstimateModel, fraction: float) -> DoesNotFitError:
    from shardwright.reports.numbers import quantity

    limit = fraction * estimate.memory_capacity_bytes
    return DoesNotFitError(
        f"the sharding takes {quantity(estimate.peak_memory_bytes, 'B')} a device and "
        f"{quantity(limit, 'B')} may be used",
        where="--memory-fraction",
        do="Shard more of what fills the memory, or allow more where the compiler finds room",
        least_bytes=estimate.peak_memory_bytes,
        limit_bytes=limit,
    )


def _placed(error: ShardwrightError) -> str:
    """The message of an error, with the line of the user's code that caused it."""
    place = inputs.place_of(error.__cause__) if error.__cause__ else ""
    return str(type(error)(error.what.rstrip(".") + place, where=error.where, do=error.do))


def _usage(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "shardwright"
    return f"{error.format_message().rstrip('.')}. See `{command} --help`."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    accept_any_text()
    try:
        code = app(arguments, prog_name="shardwright", standalone_mode=False)
        sys.stdout.flush()
    except ShardwrightError as error:
        print_error(_placed(error))
        if isinstance(error, ServiceError):
            return _EXIT_SERVICE
        return _EXIT_DOES_NOT_FIT if isinstance(error, DoesNotFitError) else _EXIT_INPUT
    except typer.TyperException as error:
        print_error(_usage(error))
        return _EXIT_INPUT
    except (KeyboardInterrupt, typer.Abort):
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_FAULT
    except Exception as error:
        if os.environ.get("SHARDWRIGHT_DEBUG"):
            traceback.print_exc()
        print_error(f"a fault of Shardwright itself: {type(error).__name__}: {error}")
        return _EXIT_FAULT
    return int(code or 0)
