"""`--latency-limit`: the largest batch of a serving step that takes no longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli_quantities import parse_duration
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.cli_inputs import Target
    from shardwright.planner.latency import WithinLatency
    from shardwright.planner.plan import Plan

LatencyLimit = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="With --step: finds the batch with the most tokens a second whose step takes no "
        "longer, such as 30ms; --batch is where it begins.",
        rich_help_panel="Reference models",
    ),
]


def check(varied: bool, server: str | None) -> None:
    """Refuses what a search over batches does not go with.

    Raises:
      InputError: several forms are to be chosen from, or a server is to plan.
    """
    if varied or server is not None:
        other = "--server" if server is not None else "several forms of the step"
        raise InputError(
            f"{other} and a search over batches do not go together",
            where="--latency-limit",
            do="Leave one of them out",
        )


def largest(limit: str, loaded: Target, asked: Mapping[str, Any]) -> tuple[Target, WithinLatency]:
    """The batch that is found, loaded, and its plan.

    Args:
      limit: as the command line has it.
      loaded: a serving step with its first batch.
      asked: options of `shardwright.plan`.

    Raises:
      InputError: this is no serving step, or even a batch of one takes longer.
    """
    from shardwright.cli_inputs import load_target
    from shardwright.models.registry import checked_options
    from shardwright.planner.latency import largest_batch
    from shardwright.planner.planning import plan

    seconds = parse_duration(limit, "--latency-limit")
    options: Mapping[str, Any] = loaded.options
    model = loaded.model
    if model is None or options.get("step", "train") == "train":
        raise InputError(
            "a latency is limited for serving steps of reference models",
            where="--latency-limit",
            do="Add --step decode, or leave it out",
        )
    targets: dict[int, Target] = {}

    def plan_at(batch: int) -> Plan:
        one = load_target(model, None, (), {**options, "batch": batch})
        targets[batch] = replace(one, name=loaded.name)
        own = {"model_flops": one.model_flops, "tokens_per_step": one.tokens_per_step}
        return plan(
            one.program,
            *one.args,
            donate_argnums=one.donate,
            name=loaded.name,
            **{**asked, **own},
        )

    first = checked_options(model, dict(options)).batch
    found = largest_batch(plan_at, seconds, first=first)
    return targets[found.batch], found


def trials_text(found: WithinLatency) -> str:
    """What was tried, in one line."""
    tried = (
        f"{t.batch} does not fit"
        if t.step_time_s is None
        else f"{t.batch} {t.step_time_s * 1e3:.3g} ms"
        for t in found.trials
    )
    return f"batch {found.batch} has the most tokens/s within the limit; tried: {', '.join(tried)}"
