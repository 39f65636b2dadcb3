"""Numbers, specs and types as people read them, in terminals and on pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import median
from typing import Literal

Unit = Literal["s", "B", "FLOP", "FLOP/s", "B/s", "Hz"]

_PREFIXES = (
    (1e18, "E"),
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
)


def _prefix(largest: float, unit: Unit) -> tuple[float, str]:
    smallest = 1e-9 if unit == "s" else 1.0
    greatest = 1.0 if unit == "s" else 1e18
    for scale, name in _PREFIXES:
        if smallest <= scale <= greatest and abs(largest) >= scale:
            return scale, name
    return 1.0, ""


def quantity(value: float, unit: Unit) -> str:
    """A value to about three digits in the SI prefix that suits it: 0.0123, "s" is "12.3 ms"."""
    scale, prefix = _prefix(value, unit)
    scaled = value / scale
    digits = 0 if unit == "B" and scale == 1.0 else _digits(scaled)
    return f"{scaled:.{digits}f} {prefix}{unit}"


def _digits(scaled: float) -> int:
    magnitude = abs(scaled)
    return 0 if magnitude == 0 else 1 if magnitude >= 10 else 2


def column(values: Sequence[float], unit: Unit) -> tuple[str, list[str]]:
    """Values of one column in one unit, so that their decimal points align.

    Returns:
      the unit with its prefix, between those that suit the largest and the usual value, and the
      numbers.
    """
    sizes = [abs(value) for value in values if value]
    largest = max(sizes, default=0.0)
    scale, prefix = _prefix(sqrt(largest * median(sizes)) if sizes else 0.0, unit)
    digits = _digits(largest / scale)
    return f"{prefix}{unit}", [f"{value / scale:.{digits}f}" for value in values]


def count(value: float) -> str:
    """A count with a short prefix where it is large: 8030261248 is "8.03 B", 512 is "512"."""
    for scale, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.{_digits(value / scale) or 1}f} {name}"
    return f"{value:,.1f}" if value < 100 and not float(value).is_integer() else f"{value:,.0f}"


def spec_text(spec: Iterable[Sequence[str]]) -> str:
    """A sharding as the Python that makes its PartitionSpec: "P(None, ('x', 'y'))"."""
    entries = [
        "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
        for axes in spec
    ]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def type_text(dtype: str, shape: Iterable[int]) -> str:
    """A tensor type as XLA prints it: "bf16[8,128]"."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def op_text(name: str) -> str:
    """An operation's name without its dialect: "stablehlo.dot_general" is "dot_general"."""
    return name.rpartition(".")[2]
