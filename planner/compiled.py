"""The collectives of a program that the TPU compiler has scheduled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.hardware_profiles.logical_mesh import (
    DCN_DIMENSION,
    LogicalMesh,
    device_coordinates,
    physical_dimensions,
)
from shardwright.planner.hlo import Array, HloModule, Instruction, parse_hlo

_KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
_CHANNEL = re.compile(r"channel_id=(\d+)")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\((?P<order>.*?)\))? \{(?P<over>[^}]*)\}"
)
_IOTA_GROUPS = re.compile(r"replica_groups=(?P<order>\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_IOTA = re.compile(
    r"\[(?P<shape>[\d,]+)\](?:<=\[(?P<from>[\d,]+)\])?(?:T\((?P<transposed>[\d,]+)\))?"
)
_LISTED_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_ACROSS_SLICES = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')
"""How libtpu marks what is sent to other slices: a send and a receive of each device's part."""
_SCATTERS = "all-reduce-scatter"
"""The compiler's name for a fused all-reduce that keeps one shard: a reduce-scatter."""
_WINDOWED = "windowed_dot_general"
"""The compiler's name for products whose operand goes round in collective-permutes."""

Groups = NDArray[np.int64]


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program.

    Attributes:
      nbytes: bytes on one device of the larger of input and output.
      group: devices that take part together; 2 for a permute.
      count: runs in one execution of the program.
      op_name: the name that JAX gave the operation it belongs to.
      source: "file:line" of that operation, where known.
      groups: the devices of each group; for a permute, each sender and its receiver.
      arrays: tensors that it communicates together.
      asynchronous: other work runs between its start and its end.
      windowed: it is a step of a matrix product that goes round in permutes.
    """

    kind: str
    nbytes: float
    group: int
    count: float
    op_name: str
    source: str
    groups: Groups
    arrays: int
    asynchronous: bool
    windowed: bool

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes that it runs over; part of an axis as "name:part"."""
        return group_axes(self.groups, mesh)


def slice_positions(mesh: LogicalMesh) -> Groups | None:
    """Where in a mesh the devices of each slice lie, (slices, devices); None of one slice.

    libtpu compiles one program for every slice, in which devices have their numbers in a slice.
    """
    dimensions = [dimension.name for dimension in physical_dimensions(mesh.slice)]
    if DCN_DIMENSION not in dimensions:
        return None
    numbers = device_coordinates(mesh)[..., dimensions.index(DCN_DIMENSION)].reshape(-1)
    return np.stack([np.flatnonzero(numbers == k) for k in range(mesh.slice.count)])


def read_collectives(hlo: str) -> tuple[CompiledCollective, ...]:
    """The collectives of the text of a scheduled program, each asynchronous one once."""
    return module_collectives(parse_hlo(hlo))


def module_collectives(
    module: HloModule, slices: Groups | None = None
) -> tuple[CompiledCollective, ...]:
    """The collectives of a scheduled program, each asynchronous one once.

    An asynchronous collective shows as a start, several pieces inside fusions and a done, which
    share a channel; one between slices as a send and a receive, of which the send is counted.

    Args:
      slices: `slice_positions` of the mesh that the program was compiled for.
    """
    counts = module.run_counts()
    by_channel: dict[tuple[str, str], CompiledCollective] = {}
    starts = _async_computations(module)
    for name, lines in module.computations.items():
        for line in lines:
            if not is_collective(line) or not counts.get(name):
                continue
            kind = line.opcode.removesuffix("-start")
            channel = _CHANNEL.search(line.text)
            key = (kind, channel[1] if channel else f"{name}:{line.name}")
            found = read_collective(module, name, line, counts[name], slices)
            if name in starts:
                found = replace(found, asynchronous=True)
            known = by_channel.get(key, found)
            # Pieces of one that runs beside a loop are inside it; it runs as often as it starts.
            by_channel[key] = replace(
                found,
                nbytes=max(found.nbytes, known.nbytes),
                count=min(found.count, known.count),
                op_name=found.op_name or known.op_name,
                source=found.source or known.source,
                asynchronous=found.asynchronous or known.asynchronous,
            )
    return tuple(by_channel.values())


def is_collective(line: Instruction) -> bool:
    """Whether an instruction is a collective, or the start of one."""
    if line.opcode == "send":
        return _ACROSS_SLICES.search(line.text) is not None
    return line.opcode.removesuffix("-start") in _KINDS


def _async_computations(module: HloModule) -> set[str]:
    """Computations of the fusions that start asynchronous collectives."""
    return {
        called
        for lines in module.computations.values()
        for line in lines
        if line.opcode == "fusion" and line.name.startswith("async-collective")
        for called in line.called
    }


def read_collective(
    module: HloModule,
    computation: str,
    line: Instruction,
    count: float,
    slices: Groups | None = None,
) -> CompiledCollective:
    """A collective of a computation that runs `count` times in one execution.

    Args:
      slices: as for `module_collectives`.
    """
    if line.opcode == "send":
        return _read_send(module, line, count, slices)
    started = line.opcode.endswith("-start")
    kind = _KINDS[line.opcode.removesuffix("-start")]
    sizes = [_array_bytes(array) for array in line.arrays]
    # A start's type lists its operands, then its results; the collective is told by the larger.
    nbytes = max(sizes, default=0.0) if started and line.is_tuple else sum(sizes)
    groups = read_groups(line.text)
    if slices is not None:
        groups = slices[0][groups]
    group = groups.shape[1]
    if kind == "all_reduce" and computation.startswith(_SCATTERS):
        kind = "reduce_scatter"
    elif kind == "reduce_scatter":
        nbytes *= group
    return CompiledCollective(
        kind=kind,
        nbytes=nbytes,
        group=group,
        count=count,
        op_name=line.op_name,
        source=module.source(line),
        groups=groups,
        arrays=1 if started else sum(size > 0 for size in sizes),
        asynchronous=started,
        windowed=_WINDOWED in line.text or _WINDOWED in computation,
    )


def _read_send(
    module: HloModule, line: Instruction, count: float, slices: Groups | None
) -> CompiledCollective:
    """What the devices of a slice send to their peers in the others, while other work runs."""
    told = _ACROSS_SLICES.search(line.text)
    kind = told[1].lower() if told else ""
    groups = np.zeros((1, 2), dtype=np.int64) if slices is None else slices.T
    nbytes = _array_bytes(line.arrays[0])
    return CompiledCollective(
        kind=kind if kind in _KINDS.values() else "collective_permute",
        nbytes=nbytes * groups.shape[1] if kind == "all_gather" else nbytes,
        group=groups.shape[1],
        count=count,
        op_name=line.op_name,
        source=module.source(line),
        groups=groups,
        arrays=1,
        asynchronous=True,
        windowed=False,
    )


def _array_bytes(array: Array) -> float:
    """Bytes without tile padding, as collectives are told in."""
    if array.dtype in ("u32", "s32") and not array.shape:
        return 0.0  # semaphores of asynchronous collectives
    return array.element_bytes


def read_groups(text: str) -> Groups:
    """Devices of each group of a collective, shape (groups, devices).

    Permutes give pairs, (pairs, 2). Groups of one device where the text names none.
    """
    if match := _MESH_GROUPS.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["axes"])}
        devices = _devices(match["order"], math.prod(sizes.values()))
        return _over_axes(devices, sizes, match["over"])
    if match := _IOTA_GROUPS.search(text):
        return _devices(match["order"], 0)
    for pattern in (_LISTED_GROUPS, _PAIRS):
        if match := pattern.search(text):
            listed = re.findall(r"\{([\d,]*)\}", match[1])
            return np.array([[int(n) for n in one.split(",")] for one in listed])
    return np.zeros((1, 1), dtype=np.int64)


def _devices(order: str | None, count: int) -> Groups:
    """Device numbers in an order such as "[2,8]<=[8,2]T(1,0)" or "[4,4]T(1,0)", as it shapes them.

    Without one, 0 to count - 1.
    """
    match = _IOTA.search(order) if order else None
    if match is None:
        return np.arange(count)
    shape = [int(n) for n in match["shape"].split(",")]
    source = [int(n) for n in match["from"].split(",")] if match["from"] else shape
    devices = np.arange(math.prod(source)).reshape(source)
    if match["transposed"]:
        devices = devices.transpose([int(n) for n in match["transposed"].split(",")])
    return devices.reshape(shape)


def _over_axes(devices: Groups, sizes: Mapping[str, int], over: str) -> Groups:
    """Groups along some axes of a mesh of devices; parts of axes as 'name':(before)size."""
    shape: list[int] = []
    gathered: list[int] = []
    parts = {name: (int(pre), int(size)) for name, pre, size in _AXIS.findall(over) if size}
    named = {name for name, _, _ in _AXIS.findall(over)}
    for name, size in sizes.items():
        if name in parts:
            before, part = parts[name]
            gathered.append(len(shape) + 1)
            shape += [before, part, size // (before * part)]
        else:
            if name in named:
                gathered.append(len(shape))
            shape.append(size)
    grid = devices.reshape(shape)
    rest = [d for d in range(len(shape)) if d not in gathered]
    group = math.prod(shape[d] for d in gathered)
    return grid.transpose([*rest, *gathered]).reshape(-1, group)


def group_axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh along which the devices of a group differ.

    Devices are numbered as they lie in the mesh, major to minor. An axis of which a group has only
    a part is told as "name:part", such as "x:2" for two of its places.
    """
    if groups.size == 0 or groups.max() >= math.prod(mesh.values()):
        return ()
    places = np.stack(np.unravel_index(groups, tuple(mesh.values())))
    return tuple(_axis_texts(places, mesh))


def _axis_texts(places: NDArray[np.int64], mesh: Mapping[str, int]) -> Iterator[str]:
    for axis, (name, size) in enumerate(mesh.items()):
        different = max(len(np.unique(group)) for group in places[axis])
        if different == size and size > 1:
            yield name
        elif different > 1:
            yield f"{name}:{different}"
