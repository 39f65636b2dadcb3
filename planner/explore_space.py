"""Hypothetical chips and tori around a slice, and what they cost against it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import InputError
from shardwright.hardware_profiles import ChipProfile, Slice, derive_chip

TORUS = "torus"
"""The knob that is no resource: how many dimensions the torus has, or its shape."""

RESOURCES: dict[str, tuple[str, ...]] = {
    "flops": ("peak_flops",),
    "vector": ("clock_hz",),
    "hbm_bandwidth": ("hbm_bandwidth",),
    "memory": ("hbm_bytes",),
    "ici_bandwidth": ("ici_link_bandwidth", "ici_link_bandwidth_nominal"),
    "latency": ("hop_latency_s", "collective_overhead_s", "dcn_latency_s"),
    "dcn_bandwidth": ("dcn_bandwidth_per_chip",),
}
"""Resource -> the fields of a chip's profile that grow with it; those of latency shrink."""

MEANINGS = {
    "flops": "peak FLOP/s of the matrix units",
    "vector": "clock of the vector units",
    "hbm_bandwidth": "HBM bandwidth",
    "memory": "HBM capacity",
    "ici_bandwidth": "ICI bandwidth of a chip, all its links together",
    "latency": "speed of hops and of starting a collective",
    "dcn_bandwidth": "bandwidth of a chip over the data-centre network",
}

_MOST_POINTS = 1000
_DIMENSIONS = re.compile(r"([123])d")
_SHAPE = re.compile(r"\d+(x\d+){0,2}")
_RANGE = re.compile(r"\s*([^.:\s][^:\s]*?)\s*\.\.\s*([^:\s]+)\s*(?::\s*(\d+))?\s*")
_STEP = math.sqrt(2)

Value = float | str
Values = Mapping[str, Value]
"""Knob -> a multiple of what the base has, or a torus."""


def parse_vary(text: str) -> tuple[str, tuple[Value, ...]]:
    """A knob and its values: "ici_bandwidth=0.5..2", "flops=1,2,4", "torus=2d,3d".

    A range has a value every factor of the square root of two, its ends included; "0.5..2:3" has
    three values.

    Raises:
      InputError: it is no such text.
    """
    name, equals, told = (part.strip() for part in text.partition("="))
    if not equals or not told:
        raise _bad(text, "is not KNOB=VALUES")
    if name == TORUS:
        return name, tuple(part.strip() for part in told.split(","))
    values: list[float] = []
    for part in told.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            values.append(_number(part, text))
            continue
        low, high = _number(match[1], text), _number(match[2], text)
        if not 0 < low < high:
            raise _bad(text, f"has a range {part.strip()} that holds nothing")
        count = int(match[3]) if match[3] else round(math.log(high / low, _STEP)) + 1
        if count < 2:
            raise _bad(text, f"has a range {part.strip()} of less than two values")
        values += [
            float(f"{low * (high / low) ** (place / (count - 1)):.4g}") for place in range(count)
        ]
    return name, tuple(dict.fromkeys(values))


def _number(part: str, text: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise _bad(text, f"has {part.strip()!r}, which is no number") from None


def _bad(text: str, problem: str) -> InputError:
    return InputError(
        f"{text!r} {problem}",
        where="vary",
        do="Write ici_bandwidth=0.5..2, hbm_bandwidth=0.5,1,2 or torus=2d,3d; the knobs are "
        f"{', '.join((*RESOURCES, TORUS))}",
    )


def checked_vary(vary: Mapping[str, Sequence[Value]]) -> dict[str, tuple[Value, ...]]:
    """What varies, checked.

    Raises:
      InputError: nothing varies, a knob is not known, or a value is of no use.
    """
    if not vary:
        raise _bad("", "names nothing that varies")
    found: dict[str, tuple[Value, ...]] = {}
    for name, given in vary.items():
        values = (given,) if isinstance(given, str) else tuple(given)
        if name not in RESOURCES and name != TORUS:
            raise _bad(f"{name}=", "names no knob")
        if not values:
            raise _bad(f"{name}=", "has no values")
        for value in values:
            if name == TORUS:
                text = str(value)
                if not (_DIMENSIONS.fullmatch(text) or _SHAPE.fullmatch(text)):
                    raise _bad(f"{name}={value}", "is neither 1d, 2d, 3d nor a shape such as 8x8")
            elif isinstance(value, str) or not (math.isfinite(value) and value > 0):
                raise _bad(f"{name}={value}", "is no multiple above zero")
        kind = str if name == TORUS else float
        found[name] = tuple(dict.fromkeys(kind(value) for value in values))
    points = math.prod(len(values) for values in found.values())
    if points > _MOST_POINTS:
        raise InputError(
            f"these are {points} points; the limit is {_MOST_POINTS}",
            where="vary",
            do="Vary fewer knobs, or over fewer values",
        )
    return found


def points_of(vary: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    """Every combination of values, the last knob changing fastest."""
    return [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]


def key_of(values: Values) -> str:
    """A point in a text that is the same for the same point."""
    return json.dumps(dict(sorted(values.items())))


@dataclass(frozen=True)
class Hypothesis:
    """A slice that might be.

    Attributes:
      resources: resource -> how much of it a chip has, as a multiple of the base's chip.
    """

    slice: Slice
    resources: Mapping[str, float]

    @property
    def torus(self) -> str:
        """Its shape in chips."""
        return "x".join(map(str, self.slice.shape))


def hypothesis(base: Slice, values: Values) -> Hypothesis:
    """The slice with some knobs turned.

    A torus of other dimensions has as many chips where only their number is told, as near to a
    cube as they divide, and its dimensions close into rings by the rule of the base's chip. A
    chip has a pair of links for each dimension, each with the bandwidth of the base's times
    `ici_bandwidth`: fewer dimensions are fewer links and so less bandwidth a chip.

    Raises:
      InputError: the torus is not to be had of so many chips.
    """
    chip = base.chip
    shape = _shape(base, values.get(TORUS))
    scales = {name: float(values.get(name, 1.0)) for name in RESOURCES}
    changed: dict[str, Any] = {
        "torus_dimensions": len(shape),
        "ici_links_per_chip": 2 * len(shape),
        "largest_pod": shape,
        "slices": {"shapes": [shape]},
        "twisted_tori": False,
    }
    for name, fields in RESOURCES.items():
        scale = 1 / scales[name] if name == "latency" else scales[name]
        if scale != 1.0:
            changed |= {field: _scaled(chip, field, scale) for field in fields}
    source = (
        f"{chip.name}, {', '.join(f'{k}={v:g}' for k, v in scales.items() if v != 1) or 'as is'}"
    )
    made = derive_chip(chip, f"{chip.name}_like", changed, source)
    dimensions = len(base.shape)
    resources = scales | {
        "ici_bandwidth": scales["ici_bandwidth"] * len(shape) / dimensions,
    }
    return Hypothesis(Slice(made, shape, base.count), resources)


def _scaled(chip: ChipProfile, field: str, scale: float) -> Any:
    if field == "peak_flops":
        return {kind: peak.value * scale for kind, peak in chip.peak_flops.items()}
    value = getattr(chip, field).value
    return round(value * scale) if isinstance(value, int) else value * scale


def _shape(base: Slice, torus: Value | None) -> tuple[int, ...]:
    chips = math.prod(base.shape)
    if torus is None:
        return base.shape
    text = str(torus)
    match = _DIMENSIONS.fullmatch(text)
    if match is None:
        return tuple(int(size) for size in text.split("x"))
    dimensions = int(match[1])
    if len(base.shape) == dimensions:
        return base.shape
    return min(_factorings(chips, dimensions), key=lambda shape: (max(shape) - min(shape), shape))


def _factorings(chips: int, dimensions: int, least: int = 1) -> list[tuple[int, ...]]:
    """Ways to write a number of chips as a product of so many sizes in order."""
    if dimensions == 1:
        return [(chips,)] if chips >= least else []
    return [
        (size, *rest)
        for size in range(least, chips + 1)
        if chips % size == 0
        for rest in _factorings(chips // size, dimensions - 1, size)
    ]
