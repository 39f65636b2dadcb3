"""How the command line prints."""

from __future__ import annotations

import codecs
import os
import sys

from rich.console import Console, RenderableType

_WIDTH_OF_FILES = 100
_PLAIN = {"█": "#", "▒": "+", "░": ".", "─": "-", "…": "...", "µ": "u", "≥": ">="}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters that a stream's encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in lacking), error.end


def accept_any_text() -> None:
    """Makes printing succeed whatever the encoding of stdout and stderr."""
    codecs.register_error("shardwright_plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="shardwright_plain")


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console that prints text as it is, to the stream that is current when it prints."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def result_width() -> int:
    """Columns of the terminal that stdout is, or 100 where it is a file."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return make_console().width
    return _WIDTH_OF_FILES


def print_view(view: RenderableType) -> None:
    """Prints to stdout; without trailing spaces where it is a file."""
    console = make_console(width=result_width())
    if sys.stdout.isatty():
        console.print(view)
        return
    with console.capture() as captured:
        console.print(view)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_note(text: str) -> None:
    """Prints a remark to stderr, on one line."""
    make_console(stderr=True).print(text, style="dim", soft_wrap=True)


def print_error(text: str) -> None:
    """Prints an error to stderr, on one line whatever it holds."""
    line = " ".join(text.split())
    console = make_console(stderr=True)
    console.print("error:", style="red", end=" ")
    console.print(line, soft_wrap=True)
