"""Reads the text of a scheduled HLO module into plain data."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.cost_models.memory import dtype_bytes

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_TILE = re.compile(r"\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLED = re.compile(r"(?:calls|body|to_apply|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
_LIMIT = re.compile(r"constant\((\d+)\)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_FUSION_ALIASES = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_MODULE_ALIASES = re.compile(r"^HloModule .*?input_output_alias=\{(.*?\)) ?\}", re.MULTILINE)
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_MISSING_TYPES = ("token", "opaque")

_NO_ESTIMATE = 2**63 - 1
"""What the compiler writes for kernels that its cost model does not know."""

HBM = 0
"""Memory space of arrays whose layout names none."""


@dataclass(frozen=True)
class Array:
    """An array as it lies in memory.

    Attributes:
      shape: logical sizes.
      nbytes: with the padding of its tiles.
      space: memory space: 0 is HBM, 1 VMEM.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: float
    space: int

    @property
    def element_bytes(self) -> float:
        """Bytes of its elements, without padding."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Instruction:
    """One instruction; `arrays` are the leaves of its type in order."""

    name: str
    opcode: str
    arrays: tuple[Array, ...] = field(repr=False)
    operands: tuple[str, ...] = field(repr=False)
    text: str = field(repr=False)
    root: bool
    is_tuple: bool

    @property
    def op_name(self) -> str:
        """The name that JAX gave the operation it belongs to, or ""."""
        found = _OP_NAME.search(self.text)
        return found[1] if found else ""

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate of a kernel's cycles; None where it has none."""
        found = _CYCLES.search(self.text)
        cycles = int(found[1]) if found else _NO_ESTIMATE
        return cycles if cycles < _NO_ESTIMATE else None

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        names = _CALLED.findall(self.text)
        for branches in _BRANCHES.findall(self.text):
            names += re.findall(r"%?([\w.\-]+)", branches)
        return tuple(names)

    @property
    def aliases(self) -> tuple[tuple[int, int, int], ...]:
        """(result, operand, element of that operand) that a kernel is told to share."""
        found = _FUSION_ALIASES.search(self.text)
        return tuple(_aliases(found[1])) if found else ()

    def attribute(self, name: str) -> str | None:
        """The name of a computation that an attribute gives (body, calls...)."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return found[1] if found else None


@dataclass(frozen=True)
class HloModule:
    """A scheduled module: computations by name, each a list of instructions in order."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]] = field(repr=False)
    aliased_outputs: frozenset[int] = field(repr=False)
    frames: dict[int, str] = field(repr=False)

    def source(self, instruction: Instruction) -> str:
        """The "file:line" of the innermost frame of an instruction, or ""."""
        found = _FRAME.search(instruction.text)
        return self.frames.get(int(found[1]), "") if found else ""

    def trips(self, loop: Instruction) -> float:
        """Passes of a `while`; without a known count, the constant that its condition reads."""
        known = _TRIPS.search(loop.text)
        if known:
            return float(known[1])
        condition = self.computations.get(loop.attribute("condition") or "", ())
        limits = [
            int(limit[1])
            for line in condition
            if line.opcode == "constant" and line.arrays and not line.arrays[0].shape
            if (limit := _LIMIT.search(line.text))
        ]
        return float(max(limits, default=1))

    def run_counts(self) -> dict[str, float]:
        """How often each computation runs in one execution; branches count as always taken."""
        counts: dict[str, float] = defaultdict(float)
        pending = [(self.entry, 1.0)]
        while pending:
            name, times = pending.pop()
            counts[name] += times
            for instruction in self.computations.get(name, ()):
                loop = instruction.opcode == "while"
                for other in instruction.called:
                    body = loop and other == instruction.attribute("body")
                    pending.append((other, times * (self.trips(instruction) if body else 1.0)))
        return counts


def parse_hlo(text: str) -> HloModule:
    """Reads the text of a module (`Compiled.as_text()`)."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = "", "", list[Instruction]()
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name, lines = match["name"], []
            entry = name if match["entry"] else entry
        elif line.startswith("}"):
            computations[name] = tuple(lines)
        elif match := _INSTRUCTION.match(line):
            lines.append(_instruction(match, line))
    aliased = _MODULE_ALIASES.search(text)
    outputs = frozenset(out for out, _, _ in _aliases(aliased[1])) if aliased else frozenset()
    return HloModule(entry, computations, outputs, _frames(text))


def _aliases(text: str) -> Iterator[tuple[int, int, int]]:
    for out, operand, element in _ALIAS.findall(text):
        yield int(out or 0), int(operand), int(element or 0)


def _instruction(match: re.Match[str], line: str) -> Instruction:
    rest = _INDEX_COMMENT.sub("", line[match.end() :])
    end = _type_end(rest)
    type_text, after = rest[:end], rest[end:]
    opcode = _OPCODE.match(after)
    operands: tuple[str, ...] = ()
    if opcode:
        inside = after[opcode.end() : _closing(after, opcode.end() - 1)]
        operands = tuple(_OPERAND.findall(inside))
    return Instruction(
        name=match["name"],
        opcode=opcode[1] if opcode else "",
        arrays=tuple(map(_array, _ARRAY.finditer(type_text))),
        operands=operands,
        text=after,
        root=bool(match["root"]),
        is_tuple=type_text.startswith("("),
    )


def _type_end(text: str) -> int:
    """Where the type at the start of a text ends."""
    if text.startswith("("):
        return _closing(text, 0) + 1
    depth = 0
    for i, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == " " and not depth:
            return i
    return len(text)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if not depth:
                return i
    return len(text)


def _array(match: re.Match[str]) -> Array:
    dtype = match["dtype"]
    shape = tuple(int(n) for n in match["dims"].split(",") if n)
    layout = match["layout"] or ""
    space = _SPACE.search(layout)
    nbytes = 0.0
    if dtype not in _MISSING_TYPES:
        nbytes = _padded_elements(shape, layout) * dtype_bytes(dtype)
    return Array(dtype, shape, nbytes, int(space[1]) if space else HBM)


def _padded_elements(shape: tuple[int, ...], layout: str) -> int:
    order, _, rest = layout.partition(":")
    minor_to_major = [int(d) for d in order.split(",") if d]
    physical = [shape[d] for d in reversed(minor_to_major)] if minor_to_major else list(shape)
    tile_text = rest[1:].split("S(")[0] if rest.startswith("T") else ""
    tile = _TILE.match(tile_text)
    if tile:
        sizes = [1 if n == "*" else int(n) for n in tile[1].split(",")]
        while len(physical) < len(sizes):
            physical.insert(0, 1)
        for k in range(1, len(sizes) + 1):
            physical[-k] = -(-physical[-k] // sizes[-k]) * sizes[-k]
    return math.prod(physical)


def _frames(text: str) -> dict[int, str]:
    """Stack frame number -> "file:line", from the tables before the computations."""
    section = ""
    tables: dict[str, dict[int, str]] = defaultdict(dict)
    for line in text.splitlines():
        if line.startswith(("ENTRY", "%")):
            break
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section and (entry := re.match(r"(\d+) (.*)", line)):
            tables[section][int(entry[1])] = entry[2]
    found: dict[int, str] = {}
    for frame, told in tables["StackFrames"].items():
        place = re.search(r"file_location_id=(\d+)", told)
        location = tables["FileLocations"].get(int(place[1]), "") if place else ""
        file = re.search(r"file_name_id=(\d+)", location)
        number = re.search(r"\bline=(\d+)", location)
        if file and number:
            name = tables["FileNames"][int(file[1])].strip('"')
            found[frame] = f"{name}:{number[1]}"
    return found
