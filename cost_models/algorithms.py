"""Collective algorithms of the user's own, which compete with the built-in ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.cost_models.torus import Line, TorusAxis
from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile

KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "collective_permute",
    "halo_exchange",
)
"""Kinds of collectives."""


@dataclass(frozen=True)
class Group:
    """The devices that one collective is over.

    Attributes:
      kind: which collective.
      axes: where they lie on the torus of a slice, each with its bandwidth and latency.
      cores: devices of one chip among them, 1 or 2.
      slices: slices that they are in, joined by the data-centre network.
      chip: the generation.
    """

    kind: str
    axes: tuple[TorusAxis, ...]
    cores: int
    slices: int
    chip: ChipProfile

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return math.prod(axis.size for axis in self.axes) * self.cores * self.slices


Formula = Callable[[Group], Line | None]
"""The seconds of an algorithm over a group as a function of bytes, without the fixed part of a
collective; None where it cannot run."""

_REGISTERED: dict[str, dict[str, Formula]] = {}


def register_collective(name: str, kind: str, formula: Formula) -> None:
    """Adds an algorithm for a kind of collective, used wherever it takes less than the others.

    It changes what is predicted, not what the compiler does.

    Args:
      name: as plans tell it, "one-shot".
      kind: one of "all_gather", "reduce_scatter", "all_reduce", "all_to_all",
        "collective_permute" and "halo_exchange".
      formula: the `Line` of a `Group`, by the bytes that `collective_seconds` takes for the kind,
        or None where the algorithm does not apply. The chip's fixed part of a collective is added.

    Raises:
      InputError: the name is none or taken, or there is no such kind.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w .+-]*", name):
        raise InputError(
            f"{name!r} is no name", where="register_collective", do='Call it as in "one-shot"'
        )
    if kind not in KINDS:
        raise InputError(
            f"there is no collective {kind!r}",
            where="register_collective",
            do=f"Use one of {', '.join(KINDS)}",
        )
    if name in _REGISTERED.setdefault(kind, {}):
        raise InputError(
            f"{name!r} is registered for {kind} already",
            where="register_collective",
            do="Take another name, or unregister_collective first",
        )
    _REGISTERED[kind][name] = formula
    _forget()


def unregister_collective(name: str, kind: str) -> None:
    """Takes an algorithm away again; one that is not there is no error."""
    _REGISTERED.get(kind, {}).pop(name, None)
    _forget()


def _forget() -> None:
    from shardwright.cost_models.collectives import registered_models

    registered_models.cache_clear()


def registered(kind: str) -> dict[str, Formula]:
    """The algorithms of a kind by name."""
    return _REGISTERED.get(kind, {})


def line_of(name: str, formula: Formula, group: Group) -> Line | None:
    """What a formula says of a group.

    Raises:
      InputError: it raises, or what it says is no line of seconds.
    """
    where = f"the algorithm {name} for {group.kind}"
    try:
        line = formula(group)
    except Exception as error:  # whatever the user's formula raises
        raise InputError(
            f"its formula raised {type(error).__name__}: {error}",
            where=where,
            do="Return a shardwright.Line, or None where it does not apply",
        ) from error
    if line is None:
        return None
    numbers = tuple(line) if isinstance(line, tuple) else ()
    if len(numbers) != 2 or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise InputError(
            f"its formula returned {line!r}",
            where=where,
            do="Return a shardwright.Line of seconds and seconds a byte, neither below 0",
        )
    return Line(*numbers)
