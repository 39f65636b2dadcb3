"""Slices: which exist, what they are called, which of their dimensions wrap around."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, log, prod

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile, chip_names, load_chip

_MOST_SLICES = 256
"""Joined in one topology."""


@dataclass(frozen=True)
class Slice:
    """`count` slices of `shape` chips each; several are joined by the data-centre network."""

    chip: ChipProfile
    shape: tuple[int, ...]
    count: int = 1

    @property
    def name(self) -> str:
        """As people write it: "v5e:16x16", "2*v5e:16x16"."""
        one = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        return one if self.count == 1 else f"{self.count}*{one}"

    @property
    def chips(self) -> int:
        """Chips of all the slices."""
        return prod(self.shape) * self.count

    @property
    def devices(self) -> int:
        """JAX devices of all the slices."""
        return self.chips * self.chip.jax_devices_per_chip.value

    @property
    def hosts(self) -> int:
        """Physical hosts of all the slices; a slice smaller than a host counts as one."""
        return ceil(prod(self.shape) / self.chip.chips_per_host.value) * self.count

    @cached_property
    def wraps(self) -> tuple[bool, ...]:
        """Which dimensions of `shape` have wraparound links."""
        return self.chip.wraps(self.shape)

    @property
    def twisted(self) -> bool:
        """Whether the slice can be a twisted torus: n x n x 2n or n x 2n x 2n in whole cubes.

        Google offers the choice when the slice is created. The cost models price it as the
        plain torus.

        Source: Google Cloud documentation of TPU v4 (the shapes) and v5p (which of them).
        """
        if not self.chip.twisted_tori.value or len(self.shape) != 3 or not all(self.wraps):
            return False
        small, middle, large = sorted(self.shape)
        return large == 2 * small and middle in (small, large)


def _cubes(edge: int, most_chips: int) -> set[tuple[int, ...]]:
    """Shapes A <= B <= C of whole cubes of `edge`, up to `most_chips` chips."""
    longest = most_chips // edge**2
    return {
        (a, b, c)
        for a in range(edge, longest + 1, edge)
        for b in range(a, most_chips // a**2 + 1, edge)
        for c in range(b, most_chips // (a * b) + 1, edge)
    }


# Bounded, since profiles may come from users.
@lru_cache(maxsize=64)
def legal_slices(chip: ChipProfile) -> tuple[Slice, ...]:
    """Every single slice of the generation, smallest first; of one size, the most cubic first."""
    rule = chip.slices.value
    shapes = set(rule.shapes)
    if rule.cube_edge is not None and rule.largest_cube_slice_chips is not None:
        shapes |= _cubes(rule.cube_edge, rule.largest_cube_slice_chips)
    ordered = sorted(shapes, key=lambda shape: (prod(shape), sum(shape), shape))
    return tuple(Slice(chip, shape) for shape in ordered)


def _nearest(slices: tuple[Slice, ...], chips: int, shape: tuple[int, ...] | None) -> list[Slice]:
    def distance(candidate: Slice) -> tuple[bool, float]:
        permuted = shape is not None and sorted(candidate.shape) == sorted(shape)
        return (not permuted, abs(log(candidate.chips / max(chips, 1))))

    return sorted(slices, key=distance)


def _unknown_slice(
    text: str, chip: ChipProfile, chips: int, shape: tuple[int, ...] | None
) -> InputError:
    nearest = _nearest(legal_slices(chip), chips, shape)
    shown = ", ".join(candidate.name for candidate in nearest[:12])
    more = f" and {len(nearest) - 12} more" if nearest[12:] else ""
    return InputError(
        f"{text!r} is not a slice of {chip.name}",
        where="topology",
        do=f"use one of these, nearest first: {shown}{more}",
    )


def _product_chips(number: int, chip: ChipProfile) -> int | None:
    """Chips of the product whose name ends in `number`; None where it makes no whole chips."""
    if chip.product_counts.value == "chips":
        return number
    chips, rest = divmod(number, chip.tensorcores_per_chip.value)
    return None if rest else chips


def product_name(one: Slice) -> str:
    """The name Google sells a single slice under, by its first prefix: "v5litepod-256"."""
    chip = one.chip
    per_chip = 1 if chip.product_counts.value == "chips" else chip.tensorcores_per_chip.value
    return f"{chip.product_prefixes.value[0]}-{prod(one.shape) * per_chip}"


def _find_chip(name: str, text: str, chip: ChipProfile | None) -> ChipProfile:
    candidates = [load_chip(known) for known in chip_names()] if chip is None else [chip]
    for candidate in candidates:
        names = {candidate.name, *candidate.product_prefixes.value}
        if name.lower() in {known.lower() for known in names}:
            return candidate
    raise InputError(
        f"{text!r} names no known chip",
        where="topology",
        do=f"write CHIP:SHAPE, such as v5e:16x16, with one of the chips "
        f"{', '.join(candidate.name for candidate in candidates)}",
    )


_TOPOLOGY = re.compile(
    r"\s*(?:(?P<count>\d+)\s*\*\s*)?(?:(?P<chip>[A-Za-z][\w.]*)(?:(?P<mark>[:-]))?)?"
    r"(?P<size>\d+(?:x\d+)*)\s*",
)


def parse_slice(text: str, chip: ChipProfile | None = None) -> Slice:
    """Read a slice as people write it.

    Args:
      text: a shape in chips ("v5e:16x16"), a product name ("v5litepod-256", "v5p-128"), or
        either with a number of slices in front ("2*v5e:16x16"). Product names of v2, v3, v4,
        v5p and tpu7x count TensorCores, of v5e and v6e chips; of the shapes of that size the
        most cubic one is meant, which is the default of Google's documentation.
      chip: the profile to use instead of the bundled ones; then "16x16" alone will do.

    Raises:
      InputError: it is not a slice; lists the legal ones, nearest first.
    """
    match = _TOPOLOGY.fullmatch(text)
    named = match is not None and match["chip"] is not None and match["mark"] is not None
    bare = match is not None and match["chip"] is None and chip is not None
    if match is None or not (named or bare):
        raise InputError(
            f"{text!r} is not a topology",
            where="topology",
            do="write a shape such as v5e:16x16, a product name such as v5litepod-256, "
            "or 2*v5e:16x16 for two slices",
        )
    count_of_slices = int(match["count"] or 1)
    if count_of_slices < 1:
        raise InputError(
            f"{text!r} has no slices", where="topology", do="give a number of slices of at least 1"
        )
    if count_of_slices > _MOST_SLICES:
        raise InputError(
            f"{count_of_slices} slices are more than a plan is made for",
            where="topology",
            do=f"Give at most {_MOST_SLICES}",
        )
    found = chip if match["chip"] is None and chip else _find_chip(match["chip"], text, chip)
    numbers = tuple(int(part) for part in match["size"].split("x"))
    if match["mark"] == "-":
        if len(numbers) != 1:
            raise _unknown_slice(text, found, prod(numbers), numbers)
        chips = _product_chips(numbers[0], found)
        fitting = [one for one in legal_slices(found) if one.chips == chips]
        if not fitting:
            cores = found.tensorcores_per_chip.value
            counted = found.product_counts.value == "tensorcores"
            raise _unknown_slice(text, found, numbers[0] // (cores if counted else 1), None)
        return Slice(found, fitting[0].shape, count_of_slices)
    if all(one.shape != numbers for one in legal_slices(found)):
        raise _unknown_slice(text, found, prod(numbers), numbers)
    return Slice(found, numbers, count_of_slices)
