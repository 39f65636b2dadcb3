"""`shardwright export`: a plan as code to paste."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright import cli_inputs as inputs
from shardwright import cli_options as options
from shardwright.cli_console import print_note
from shardwright.cli_layout import read_names
from shardwright.cli_planned import load_planned
from shardwright.cli_work import model_options, planning
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.planner.plan import Plan
    from shardwright.planner.plan_schema import PlanModel


_LEAST_NAMED = 0.5
"""Part of all elements that must have logical names, for rules to say something of a plan."""


class Form(enum.StrEnum):
    """What can be exported."""

    SPECS = "specs"
    PYTREE = "pytree"
    CONSTRAINTS = "constraints"
    FLAX = "flax"
    MAXTEXT = "maxtext"


def export(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's JSON file.")],
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            "-f",
            help="specs: PartitionSpecs by path. pytree: a literal. constraints: "
            "with_sharding_constraint lines. flax: logical axis rules. maxtext: the same as YAML.",
        ),
    ] = Form.SPECS,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file, not to stdout.")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            help="For flax and maxtext: a TOML or JSON file of lines such as \"*\\['w_up']\" = "
            '"embed,mlp", logical names of dimensions by path. Language models whose parameters '
            "are called as usual have their own."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="For pytree: what was planned, where the plan does not tell it."),
    ] = None,
    args: options.Arguments = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    layers: options.Layers = None,
    remat: options.Remat = None,
    settings: options.Settings = None,
    everything: Annotated[
        bool, typer.Option("--all", help="For constraints: all, of the backward pass too.")
    ] = False,
) -> None:
    """Writes a plan as code: specs, a pytree, constraints, or logical axis rules."""
    if output is not None:
        inputs.check_output(output)
    with planning(quiet=True):
        from shardwright.planner.plan import Plan

        plan = Plan.load(path)
        chosen = model_options(settings, batch, sequence, layers, remat)
        writers: dict[Form, Callable[[], str]] = {
            Form.SPECS: lambda: _specs(plan),
            Form.PYTREE: lambda: _pytree(plan, path, target, args, chosen),
            Form.CONSTRAINTS: lambda: _constraints(plan, everything),
            Form.FLAX: lambda: _rules(plan, names, form),
            Form.MAXTEXT: lambda: _rules(plan, names, form),
        }
        text = writers[form]()
    if output is None:
        print(text, end="")
        return
    output.write_text(text)
    print_note(f"written to {output}")


def _specs(plan: Plan) -> str:
    from shardwright.planner.export import specs_code

    return specs_code(plan.data)


def _constraints(plan: Plan, everything: bool) -> str:
    from shardwright.planner.export import constraints_code

    return constraints_code(plan.data, everything=everything)


def _pytree(
    plan: Plan, path: Path, target: str | None, args: str | None, chosen: Mapping[str, Any]
) -> str:
    import jax

    from shardwright.planner.export import pytree_code

    tree: Any = plan.in_tree
    if tree is None:
        loaded = load_planned(
            plan.data, path, target=target, args=args, donate=None, options=chosen
        )
        leaves, tree = jax.tree.flatten(loaded.args)
        shapes = [list(getattr(leaf, "shape", ())) for leaf in leaves]
        if shapes != [tensor.shape for tensor in plan.data.program.inputs]:
            raise InputError(
                "these are not the arguments that were planned",
                where=loaded.name,
                do="Give the same target, arguments and options as for the plan",
            )
    return pytree_code(plan.data, tree)


def _rules(plan: Plan, names: Path | None, form: Form) -> str:
    from shardwright.planner.export_rules import flax_code, logical_rules, maxtext_yaml

    found = logical_rules(plan.data, _names(plan.data, names))
    write = flax_code if form is Form.FLAX else maxtext_yaml
    return write(plan.data, found)


def _names(plan: PlanModel, path: Path | None) -> Mapping[str, tuple[str | None, ...]]:
    if path is not None:
        return read_names(path)
    if plan.layout is not None:
        return {path: tuple(names) for path, names in plan.layout.names.items()}
    from shardwright.models.logical_axes import decoder_names

    tensors = plan.program.inputs
    found = decoder_names([t.path for t in tensors], [len(t.shape) for t in tensors])
    sizes = {t.path: prod(t.shape) for t in tensors}
    if sum(sizes[path] for path in found) < _LEAST_NAMED * sum(sizes.values()):
        raise InputError(
            "the logical names of most dimensions are not known",
            where=plan.program.name,
            do='Give --names a file of lines such as "*[\'w_up\']" = "embed,mlp"',
        )
    return found
