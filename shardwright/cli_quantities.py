"""Durations, counts and money as the command line reads and writes them."""

from __future__ import annotations

import re

from shardwright.errors import InputError

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_NUMBER = r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?)"


def parse_duration(text: str, where: str) -> float:
    """Seconds of "90m", "36h", "14d" or "2w"; a bare number is seconds.

    Raises:
      InputError: it is none of these, or nothing.
    """
    match = re.fullmatch(rf"\s*{_NUMBER}\s*(?P<unit>[a-z]*)\s*", text.lower())
    unit = (match["unit"] or "s") if match else ""
    if match is None or unit not in _SECONDS or float(match["number"]) <= 0:
        raise InputError(f"{text!r} is not a duration", where=where, do="Write 90m, 36h or 14d")
    return float(match["number"]) * _SECONDS[unit]


def parse_count(text: str, where: str) -> float:
    """A count such as "300B", "1.5T", "15e12" or "2000000".

    Raises:
      InputError: it is none of these, or nothing.
    """
    match = re.fullmatch(rf"\s*{_NUMBER}\s*(?P<unit>[kmbgt]?)\s*", text.lower().replace("_", ""))
    if match is None or float(match["number"]) <= 0:
        raise InputError(f"{text!r} is not a count", where=where, do="Write 300B, 1.5T or 15e12")
    return float(match["number"]) * _COUNTS[match["unit"]]


def duration_text(seconds: float) -> str:
    """A long duration in two units: "14 d 3 h", "5 h 20 min", "90 s"."""
    for size, name, part, part_name in (
        (86400.0, "d", 3600.0, "h"),
        (3600.0, "h", 60.0, "min"),
        (60.0, "min", 1.0, "s"),
    ):
        if seconds >= size:
            rounded = round(seconds / part) * part
            whole = int(rounded // size)
            rest = round((rounded - whole * size) / part)
            return f"{whole} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{seconds:.3g} s"


def money_text(value: float) -> str:
    """An amount of money to three digits or to whole units: "0.00123", "1.23", "45,678"."""
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 100:
        return f"{value:.1f}"
    if value >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"
