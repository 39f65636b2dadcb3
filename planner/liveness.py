"""When each buffer of a program is alive.

Time is counted in operations of the op graph, loop bodies inlined once: what a loop carries
lives as long as the whole loop, what its body makes only within one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.planner.fusion import IN_PLACE, Fusion, FusionPlan, Read, buffers_read
from shardwright.planner.given import CONSTRAINT
from shardwright.planner.graph import OpGraph
from shardwright.planner.narrowing import Narrowing
from shardwright.planner.nodes import GROUP, NodeGraph
from shardwright.planner.offload import host_values

_REORDERS = ("stablehlo.reduce", "stablehlo.transpose")
"""Members of elementwise groups that read elements elsewhere than they write."""
_ADD = "stablehlo.add"


@dataclass(frozen=True)
class Lifetime:
    """A buffer of one value, alive in the half-open interval of program points [start, end).

    Attributes:
      dtype: the type in which it is kept where that is not the value's own.
    """

    value: int
    start: int
    end: int
    dtype: str | None = None


def lifetimes(nodes: NodeGraph, fusions: FusionPlan) -> tuple[Lifetime, ...]:
    """The buffers of a program, one for each value that has memory of its own.

    Arguments live throughout, donated or not: a donated one is taken over by the result that
    aliases it, so that result needs none of its own. A loop-carried value has one buffer for its
    initial value, every pass and the result, and a second one where a pass cannot write the next
    value over the one that it reads. A stack of weights that is cast before the loops which read
    it has one buffer, of the narrow type, until the last of them ends.
    """
    return _Lifetimes(nodes, fusions).find()


class _Lifetimes:
    def __init__(self, nodes: NodeGraph, fusions: FusionPlan) -> None:
        self._nodes = nodes
        self._graph: OpGraph = nodes.graph
        self._fusions = fusions
        self._end_of_program = len(self._graph.ops)
        self._last: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._owner: dict[int, int] = {}
        self._hoisted = Narrowing(self._graph).stacks

    def find(self) -> tuple[Lifetime, ...]:
        graph = self._graph
        for fusion in self._fusions.fusions:
            for read in fusion.reads:
                value = graph.ops[read.op].operands[read.operand]
                for buffer in buffers_read(self._fusions.made_of, value):
                    over = self._writes_over(read, fusion) and self._fits(buffer, fusion)
                    self._extend(buffer, fusion.time + (0 if over else 1))
            self._written.update(dict.fromkeys(fusion.writes, fusion.time))
        for position, value in enumerate(graph.results):
            if position not in graph.aliases:
                self._extend(value, self._end_of_program)
        self._alias_loops()
        found = [Lifetime(value, 0, self._end_of_program + 1) for value in graph.arguments]
        aliased = {v for k, v in enumerate(graph.results) if k in graph.aliases}
        starts = self._starts()
        ends: dict[int, int] = {}
        for value, last in self._last.items():
            owner = self._find_owner(value)
            ends[owner] = max(ends.get(owner, 0), last)
        taken = set(graph.arguments) | {self._find_owner(v) for v in aliased}
        taken.update(self._hoisted)
        taken.update(self._find_owner(v) for v in host_values(graph))
        for owner, start in starts.items():
            if owner not in taken and not graph.values[owner].free:
                end = ends.get(owner, start + 1)
                found.append(Lifetime(owner, start, max(end, start + 1)))
        return (*found, *self._cast_stacks())

    def _cast_stacks(self) -> Iterator[Lifetime]:
        """The narrow stacks that loops read instead of the wide ones."""
        spans: dict[tuple[int, str], tuple[int, int, int]] = {}
        for loop in self._graph.loops:
            for carry in loop.carries:
                dtype = self._hoisted.get(carry.argument)
                if dtype is not None:
                    new = (carry.argument, loop.first_op - 1, loop.last_op)
                    value, start, _ = spans.get((carry.init, dtype), new)
                    spans[carry.init, dtype] = (value, start, loop.last_op)
        for (_, dtype), (value, start, end) in spans.items():
            yield Lifetime(value, start, end, dtype)

    def _writes_over(self, read: Read, fusion: Fusion) -> bool:
        """Whether a kernel may write its result over a tensor that it reads here and that dies.

        A product does so for what is added to it alone: XLA shares no other operand of it.
        """
        op = self._graph.ops[read.op]
        if op.name in IN_PLACE:
            return read.operand == 0
        if fusion.beside >= 0 and op.name != _ADD:
            return False
        elementwise = self._nodes.nodes[self._nodes.node_of_op[op.id]].kind == GROUP
        return elementwise and op.name not in _REORDERS

    def _fits(self, buffer: int, fusion: Fusion) -> bool:
        """Whether a kernel writes a value of the size of a buffer."""
        values = self._graph.values
        return any(values[w].nbytes == values[buffer].nbytes for w in fusion.writes)

    def _overwrites(self, new: int, old: int) -> bool:
        """Whether a value is written when another has been read for the last time."""
        return self._last.get(old, 0) <= self._written.get(new, self._end_of_program)

    def _extend(self, value: int, time: int) -> None:
        self._last[value] = max(self._last.get(value, 0), time)

    def _find_owner(self, value: int) -> int:
        while value in self._owner:
            value = self._owner[value]
        return value

    def _join(self, value: int, owner: int) -> None:
        value, owner = self._find_owner(value), self._find_owner(owner)
        if value != owner:
            self._owner[value] = owner

    def _alias_loops(self) -> None:
        """Values that share one buffer: loop carries, and results written in place."""
        graph = self._graph
        donated = self._donated()
        not_donated = set(graph.arguments) - donated
        for loop in graph.loops:
            start = loop.first_op - 1
            for carry in loop.carries:
                if graph.values[carry.argument].free:
                    continue
                if carry.argument in self._hoisted:
                    self._extend(carry.init, start)
                    continue
                one_buffer = self._overwrites(carry.yielded, carry.argument)
                self._extend(carry.argument, loop.last_op)
                self._join(carry.result, carry.argument)
                if carry.invariant or carry.init in donated:
                    if not graph.values[carry.init].free:
                        self._join(carry.argument, carry.init)
                else:
                    self._extend(carry.init, start)
                if carry.invariant:
                    continue
                if one_buffer:
                    self._join(carry.yielded, carry.argument)
                else:
                    self._extend(carry.yielded, loop.last_op)
        for op in graph.ops:
            if op.name == CONSTRAINT:
                self._join(op.results[0], op.operands[0])
        for op in graph.ops:
            if op.name not in IN_PLACE:
                continue
            over, made = op.operands[0], op.results[0]
            if self._overwrites(made, over) and self._find_owner(over) not in not_donated:
                self._join(made, over)

    def _donated(self) -> set[int]:
        return {self._graph.arguments[i] for i in self._graph.aliases.values()}

    def _starts(self) -> dict[int, int]:
        starts: dict[int, int] = {}
        for fusion in self._fusions.fusions:
            for value in fusion.writes:
                owner = self._find_owner(value)
                starts[owner] = min(starts.get(owner, fusion.time), fusion.time)
        for loop in self._graph.loops:
            for carry in loop.carries:
                owner = self._find_owner(carry.argument)
                time = loop.first_op - 1
                starts[owner] = min(starts.get(owner, time), time)
        return starts
