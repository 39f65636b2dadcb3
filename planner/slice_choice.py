"""Slices by pattern: whole generations, globs and ranges of chips."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile, chip_names, load_chip
from shardwright.hardware_profiles.slices import Slice, legal_slices, parse_slice

_COUNTED = re.compile(r"\s*(?P<count>\d+)\s*\*\s*(?P<rest>\D.*)")
_MOST_SLICES = 200


@dataclass(frozen=True)
class ChipRange:
    """Numbers of chips from `least` to `most`, both included."""

    least: int
    most: int | None

    def __contains__(self, chips: int) -> bool:
        return chips >= self.least and (self.most is None or chips <= self.most)


def parse_chip_range(text: str) -> ChipRange:
    """A range of chips: "64..512", "64..", "..512" or "64".

    Raises:
      InputError: it is none of these, or holds nothing.
    """
    match = re.fullmatch(r"\s*(\d*)\s*(\.\.)?\s*(\d*)\s*", text)
    if match is None or not (match[1] or match[3]) or (match[3] and not match[2]):
        raise InputError(f"{text!r} is not a range of chips", where="chips", do="Write 64..512")
    least = int(match[1] or 1)
    most = int(match[3]) if match[3] else None if match[2] else least
    if most is not None and most < least:
        raise InputError(f"{text!r} holds no number", where="chips", do="Write 64..512")
    return ChipRange(least, most)


def choose_slices(
    patterns: Sequence[str],
    chips: ChipRange | None = None,
    profiles: Sequence[ChipProfile] = (),
    most: int = _MOST_SLICES,
) -> tuple[Slice, ...]:
    """The legal slices that patterns name, each once, in the order of the patterns.

    Args:
      patterns: exact slices ("v5e:16x16", "v5p-128", "2*v5e:16x16"), globs over their names
        ("v5p:4x*x8", "v?e:8x8"), whole generations ("v5e", "v5e:*") or "all"; with a number of
        slices in front ("2*v5e:*"), several joined by the data-centre network.
      chips: keeps the slices of patterns that have so many chips; exact slices stay.
      profiles: used instead of the bundled profiles of the same names, and besides them.
      most: more slices than this are refused.

    Raises:
      InputError: a pattern names no slice, nothing is left in the range, or too much is.
    """
    listed = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not listed or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(
            f"{patterns!r} is no list of slices",
            where="topologies",
            do='Give texts in a list: ["v5e:16x16", "v5p:*"]',
        )
    bundled = {name: load_chip(name) for name in chip_names()}
    known = list((bundled | {profile.name: profile for profile in profiles}).values())
    found: dict[str, Slice] = {}
    for pattern in patterns:
        named, exact = _named(pattern.strip(), known)
        kept = [one for one in named if exact or chips is None or one.chips in chips]
        found.update((one.name, one) for one in kept)
    if not found:
        raise InputError(
            f"no slice of {', '.join(patterns)} has so many chips" if patterns else "none is given",
            where="topologies",
            do="Give slices such as v5e:16x16, v5p:*, or all, and a wider range of chips",
        )
    if len(found) > most:
        raise InputError(
            f"{len(found)} slices are too many to plan at once; the limit is {most}",
            where="topologies",
            do="Narrow them by a range of chips such as 64..512, or by a pattern such as v5p:8x8x*",
        )
    return tuple(found.values())


def _named(pattern: str, known: Sequence[ChipProfile]) -> tuple[Iterable[Slice], bool]:
    """The slices of one pattern, and whether it names just one."""
    counted = _COUNTED.fullmatch(pattern)
    count, rest = (int(counted["count"]), counted["rest"]) if counted else (1, pattern)
    if count < 1:
        raise InputError(f"{pattern!r} has no slices", where="topologies", do="Give 1 or more")
    names = {name.lower(): chip for chip in known for name in (chip.name,)}
    if rest.lower() == "all":
        candidates: list[Slice] = [one for chip in known for one in legal_slices(chip)]
    elif rest.lower() in names:
        candidates = list(legal_slices(names[rest.lower()]))
    elif any(mark in rest for mark in "*?["):
        candidates = [
            one
            for chip in known
            for one in legal_slices(chip)
            if fnmatchcase(one.name.lower(), rest.lower())
        ]
        if not candidates:
            raise InputError(
                f"no legal slice matches {pattern!r}",
                where="topologies",
                do="Write a pattern of names such as v5e:*, v5p:4x4x* or *:8x8; "
                f"the generations are {', '.join(chip.name for chip in known)}",
            )
    else:
        owner = names.get(rest.partition(":")[0].lower())
        return (parse_slice(pattern, owner),), True
    return [Slice(one.chip, one.shape, count) for one in candidates], False
