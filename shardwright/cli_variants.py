"""`--remat auto`, `--variants ...`: several forms of a step on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.cli_inputs import Target
    from shardwright.planner.plan_schema import PlanModel
    from shardwright.planner.variants import Variant

_PANEL = "Reference models"
Remat = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY,...",
        help="Rematerialisation: none, dots or full, or a named policy of MaxText such as "
        "save_qkv_proj. Of several, or of `auto`, the best is chosen with the mesh.",
        rich_help_panel=_PANEL,
    ),
]
Microbatches = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Parts of the batch that are worked on one after the other; several or `auto` as "
        "for --remat.",
        rich_help_panel=_PANEL,
    ),
]
Stages = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Stages of a pipeline, 1 for none; several or `auto` as for --remat. Microbatches are "
        "about four a stage where they are not given.",
        rich_help_panel=_PANEL,
    ),
]
OptimizerDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE,...",
        help="Type of the optimizer's first moment: float32, bfloat16; several or `auto` as for "
        "--remat.",
        rich_help_panel=_PANEL,
    ),
]
Vary = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=V,V,...",
        help="Several values of any other option of the model, the best to be chosen; repeatable.",
        rich_help_panel=_PANEL,
    ),
]
Variants = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME",
        help="Forms of one step instead of PROGRAM: a dict of functions of --args, or of tuples "
        "(function, argument, ...), or a function that returns it.",
        rich_help_panel="Functions",
    ),
]


def split_choices(
    given: Mapping[str, str | None], vary: Sequence[str] | None
) -> tuple[dict[str, Any], dict[str, list[Any] | str]]:
    """Options of a model with one value, and those of which the best value is to be chosen.

    Args:
      given: option -> what stands on the command line.
      vary: every --vary.

    Raises:
      InputError: a --vary is not KEY=V,V, or an option is varied twice.
    """
    fixed: dict[str, Any] = {}
    choices: dict[str, list[Any] | str] = {}
    for option, text in given.items():
        if text is None:
            continue
        values = _values(text)
        if values == ["auto"]:
            choices[option] = "auto"
        elif len(values) == 1 and option != "stages":
            fixed |= _fixed(option, values[0])
        else:
            choices[option] = values
    for text in vary or ():
        option, equals, rest = text.partition("=")
        if not equals or not option or not rest or option in choices:
            problem = "is varied twice" if option in choices else "is not KEY=V,V,..."
            raise InputError(
                f"{text!r} {problem}", where="--vary", do="Write --vary sequence=2048,4096"
            )
        values = _values(rest)
        choices[option] = "auto" if values == ["auto"] else values
    return fixed, choices


def _fixed(option: str, value: Any) -> dict[str, Any]:
    from shardwright.models.choices import REMAT_POLICIES

    policy = REMAT_POLICIES.get(value) if option == "remat" else None
    return dict(policy or {option: value})


def _values(text: str) -> list[Any]:
    def value(part: str) -> Any:
        try:
            return json.loads(part)
        except ValueError:
            return part

    return [value(part.strip()) for part in text.split(",") if part.strip()]


def load(
    target: str | None,
    variants: str | None,
    args: str | None,
    donate: Sequence[int],
    options: Mapping[str, Any],
    choices: Mapping[str, list[Any] | str],
    *,
    remote: bool,
) -> tuple[Target, dict[str, Variant] | None]:
    """What is planned, and its forms where there are several.

    Args:
      target, args, donate, options: as for `load_target`.
      variants: "module:name" of forms, instead of a target.
      choices: of a reference model, as `split_choices` gives them.
      remote: whether a server plans it.

    Raises:
      InputError: there is nothing to plan or too much, or it cannot be loaded.
    """
    from shardwright.cli_inputs import Target, load_target

    if (target is None) == (variants is None):
        raise InputError(
            "there is nothing to plan" if target is None else "there is a program and --variants",
            where="command line",
            do="Give either a program, such as llama3-8b, or --variants",
        )
    if target is None:
        assert variants is not None
        if remote or options or choices:
            raise InputError(
                "--variants go with neither --server nor options of a model",
                where="command line",
                do="Plan them here, and let the functions have what options they need",
            )
        forms = load_variants(variants, args, donate)
        first = next(iter(forms.values()))
        return Target(first.fn, tuple(first.args), tuple(donate), variants), forms
    loaded = load_target(target, args, donate, options)
    if choices and loaded.model is None:
        raise InputError(
            f"{', '.join(choices)} can be chosen for reference models alone",
            where=target,
            do="Write a dict of functions, and give it as --variants my_package.train:variants",
        )
    if not choices or remote or loaded.model is None:
        return loaded, None
    from shardwright.models.choices import model_variants

    return loaded, model_variants(loaded.model, loaded.options, choices)


def options_of(plan: PlanModel, loaded: Target) -> dict[str, Any]:
    """The options of the form that was planned."""
    chosen = {one.name: one.options for one in plan.variants}
    return {**(loaded.options or {}), **chosen.get(plan.variant or "", {})}


def load_variants(reference: str, args: str | None, donate: Sequence[int]) -> dict[str, Variant]:
    """The forms that `--variants` names.

    Args:
      reference: "module:name" of a dict, or of a function that returns it.
      args: "module:name" of the arguments that functions in it share.
      donate: positions of arguments whose buffers the results take over.

    Raises:
      InputError: it is no such dict, or it has functions and there are no arguments.
    """
    from shardwright.cli_inputs import load_arguments, load_made
    from shardwright.planner.variants import Variant, checked_variants

    found = load_made(reference, "the dict of variants")
    shared = None if args is None else load_arguments(args)
    forms: dict[str, Any] = {}
    for name, form in dict(found).items() if isinstance(found, Mapping) else ():
        if callable(form) and not isinstance(form, Variant):
            if shared is None:
                raise InputError(
                    f"the arguments of {name!r} are not given",
                    where=reference,
                    do="Add --args my_package.train:example_args, or give (function, argument, "
                    "...) in the dict",
                )
            form = Variant(form, shared, tuple(donate))
        forms[name] = form
    return checked_variants(forms)
