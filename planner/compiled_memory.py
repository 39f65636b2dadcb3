"""What fills HBM in a scheduled HLO module: live ranges of its buffers, and their peak.

The text does not say which buffers share memory, so that is found as the compiler finds it: views
and loops work in place, as do updates of a slice and kernels that are told to, and every other
result has a buffer from where it is made to where it is read last. A module's own
`memory_analysis()` gives the total with the gaps between buffers; this tells what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.planner.hlo import HBM, HloModule, Instruction

_Place = tuple[str, int]
"""An instruction and which of the arrays of its type."""


@dataclass(frozen=True)
class CompiledBuffer:
    """A buffer in HBM when memory is fullest.

    Attributes:
      name: the instruction that makes it; "argument" for all arguments together.
      op_name, source: the operation it belongs to, as JAX named it and where it is written.
      array: type and shape, as "bf16[8,128]".
    """

    name: str
    nbytes: float
    op_name: str = ""
    source: str = ""
    array: str = ""


@dataclass(frozen=True)
class CompiledPeak:
    """The buffers that are alive when memory is fullest, the largest first."""

    nbytes: float
    buffers: tuple[CompiledBuffer, ...]


def compiled_peak(module: HloModule) -> CompiledPeak:
    """The peak of a module, arguments included."""
    arguments = sum(
        array.nbytes
        for line in module.computations[module.entry]
        if line.opcode == "parameter"
        for array in line.arrays
        if array.space == HBM
    )
    nbytes, buffers = _Computation(module, module.entry, entry=True).peak()
    found = [CompiledBuffer("arguments", arguments), *buffers]
    found.sort(key=lambda buffer: -buffer.nbytes)
    return CompiledPeak(arguments + nbytes, tuple(found))


class _Computation:
    """Live ranges of one computation, those of loops and branches inside it nested."""

    def __init__(self, module: HloModule, name: str, *, entry: bool = False) -> None:
        self._module = module
        self._lines = module.computations[name]
        self._entry = entry
        self._by_name = {line.name: line for line in self._lines}
        self._time = {line.name: t for t, line in enumerate(self._lines)}
        self._same: dict[_Place, _Place] = {}
        self._last: dict[_Place, int] = {}

    def peak(self) -> tuple[float, list[CompiledBuffer]]:
        """Bytes beyond the parameters at the fullest moment, and what they are."""
        for line in self._lines:
            self._alias(line)
        root = next((line for line in self._lines if line.root), None)
        outside: set[_Place] = set()
        for line in self._lines:
            for operand in line.operands:
                if operand not in self._by_name:
                    continue
                for place in self._places(line, operand):
                    owner = self._owner(place)
                    self._last[owner] = max(self._last.get(owner, 0), self._time[line.name])
            if line.opcode == "parameter":
                outside.update(self._owner((line.name, k)) for k in range(len(line.arrays)))
        if root is not None:
            for k in range(len(root.arrays)):
                owner = self._owner((root.name, k))
                if self._entry and k not in self._module.aliased_outputs:
                    self._last[owner] = len(self._lines)
                else:
                    outside.add(owner)  # the caller's buffer
        return self._fullest(outside)

    def _fullest(self, outside: set[_Place]) -> tuple[float, list[CompiledBuffer]]:
        live: dict[_Place, float] = {}
        ends: dict[int, list[_Place]] = {}
        best: tuple[float, list[_Place], list[CompiledBuffer]] = (0.0, [], [])
        total = 0.0
        for time, line in enumerate(self._lines):
            for k, array in enumerate(line.arrays):
                place = (line.name, k)
                if self._owner(place) != place or place in outside or array.space != HBM:
                    continue
                if line.opcode in ("constant", "parameter") or not array.nbytes:
                    continue
                live[place] = array.nbytes
                total += array.nbytes
                ends.setdefault(self._last.get(place, time), []).append(place)
            inner, inside = self._inner(line)
            if total + inner > best[0]:
                best = (total + inner, list(live), inside)
            for place in ends.pop(time, ()):
                total -= live.pop(place)
        nbytes, places, inside = best
        return nbytes, [self._told(place) for place in places] + inside

    def _told(self, place: _Place) -> CompiledBuffer:
        line = self._by_name[place[0]]
        array = line.arrays[place[1]]
        shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        source = self._module.source(line)
        return CompiledBuffer(line.name, array.nbytes, line.op_name, source, shape)

    def _inner(self, line: Instruction) -> tuple[float, list[CompiledBuffer]]:
        if line.opcode not in ("while", "conditional", "call", "async-start"):
            return 0.0, []
        found = [_Computation(self._module, name).peak() for name in line.called]
        return max(found, key=lambda f: f[0], default=(0.0, []))

    def _owner(self, place: _Place) -> _Place:
        while place in self._same:
            place = self._same[place]
        return place

    def _places(self, line: Instruction, operand: str) -> list[_Place]:
        """The arrays of an operand that a line reads."""
        count = len(self._by_name[operand].arrays)
        if line.opcode == "get-tuple-element":
            return [(operand, self._element(line, operand))]
        return [(operand, k) for k in range(count)]

    def _element(self, line: Instruction, operand: str) -> int:
        """Which leaf of a flat tuple is taken."""
        return int(line.text.split("index=")[1].split(",")[0].split(" ")[0])

    def _join(self, place: _Place, of: _Place) -> None:
        if self._owner(place) != self._owner(of):
            self._same[self._owner(place)] = self._owner(of)

    def _alias(self, line: Instruction) -> None:
        """Says which results of a line lie where its operands do."""
        operands = [o for o in line.operands if o in self._by_name]
        if line.opcode == "get-tuple-element":
            self._join((line.name, 0), (operands[0], self._element(line, operands[0])))
        elif line.opcode == "tuple":
            k = 0
            for operand in operands:
                for j in range(len(self._by_name[operand].arrays)):
                    self._join((line.name, k), (operand, j))
                    k += 1
        elif line.opcode in ("bitcast", "opt-barrier", "while", "domain"):
            for k in range(min(len(line.arrays), len(self._by_name[operands[0]].arrays))):
                self._join((line.name, k), (operands[0], k))
        elif line.opcode == "copy-done":
            self._join((line.name, 0), (operands[0], 0))
        elif line.opcode == "copy-start":
            self._join((line.name, 1), (operands[0], 0))
        elif line.opcode.endswith("-start") and len(line.arrays) > 1:
            for k, array in enumerate(self._by_name[operands[0]].arrays):
                if line.arrays[k].shape == array.shape:
                    self._join((line.name, k), (operands[0], k))
        elif line.opcode.endswith("-done"):
            start = self._by_name[operands[0]]
            results = len(line.arrays)
            begin = min(len(self._by_name[start.operands[0]].arrays), len(start.arrays) - results)
            for k in range(results):
                self._join((line.name, k), (start.name, begin + k))
        elif line.opcode == "dynamic-update-slice":
            self._join((line.name, 0), (operands[0], 0))
        elif line.opcode == "fusion":
            self._alias_fusion(line, operands)

    def _alias_fusion(self, line: Instruction, operands: list[str]) -> None:
        for result, operand, element in line.aliases:
            if line.operands[operand] in self._by_name:
                self._join((line.name, result), (line.operands[operand], element))
        inside = self._module.computations.get(line.attribute("calls") or "", ())
        by_name = {inner.name: inner for inner in inside}
        root = next((inner for inner in inside if inner.root), None)
        if root is None:
            return
        results = root.operands if root.opcode == "tuple" else (root.name,)
        for k, name in enumerate(results):
            written = _updated(by_name, name)
            if written is not None and written < len(line.operands):
                source = line.operands[written]
                if source in self._by_name:
                    self._join((line.name, k), (source, 0))


def _updated(by_name: dict[str, Instruction], name: str) -> int | None:
    """The parameter of a fusion that one of its results updates in place."""
    line = by_name.get(name)
    found = False
    while line is not None and line.opcode != "parameter":
        if line.opcode in ("dynamic-update-slice", "scatter"):
            found = True
        elif line.opcode not in ("bitcast", "convert", "copy"):
            return None
        line = by_name.get(line.operands[0]) if line.operands else None
    if line is None or not found:
        return None
    return int(line.text.split("parameter(")[1].split(")")[0])
