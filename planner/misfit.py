"""What to say where no plan keeps within the memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
_WORTH_DONATING = 0.01
"""Part of the memory that donating must save to be advised."""
_MOMENTS = re.compile(r"(?<![a-z])(mu|nu|exp_avg(_sq)?|momentum|moments?)(?![a-z])")
"""What optax, PyTorch and most training code call moments."""
_GROWING = ("loop", "temporary")
"""Kinds of buffers that grow with the batch."""


@dataclass(frozen=True)
class ArgumentFacts:
    """What advice needs to know of a program's arguments.

    Attributes:
      undonated: paths of arguments that are not donated and could be: a result that takes over no
        buffer has their shape and type.
      undonated_bytes: of a device, were each sharded over all.
      moments: some of the state is called as an optimizer's moments are.
    """

    undonated: tuple[str, ...] = ()
    undonated_bytes: float = 0.0
    moments: bool = False


def argument_facts(graph: OpGraph, devices: int) -> ArgumentFacts:
    """The facts of a program, on so many devices."""
    state = set(graph.aliases.values())
    free = Counter(
        (graph.values[value].shape, graph.values[value].dtype)
        for position, value in enumerate(graph.results)
        if position not in graph.aliases
    )
    undonated, nbytes = [], 0.0
    for number, value in enumerate(graph.arguments):
        kind = (graph.values[value].shape, graph.values[value].dtype)
        if number not in state and free[kind] > 0:
            free[kind] -= 1
            undonated.append(graph.argument_names[number])
            nbytes += math.prod(kind[0]) * dtype_bytes(kind[1]) / devices
    moments = any(_MOMENTS.search(graph.argument_names[number]) for number in state)
    return ArgumentFacts(tuple(undonated), nbytes, moments)


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
    arguments: ArgumentFacts,
    proven: bool,
    untried: int,
) -> DoesNotFitError:
    """Says by how much a program misses, what fills the memory, and what would help.

    Args:
      limit: bytes of a device that may be used.
      least: the memory of the plan that needs least.
      share: what no sharding undercuts, see `even_share`.
      arguments: see `argument_facts`.
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
        do=_advice(on, limit, least, share, arguments, proven, untried),
        least_bytes=least.bytes,
        limit_bytes=limit,
    )


def _advice(
    on: Slice,
    limit: float,
    least: PeakMemory,
    share: PeakMemory,
    arguments: ArgumentFacts,
    proven: bool,
    untried: int,
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
    if arguments.undonated_bytes > _WORTH_DONATING * limit:
        some = ", ".join(arguments.undonated[:_NAMED_BUFFERS])
        others = len(arguments.undonated) - _NAMED_BUFFERS
        more = f" and {others} more" if others > 0 else ""
        told.append(
            f"Donate {some}{more} (donate_argnums, --donate): results of the same shape would take "
            f"over the memory, {_amount(arguments.undonated_bytes)} a device or more"
        )
    fixed = share.bytes - sum(held.get(kind, 0.0) for kind in _GROWING)
    fixed = max(fixed - arguments.undonated_bytes, 0.0)
    state = held.get("state", 0.0)
    if state > limit:
        moments = ", such as moments in bf16" if arguments.moments else ""
        told.append(
            f"A smaller batch does not help: parameters and what else is donated take "
            f"{_amount(state)} a device even where every one is sharded over all of them; keep "
            f"fewer bytes a parameter{moments}"
        )
    elif fixed > limit:
        told.append(
            f"Arguments and results take {_amount(fixed)} a device even where every one is sharded "
            "over all of them; a smaller batch helps only as far as they shrink with it"
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
