"""Code of others that registers chips, collective algorithms and operations.

A package names it by an entry point of the group `shardwright.extensions`: a module, which is
imported, or a function without arguments, which is called. It is loaded when something is first
looked up, in the command line, in its worker processes and in the service alike.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from shardwright.errors import InputError

GROUP = "shardwright.extensions"
_STARTED: set[str] = set()


@cache
def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def load_extensions() -> None:
    """Loads every extension that is installed, each once.

    Raises:
      InputError: one does not load; says which.
    """
    for point in _installed():
        if point.value in _STARTED:
            continue
        _STARTED.add(point.value)  # before it is loaded, for it may look something up
        try:
            found = point.load()
            if callable(found):
                found()
        except Exception as error:  # whatever the code of others raises
            _STARTED.discard(point.value)
            raise InputError(
                f"it does not load: {type(error).__name__}: {error}",
                where=f"extension {point.name} ({point.value})",
                do="Repair or uninstall the package that has it",
            ) from error
