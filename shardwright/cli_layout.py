"""Named layouts on the command line: logical names of dimensions, and the rules of a plan."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from shardwright import cli_specs as specs
from shardwright.cli_text import table
from shardwright.errors import InputError
from shardwright.reports.numbers import quantity

if TYPE_CHECKING:
    from shardwright.planner.plan_schema import PlanModel

Names = Mapping[str, tuple[str | None, ...]]


class Layout(enum.StrEnum):
    """What shardings a plan may take."""

    FREE = "free"
    NAMED = "named"


LayoutOption = Annotated[
    Layout,
    typer.Option(
        help="named: a logical name of a dimension maps to the same mesh axes in every argument; "
        "tells the rules, and what the best plan without them takes.",
    ),
]
NamesOption = Annotated[
    Path | None,
    typer.Option(
        "--names",
        help='A TOML or JSON file of lines such as "*[\'w_up\']" = "embed,mlp", logical names of '
        "dimensions by path. Language models whose parameters are named as the reference models' "
        "need none, nor do arguments with Flax's partitioning metadata.",
    ),
]


def read_names(path: Path) -> Names:
    """Logical names from a file.

    Raises:
      InputError: the file cannot be read.
    """
    return {
        pattern: tuple(entry if isinstance(entry, str) else None for entry in spec)
        for pattern, spec in specs.read_spec_file(path).items()
    }


def check_layout(layout: Layout, names: Path | None) -> None:
    """Raises InputError where names come without a named layout."""
    if layout is Layout.FREE and names is not None:
        raise InputError(
            "names are for a named layout", where="--names", do="Give --layout named too"
        )


def layout_options(layout: Layout, names: Path | None, args: Sequence[Any]) -> dict[str, Any]:
    """What `plan` is asked of layouts.

    Raises:
      InputError: the file of names is wrong.
    """
    if layout is Layout.FREE:
        return {}
    if names is not None:
        return {"layout": "named", "logical_axes": read_names(names)}
    import jax

    from shardwright.models.logical_axes import decoder_names
    from shardwright.planner.logical_names import logical_names_of

    flat, _ = jax.tree_util.tree_flatten_with_path(tuple(args))
    carried = logical_names_of(args)
    paths = [jax.tree_util.keystr(path) for path, _ in flat]
    ranks = [len(getattr(leaf, "shape", ())) for _, leaf in flat]
    return {"layout": "named", "logical_axes": carried or decoder_names(paths, ranks)}


def layout_section(plan: PlanModel) -> tuple[RenderableType, ...]:
    """The rules of a named layout, and what they cost."""
    layout = plan.layout
    if layout is None:
        return ()
    step, free = plan.estimate.step_time_s, layout.free_step_time_s
    rows = table("name", "mesh axes")
    for rule in layout.rules:
        rows.add_row(
            rule.name, Text(", ".join(rule.axes) or "none", "cyan" if rule.axes else "dim")
        )
    cost = (
        f"a step takes {quantity(step, 's')}, and {quantity(free, 's')} without the rule that a "
        f"name maps to the same axes everywhere (+{100 * (step / free - 1):.1f} %)"
    )
    heading = Text.assemble(("Layout rules", "bold"), (f"  {cost}", "dim"))
    return Text(), heading, Padding(rows, (0, 0, 0, 2), expand=False)
