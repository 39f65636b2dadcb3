"""Source lines and tables in a terminal."""

from __future__ import annotations

import re
from pathlib import Path

from rich import box
from rich.style import Style
from rich.table import Table
from rich.text import Text

_SOURCE = re.compile(r"(?P<file>.+):(?P<line>\d+)")


def source_text(source: str, most: int = 40) -> Text:
    """A source line, short enough to read and linked to the whole path where terminals can.

    Args:
      source: "path:line".
      most: characters; longer paths lose their first directories.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        return Text(source, style="dim")
    path, line = Path(match["file"]), match["line"]
    shown = path
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        shown = path.relative_to(Path.cwd())
    text = f"{shown}:{line}"
    if len(text) > most:
        kept = [f"{shown.name}:{line}"]
        for part in reversed(shown.parts[:-1]):
            if len("/".join([part, *kept])) + 2 > most:
                break
            kept.insert(0, part)
        text = "/".join(["…", *kept])
    link = f"file://{path}" if path.is_absolute() else None
    return Text(text, style=Style(dim=True, link=link))


def table(*headers: str) -> Table:
    """A table whose headers are aligned right where they start with ">"."""
    made = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        header_style="dim",
        padding=(0, 1, 0, 0),
    )
    for header in headers:
        right = header.startswith(">")
        made.add_column(
            header.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    return made
