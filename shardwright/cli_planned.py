"""The program of a plan's file, found again for commands that need both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright import cli_inputs as inputs
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.planner.plan_schema import OriginModel, PlanModel


def load_planned(
    plan: PlanModel,
    where: Path,
    *,
    target: str | None,
    args: str | None,
    donate: Sequence[int] | None,
    options: Mapping[str, Any],
    named_by: str = "--target",
) -> inputs.Target:
    """Loads what was planned, as the plan tells it where the command line does not.

    Args:
      where: the plan's file.
      target, args, donate, options: as given on the command line. Options of a reference model are
        laid over those of the plan.
      named_by: where the command line takes the target.

    Raises:
      InputError: neither tells what was planned, or it does not load.
    """
    from shardwright.models import model_names

    origin = plan.program.origin
    same = origin is not None and target in (None, origin.target)
    if origin is not None and origin.variant is not None and same:
        if options:
            raise InputError(
                f"{', '.join(options)} can be given of reference models alone",
                where=origin.target,
                do="Leave it out, or plan again with other variants",
            )
        return _form(origin, args, plan.program.donate_argnums if donate is None else donate)
    if origin is not None and same:
        target = origin.target
        args = args or origin.args
        options = {**origin.options, **options}
    elif target is None and plan.program.name in model_names():
        target = plan.program.name
    if target is None:
        raise InputError(
            "a plan that was made from Python does not tell where its program is",
            where=str(where),
            do=f"Name the program with {named_by} (and --args, options of a model) as for "
            "`shardwright plan`",
        )
    donated = plan.program.donate_argnums if donate is None and args else donate or ()
    return inputs.load_target(target, args, donated, options)


def _form(origin: OriginModel, args: str | None, donate: Sequence[int]) -> inputs.Target:
    """The one of several variants that was planned."""
    from shardwright.cli_variants import load_variants

    forms = load_variants(origin.target, args or origin.args, donate)
    name = origin.variant or ""
    if name not in forms:
        raise InputError(
            f"there is no variant {name!r} any more; there are {', '.join(forms)}",
            where=origin.target,
            do="Plan again, or name the program that was planned",
        )
    form = forms[name]
    donated = form.donate_argnums
    positions = donate if donated is None else [donated] if isinstance(donated, int) else donated
    return inputs.Target(form.fn, tuple(form.args), tuple(positions), name)
