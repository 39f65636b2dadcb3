"""`shardwright explain`: why a tensor is sharded as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from shardwright import cli_inputs as inputs
from shardwright import cli_options as options
from shardwright.cli_console import make_console, print_view
from shardwright.cli_diff import signed
from shardwright.cli_planned import load_planned
from shardwright.cli_text import table
from shardwright.cli_work import model_options, planning
from shardwright.reports.numbers import quantity, spec_text

if TYPE_CHECKING:
    from shardwright.planner.explain import Alternative, Explanation, Price

_SHOWN = 10
_NAMED_OTHERS = 3
_NAMED_CHANGES = 2


def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's JSON file.")],
    name: Annotated[
        str,
        typer.Argument(
            help="The path of an argument or its end (layers/w_up), or a source line (train.py:33)."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="What was planned: a function, a file or a reference model; by default what the "
            "plan says.",
            show_default=False,
        ),
    ] = None,
    resolve: Annotated[
        int, typer.Option(help="Alternatives that are planned again around.", min=0)
    ] = 3,
    time_limit: Annotated[float, typer.Option(help="Seconds for each of these.")] = 4.0,
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
    """Shows the alternatives for one tensor or operation of a plan and what each would cost.

    Each is priced with the rest of the plan kept, and the best also with the rest planned again.
    """
    inputs.check_time_limit(time_limit)
    with planning(quiet=True):
        from shardwright.planner.plan import Plan

        plan = Plan.load(path)
        chosen = model_options(settings, batch, sequence, layers, remat)
        loaded = load_planned(
            plan.data, path, target=target, args=args, donate=donate, options=chosen
        )
        if not quiet and not as_json:
            make_console(stderr=True).print("pricing the alternatives", style="dim")
        found = plan.explain(
            name, loaded.program, *loaded.args, resolve=resolve, time_limit_s=time_limit
        )
    if as_json:
        print(found.model_dump_json(indent=1))
    else:
        print_view(explanation_view(found, everything))


def explanation_view(found: Explanation, everything: bool = False) -> RenderableType:
    """An explanation in words and seconds."""
    axes = ", ".join(f"{axis}={size}" for axis, size in found.mesh_axes.items())
    parts: list[RenderableType] = [
        Text.assemble((found.name, "bold"), f"  {found.type} on {axes}"),
        Text(
            f"planned as {spec_text(found.spec)}, in a step of {quantity(found.step_time_s, 's')}"
        ),
        *([Text(f"it is pinned: {found.pinned}", "yellow")] if found.pinned else []),
        Text(_verdict(found.alternatives)),
        Text(),
    ]
    alternatives = [a for a in found.alternatives if a.fixed is not None or a.resolved is not None]
    shown = alternatives if everything else alternatives[:_SHOWN]
    view = table("instead", ">rest kept", ">rest planned again", "why")
    for alternative in shown:
        view.add_row(
            Text(spec_text(alternative.spec), "cyan"),
            _price(alternative.fixed),
            _price(alternative.resolved),
            Text(_why(alternative), "dim"),
        )
    parts.append(view)
    left = len(alternatives) - len(shown)
    if left or found.left_out:
        told = [f"{left} more, --all shows them"] if left else []
        told += [f"{found.left_out} that move more axes were not priced"] if found.left_out else []
        parts.append(Text("; ".join(told), "dim"))
    if found.also:
        some = ", ".join(found.also[:_NAMED_OTHERS])
        more = f" and {len(found.also) - _NAMED_OTHERS} more" if found.also[_NAMED_OTHERS:] else ""
        parts.append(Text(f"the name also means {some}{more}", "dim"))
    return Group(*parts)


def _price(price: Price | None) -> Text:
    if price is None:
        return Text("-", "dim")
    text = Text(signed(price.more_s, "s"), "red" if price.more_s > 0 else "green")
    return text if price.fits else text.append(", does not fit", "yellow")


def _verdict(alternatives: Sequence[Alternative]) -> str:
    """The answer in one sentence."""
    tried = [a for a in alternatives if a.resolved is not None and a.resolved.fits]
    kept = [a for a in alternatives if a.fixed is not None and a.fixed.fits]
    if not kept and not tried:
        return "No alternative fits in memory."
    parts = []
    if kept:
        best = min(kept, key=lambda a: a.fixed.more_s if a.fixed else 0.0)
        more = best.fixed.more_s if best.fixed else 0.0
        parts.append(
            f"with the rest kept, {spec_text(best.spec)} comes nearest, {signed(more, 's')}"
        )
    if tried:
        best = min(tried, key=lambda a: a.resolved.more_s if a.resolved else 0.0)
        price = best.resolved
        if price is not None:
            moved = f" as {price.moved} other tensors move too" if price.moved else ""
            parts.append(
                f"with the rest planned again, {spec_text(best.spec)}, "
                f"{signed(price.more_s, 's')}{moved}"
            )
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _why(alternative: Alternative) -> str:
    """Where the seconds of the alternative are, with the rest kept."""
    told = []
    price = alternative.fixed or alternative.resolved
    if price is not None:
        by_kind: dict[tuple[bool, str], float] = {}
        for change in price.changes:
            over = f" over {', '.join(change.axes)}" if change.axes else ""
            key = (change.ahead, f"{change.kind}{over}")
            by_kind[key] = by_kind.get(key, 0.0) + change.seconds.change
        # What nothing can hide comes first.
        ranked = sorted(by_kind.items(), key=lambda item: (item[0][0], -abs(item[1])))
        told = [
            f"{signed(seconds, 's')} {kind}{' beside compute' if ahead else ''}"
            for (ahead, kind), seconds in ranked[:_NAMED_CHANGES]
        ]
    return "; ".join([*told, *([alternative.note] if alternative.note else [])])
