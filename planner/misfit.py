"""What to say where no plan keeps within the memory."""

from __future__ import annotations

from shardwright.cost_models.memory import PeakMemory
from shardwright.errors import DoesNotFitError
from shardwright.hardware_profiles.chip import chip_names, load_chip
from shardwright.hardware_profiles.slices import Slice, legal_slices

_NAMED_BUFFERS = 3


def does_not_fit(
    program: str, on: Slice, limit: float, least: PeakMemory, *, proven: bool
) -> DoesNotFitError:
    """Says by how much a program misses, what fills the memory, and which slice has enough.

    Args:
      limit: bytes of a device that may be used.
      least: the memory of the plan that needs least.
      proven: every mesh was tried, and each has no sharding that fits.
    """
    largest = ", ".join(
        f"{buffer.name} {_amount(buffer.nbytes)}" for buffer in least.live[:_NAMED_BUFFERS]
    )
    share = limit / on.chip.device_hbm_bytes
    larger = smallest_slice(on, least.bytes * on.devices, share)
    verdict = "fits" if proven else "that fits was found in the time given"
    advice = "" if proven else "Give the search more time. "
    if larger is not None:
        advice += f"The smallest slice with as much memory in all is {larger.name}. "
    advice += "Or take a smaller batch, a shorter sequence or more rematerialisation"
    return DoesNotFitError(
        f"no sharding of {program} {verdict}: the least memory found is {_amount(least.bytes)} a "
        f"device, {_amount(least.bytes - limit)} more than the {_amount(limit)} that may be used; "
        f"most is taken by {largest}",
        where=on.name,
        do=advice,
        least_bytes=least.bytes,
        limit_bytes=limit,
    )


def smallest_slice(on: Slice, total_bytes: float, share: float) -> Slice | None:
    """The smallest slice whose devices together have `total_bytes` within their share of HBM.

    Of the same generation where it has one, otherwise of any.
    """
    others = [load_chip(name) for name in chip_names() if name != on.chip.name]
    for chips in ([on.chip], others):
        found = [
            s
            for chip in chips
            for s in legal_slices(chip)
            if s.devices * s.chip.device_hbm_bytes * share >= total_bytes
        ]
        if found:
            return min(found, key=lambda s: s.chips)
    return None


def _amount(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} bytes"
