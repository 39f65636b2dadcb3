"""Reads the collectives of a program that the TPU compiler has scheduled (HLO text)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.cost_models.memory import dtype_bytes

_KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<kind>" + "|".join(_KINDS) + r")(?P<phase>-start|-done)?\("
)
_CALLED = re.compile(r"(?:calls|body|to_apply|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_WHILE = re.compile(r"\bwhile\(.*body=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_LIMIT = re.compile(r"[su]32\[\]\S* constant\((\d+)\)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*\))? \{([^}]*)\}")
_SCATTERS = "all-reduce-scatter"
"""The compiler's name for a fused all-reduce that keeps one shard: a reduce-scatter."""


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program.

    Attributes:
      nbytes: bytes on one device of the larger of input and output.
      group: devices that take part together.
      count: runs in one execution of the program.
      op_name: the name that JAX gave the operation it belongs to.
    """

    kind: str
    nbytes: float
    group: int
    count: float
    op_name: str


def read_collectives(hlo: str) -> tuple[CompiledCollective, ...]:
    """The collectives of a scheduled program, each asynchronous one once.

    An asynchronous collective shows as a start, several pieces inside fusions and a done, which
    share a channel.
    """
    computations = dict(_computations(hlo))
    counts = _run_counts(hlo, computations)
    by_channel: dict[tuple[str, str], CompiledCollective] = {}
    for name, lines in computations.items():
        for number, line in enumerate(lines):
            match = _COLLECTIVE.search(line)
            if match is None or match["phase"] == "-done" or not counts[name]:
                continue
            channel = _CHANNEL.search(line)
            key = (match["kind"], channel[1] if channel else f"{name}:{number}")
            found = _collective(match, line, name, counts[name])
            known = by_channel.get(key, found)
            # Pieces of one that runs beside a loop are inside it; it runs as often as it starts.
            by_channel[key] = CompiledCollective(
                found.kind,
                max(found.nbytes, known.nbytes),
                found.group,
                min(found.count, known.count),
                found.op_name or known.op_name,
            )
    return tuple(by_channel.values())


def _collective(
    match: re.Match[str], line: str, computation: str, count: float
) -> CompiledCollective:
    kind = _KINDS[match["kind"]]
    arrays = [_array_bytes(a) for a in _ARRAY.finditer(match["type"])]
    # A start's type lists its operands, then its results; the collective is told by the larger.
    nbytes = sum(arrays)
    if match["phase"] == "-start" and match["type"].startswith("("):
        nbytes = max(arrays)
    if kind == "all_reduce" and computation.startswith(_SCATTERS):
        kind = "reduce_scatter"
    elif kind == "reduce_scatter":
        nbytes *= group_size(line)
    name = _OP_NAME.search(line)
    return CompiledCollective(kind, nbytes, group_size(line), count, name[1] if name else "")


def group_size(line: str) -> int:
    """Devices in one group of a collective; 2 for a permute, which names pairs."""
    if mesh := _MESH_GROUPS.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']+)'", mesh[2]))
    if tiles := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(tiles[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return listed[1].count(",") + 1
    return 2


def _array_bytes(match: re.Match[str]) -> float:
    if match[1] in ("u32", "s32") and not match[2]:
        return 0.0  # semaphores of asynchronous collectives
    return math.prod(int(n) for n in match[2].split(",") if n) * dtype_bytes(match[1])


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            name, lines = match[1], []
        elif line.startswith("}"):
            yield name, lines
        else:
            lines.append(line)


def _run_counts(hlo: str, computations: dict[str, list[str]]) -> dict[str, float]:
    """How often each computation runs in one execution."""
    calls: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for name, lines in computations.items():
        for line in lines:
            loop = _WHILE.search(line)
            trips = _TRIPS.search(line)
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += re.findall(r"%?([\w.\-]+)", branches)
            for other in called:
                times = 1.0
                if loop is not None and other == loop[1]:
                    times = float(trips[1]) if trips else _condition_limit(line, computations)
                calls[name].append((other, times))
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, flags=re.MULTILINE)
    counts: dict[str, float] = defaultdict(float)
    pending = [(entry[1] if entry else "", 1.0)]
    while pending:
        name, times = pending.pop()
        counts[name] += times
        pending += [(other, times * more) for other, more in calls[name]]
    return counts


def _condition_limit(line: str, computations: dict[str, list[str]]) -> float:
    """Trips of a loop without a known count: the constant that its condition compares with."""
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = computations.get(condition[1], []) if condition else []
    limits = [int(n) for text in lines for n in _LIMIT.findall(text)]
    return float(max(limits, default=1))
