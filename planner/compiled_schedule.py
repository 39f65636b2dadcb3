"""The step time of a scheduled program: what the compiler made, priced by one measure.

The compiler's own order of operations is followed on one device. A kernel takes its estimated
cycles; a collective takes what the cost models say of its bytes and of the devices of its groups.
One that runs beside other work, from its start to its done, holds up only what waits for it, and
collectives that share links wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost_models.collectives import Collective, collective_model
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.compiled import (
    CompiledCollective,
    Groups,
    is_collective,
    read_collective,
    slice_positions,
)
from shardwright.planner.hlo import HloModule, Instruction

_ASYNC_START = "async-collective-start"
_ASYNC_DONE = "async-collective-done"
_ASYNC_PIECE = "async_collective_fusion"
"""The compiler's names of kernels that start, end, or run beside an asynchronous collective."""
_CARRYING = ("get-tuple-element", "tuple", "while")
"""Operations that hand on what an asynchronous collective is known by."""


@dataclass(frozen=True)
class CompiledTime:
    """Seconds of one step of a compiled program, by its schedule.

    Attributes:
      compute_s: of all kernels, by the compiler's estimate of cycles at the chip's clock.
      collective_s: of all collectives, whether or not something hides them.
      exposed_s: in which no kernel runs.
      unknown: kernels whose cycles the compiler does not estimate.
    """

    compute_s: float
    collective_s: float
    exposed_s: float
    unknown: int

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.exposed_s


def compiled_time(module: HloModule, mesh: LogicalMesh) -> CompiledTime:
    """The time of one step of a scheduled program.

    Args:
      module: as libtpu compiled it for devices in the order of the mesh.
      mesh: that the program was compiled for.
    """
    found = _Pass()
    walk = _Walk(module, mesh)
    end = walk.run(module.entry, found)
    return CompiledTime(
        compute_s=found.compute_s,
        collective_s=found.collective_s,
        exposed_s=end - found.compute_s,
        unknown=found.unknown,
    )


@dataclass
class _Pass:
    """Sums over one pass of a computation."""

    compute_s: float = 0.0
    collective_s: float = 0.0
    unknown: int = 0


class _Walk:
    """Follows the schedule of a module."""

    def __init__(self, module: HloModule, mesh: LogicalMesh) -> None:
        self._module = module
        self._mesh = mesh
        self._clock = mesh.slice.chip.clock_hz.value
        self._slices = slice_positions(mesh)

    def run(self, computation: str, found: _Pass) -> float:
        """Seconds from the start of a computation to its end, with nothing under way before."""
        now = 0.0
        free: dict[str, float] = {}
        ends: dict[str, float] = {}
        """Instruction -> when the asynchronous collectives end that it carries."""
        for line in self._module.computations.get(computation, ()):
            carried = max((ends[name] for name in line.operands if name in ends), default=0.0)
            collectives = () if _is_piece(line) else tuple(self._collectives(computation, line))
            if _starts(line):
                begin = now
                for one in collectives:
                    seconds, links = self._price(one)
                    begin = max(begin, *(free.get(link, 0.0) for link in links), 0.0)
                    begin += seconds
                    found.collective_s += seconds
                    free |= dict.fromkeys(links, begin)
                ends[line.name] = begin
                continue
            if _ends(line):
                now = max(now, carried)
                continue
            if carried and (line.opcode in _CARRYING or _is_piece(line)):
                ends[line.name] = carried
            if line.opcode in ("while", "conditional", "call"):
                now += self._called(line, found)
                continue
            for one in collectives:
                seconds, links = self._price(one)
                now = max(now, *(free.get(link, 0.0) for link in links), 0.0) + seconds
                found.collective_s += seconds
                free |= dict.fromkeys(links, now)
            cycles = line.estimated_cycles
            if cycles is not None:
                found.compute_s += cycles / self._clock
                now += cycles / self._clock
            elif '"estimated_cycles"' in line.text:
                found.unknown += 1
        return max([now, *free.values()])

    def _called(self, line: Instruction, found: _Pass) -> float:
        """Seconds of a loop, a call, or of the longest branch."""
        body = line.attribute("body") if line.opcode == "while" else None
        trips = self._module.trips(line) if body else 1.0
        names = [body] if body else list(line.called)
        passes = []
        for name in names:
            inner = _Pass()
            passes.append((self.run(name, inner), inner))
        seconds, longest = max(passes, key=lambda one: one[0], default=(0.0, _Pass()))
        found.compute_s += trips * longest.compute_s
        found.collective_s += trips * longest.collective_s
        found.unknown += longest.unknown
        return trips * seconds

    def _collectives(self, computation: str, line: Instruction) -> Iterator[CompiledCollective]:
        """The collectives that an instruction is, or that its kernel holds."""
        if is_collective(line):
            yield read_collective(self._module, computation, line, 1.0, self._slices)
        elif line.opcode == "fusion":
            for name in line.called:
                for inner in self._module.computations.get(name, ()):
                    yield from self._collectives(name, inner)

    def _price(self, one: CompiledCollective) -> tuple[float, tuple[str, ...]]:
        """Seconds of a collective, and the physical dimensions whose links it takes."""
        if one.group < 2:
            return 0.0, ()
        kind, axes = one.kind, group_refs(one.groups, self._mesh)
        if kind == "collective_permute" and _neighbours(one.groups, self._mesh):
            kind = "halo_exchange"
        model = collective_model(_KINDS[kind], axes, self._mesh)
        return model.seconds(one.nbytes), model.dimensions


_KINDS: dict[str, Collective] = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "collective_permute": "collective_permute",
    "halo_exchange": "halo_exchange",
}


def _starts(line: Instruction) -> bool:
    return line.name.startswith(_ASYNC_START) or (
        (line.opcode.endswith("-start") or line.opcode == "send") and is_collective(line)
    )


def _ends(line: Instruction) -> bool:
    return line.name.startswith(_ASYNC_DONE) or line.opcode.endswith("-done")


def _is_piece(line: Instruction) -> bool:
    return line.opcode == "fusion" and any(name.startswith(_ASYNC_PIECE) for name in line.called)


def group_refs(groups: Groups, mesh: LogicalMesh) -> tuple[AxisRef, ...]:
    """The axes and sub-axes of a mesh that groups of devices span.

    Args:
      groups: device numbers in the order of the mesh, (groups, devices); of a permute, pairs.

    A group that has no regular part of an axis counts as having all of it.
    """
    sizes = tuple(mesh.shape.values())
    places = np.stack(np.unravel_index(groups, sizes))
    found = []
    for place, (name, size) in zip(places, mesh.shape.items(), strict=True):
        part = _part(place, size)
        if part is not None:
            found.append(AxisRef(name, *part) if part != (1, size) else AxisRef(name))
    return tuple(found)


def _part(place: Groups, size: int) -> tuple[int, int] | None:
    """(pre_size, size) of the part of an axis that groups have; None where they have one place."""
    taken = [np.unique(group) for group in place]
    count = max(map(len, taken))
    if count == 1:
        return None
    strides = {int(step) for group in taken for step in np.diff(group)}
    if len(strides) == 1:
        (stride,) = strides
        if size % (stride * count) == 0 and all(len(group) == count for group in taken):
            return size // (stride * count), count
    return 1, size


def _neighbours(pairs: Sequence[Sequence[int]] | Groups, mesh: LogicalMesh) -> bool:
    """Whether a permute sends along one axis alone, to the next place on it."""
    sizes = tuple(mesh.shape.values())
    places = np.stack(np.unravel_index(np.asarray(pairs), sizes))
    moved = [axis for axis in range(len(sizes)) if (places[axis, :, 0] != places[axis, :, 1]).any()]
    if len(moved) != 1:
        return False
    size = sizes[moved[0]]
    distance = (places[moved[0], :, 1] - places[moved[0], :, 0]) % size
    return bool((np.minimum(distance, size - distance) == 1).all())
