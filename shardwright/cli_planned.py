"""The program of a plan's file, found again for commands that need both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright import cli_inputs as inputs
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.planner.plan_schema import PlanModel


def load_planned(
    plan: PlanModel,
    where: Path,
    *,
    target: str | None,
    args: str | None,
    donate: Sequence[int] | None,
    options: Mapping[str, Any],
) -> inputs.Target:
    """Loads what was planned, as the plan tells it where the command line does not.

    Args:
      where: the plan's file.
      target, args, donate, options: as given on the command line. Options of a reference model are
        laid over those of the plan.

    Raises:
      InputError: neither tells what was planned, or it does not load.
    """
    from shardwright.models import model_names

    origin = plan.program.origin
    same = origin is not None and target in (None, origin.target)
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
            do="Give --target (and --args, model options) as for `shardwright plan`",
        )
    donated = plan.program.donate_argnums if donate is None and args else donate or ()
    return inputs.load_target(target, args, donated, options)
