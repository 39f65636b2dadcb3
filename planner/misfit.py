"""What to say where no plan keeps within the memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.cost_models.memory import Buffer, PeakMemory, dtype_bytes, peak_memory
from shardwright.errors import DoesNotFitError
from shardwright.hardware_profiles.chip import chip_names, load_chip
from shardwright.hardware_profiles.slices import Slice, legal_slices
from shardwright.planner.graph import OpGraph
from shardwright.planner.liveness import Lifetime
from shardwright.planner.step_buffers import buffer_kinds

_NAMED_BUFFERS = 3
_NEAR = 1.25
"""A least memory that is not proven may be bettered by so much where the search goes on."""
_GROWING = ("loop", "temporary")
"""Kinds of buffers that grow with the batch."""


def even_share(graph: OpGraph, buffers: Sequence[Lifetime], devices: int) -> PeakMemory:
    """The memory of a device were every tensor sharded over all devices: no sharding needs less.

    Args:
      buffers: of the program, whole.
    """
    kinds = buffer_kinds(graph)

    def share(life: Lifetime) -> Buffer:
        tensor = graph.values[life.value]
        nbytes = math.prod(tensor.shape) * dtype_bytes(life.dtype or tensor.dtype) / devices
        kind = kinds.get(life.value, "temporary")
        return Buffer(kind, life.start, max(life.end, life.start + 1), nbytes, kind)

    return peak_memory([share(life) for life in buffers])


def does_not_fit(
    program: str,
    on: Slice,
    limit: float,
    least: PeakMemory,
    share: PeakMemory,
    *,
    proven: bool,
    untried: int,
) -> DoesNotFitError:
    """Says by how much a program misses, what fills the memory, and what would help.

    Args:
      limit: bytes of a device that may be used.
      least: the memory of the plan that needs least.
      share: what no sharding undercuts, see `even_share`.
      proven: every mesh was tried, and each has no sharding that fits.
      untried: meshes that were not tried for want of time.
    """
    largest = ", ".join(
        f"{buffer.name} {_amount(buffer.nbytes)}" for buffer in least.live[:_NAMED_BUFFERS]
    )
    proven = proven or share.bytes > limit
    verdict = "fits" if proven else "that fits was found in the time given"
    return DoesNotFitError(
        f"no sharding of {program} {verdict}: the least memory found is {_amount(least.bytes)} a "
        f"device, {_amount(least.bytes - limit)} more than the {_amount(limit)} that may be used; "
        f"most is taken by {largest}",
        where=on.name,
        do=_advice(on, limit, least, share, proven, untried),
        least_bytes=least.bytes,
        limit_bytes=limit,
    )


def _advice(
    on: Slice, limit: float, least: PeakMemory, share: PeakMemory, proven: bool, untried: int
) -> str:
    """What would help; more time only where it could."""
    told = []
    if not proven and untried:
        meshes = "mesh was" if untried == 1 else "meshes were"
        told.append(f"Give the search more time, as {untried} {meshes} not tried")
    elif not proven and least.bytes <= _NEAR * limit:
        told.append("Give the search more time")
    larger = smallest_slice(on, least.bytes * on.devices, limit / on.chip.device_hbm_bytes)
    if larger is not None:
        told.append(f"The smallest slice with as much memory in all is {larger.name}")
    held: dict[str, float] = {}
    for buffer in share.live:
        held[buffer.kind] = held.get(buffer.kind, 0.0) + buffer.nbytes
    fixed = share.bytes - sum(held.get(kind, 0.0) for kind in _GROWING)
    if fixed > limit:
        told.append(
            f"A smaller batch does not help: parameters, optimizer state and other arguments take "
            f"{_amount(fixed)} a device even where every one is sharded over all of them; keep "
            "fewer bytes a parameter, such as moments in bf16"
        )
    else:
        loops, temporary = (held.get(kind, 0.0) for kind in _GROWING)
        parts = math.ceil((least.bytes - fixed) / max(limit - fixed, 1.0))
        first, second = "rematerialise more", "split the batch into microbatches"
        if loops < temporary:
            first, second = second, first
        told.append(
            f"Or {first}, or {second}: of what grows with the batch, {_amount(loops)} a device is "
            f"kept by loops for the backward pass and {_amount(temporary)} is temporary, were all "
            f"of it sharded over all devices. A batch {parts} times smaller would fit if all "
            "of it shrinks alike"
        )
    return ". ".join(told)


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
