"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str,
    typer.Argument(
        help="A reference model (llama3-8b), a file that describes one (model.toml), a function "
        "(my_package.train:step), or a file with a jax.export artifact or StableHLO (text or "
        "bytecode).",
        show_default=False,
    ),
]
PlannedTarget = Annotated[
    str | None,
    typer.Argument(
        help="A reference model (llama3-8b), a file that describes one (model.toml), a function "
        "(my_package.train:step), or a file with a jax.export artifact or StableHLO (text or "
        "bytecode).",
        show_default=False,
    ),
]
Topology = Annotated[
    str,
    typer.Option(
        "--topology",
        "-t",
        help="The slice: v5e:16x16, v5p-128, or 2*v5e:16x16 for two joined by the data-centre "
        "network.",
        show_default=False,
    ),
]
Arguments = Annotated[
    str | None,
    typer.Option(
        "--args",
        metavar="MODULE:NAME",
        help="Arguments of a function: a tuple of arrays or jax.ShapeDtypeStructs, or a function "
        "that returns it.",
        rich_help_panel="Functions",
    ),
]
Donate = Annotated[
    list[int] | None,
    typer.Option(
        "--donate",
        metavar="N",
        help="Position of an argument whose buffers the results take over; repeatable.",
        rich_help_panel="Functions",
    ),
]
ConfiguredTopology = Annotated[
    str | None,
    typer.Option(
        "--topology",
        "-t",
        help="The slice: v5e:16x16, v5p-128, or 2*v5e:16x16 for two joined by the data-centre "
        "network. A file of a model may name it.",
        show_default=False,
    ),
]
Step = Annotated[
    str | None,
    typer.Option(
        help="Of a decoder: train, or prefill or decode to serve it with a cache of keys and "
        "values.",
        rich_help_panel="Reference models",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Positions of each sequence in the cache, in serving.",
        rich_help_panel="Reference models",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(help="Sequences a step, over all devices.", rich_help_panel="Reference models"),
]
Sequence = Annotated[
    int | None, typer.Option(help="Tokens a sequence.", rich_help_panel="Reference models")
]
Layers = Annotated[
    int | None, typer.Option(help="Number of layers.", rich_help_panel="Reference models")
]
Remat = Annotated[
    str | None,
    typer.Option(help="Rematerialisation: none, full or dots.", rich_help_panel="Reference models"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other option of the model (`shardwright models NAME` lists them); repeatable.",
        rich_help_panel="Reference models",
    ),
]
Refine = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        max=32,
        help="Compile so many of the best plans with the TPU compiler, a minute or more each, and "
        "take the best by the compiled program.",
    ),
]
MemoryFraction = Annotated[
    float, typer.Option(help="Part of a device's memory that may be used, up to 1.")
]
Chip = Annotated[
    Path | None,
    typer.Option(help="A chip profile of your own, a JSON file, instead of the bundled one."),
]
Server = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Work on this server (`shardwright serve`) instead of here.",
        rich_help_panel="Planning service",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="SHARDWRIGHT_API_KEY",
        show_envvar=True,
        help="The key of the server; the variable keeps it out of lists of processes.",
        rich_help_panel="Planning service",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
All = Annotated[bool, typer.Option("--all", help="Everything, not only what matters most.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
