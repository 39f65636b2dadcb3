"""Casts to narrower types that the compiler moves ahead: out of loops, and before all-gathers.

Where a loop's body only slices an invariant stack (the weights of scanned layers) and casts the
slice to a narrower type, the compiler casts the whole stack once before the loop, and the loop
carries the narrow one. Loops over the same stack share it. Where everything that reads a gathered
tensor casts it, or only looks rows up and casts those, the shards are cast and the narrow tensor is
gathered. Seen in scheduled programs of libtpu 0.0.42.1 for decoders, scanned, with f32 weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.cost_models.memory import dtype_bytes
from shardwright.planner.graph import OpGraph

_SLICE = "stablehlo.dynamic_slice"
_CONVERT = "stablehlo.convert"
_LOOKUP = "stablehlo.gather"
_BARRIER = "stablehlo.optimization_barrier"
_KEEP_ELEMENTS = (
    "stablehlo.reshape", "stablehlo.select", "stablehlo.slice", "stablehlo.transpose",
    "sdy.sharding_constraint",
)  # fmt: skip
"""A cast of what these make is the same as what they make of cast elements."""


class Narrowing:
    """Which readers of a value need it in a narrower type only.

    Attributes:
      stacks: stacks that loops carry (by the value of the body's argument) -> the type that they
        are cast to before the loop.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._readers = graph.uses()
        self._kept = set(graph.results)
        for loop in graph.loops:
            self._kept.update(v for carry in loop.carries for v in (carry.init, carry.yielded))
        self.stacks: dict[int, str] = {}
        self._inits: dict[tuple[int, int], str] = {}
        for loop in graph.loops:
            for carry in loop.carries:
                if not carry.invariant or self._readers.get(carry.result):
                    continue
                dtype = self._cast_of_slices(carry.argument)
                if dtype is not None:
                    self.stacks[carry.argument] = dtype
                    self._inits[loop.first_op - 1, carry.init] = dtype

    def dtype_for(self, value: int, readers: Sequence[int]) -> str | None:
        """The narrower type in which all these operations need a value, or None."""
        types = {self._needed_by(value, reader) for reader in readers}
        dtype = types.pop() if len(types) == 1 else None
        return dtype if dtype and self._narrower(dtype, value) else None

    def gathered_dtype(self, value: int) -> str | None:
        """The narrower type that some readers need, where no others would need it gathered.

        Elementwise readers (an optimizer) take the value as it is sharded.
        """
        types = {
            self._needed_by(value, reader)
            for reader in self._readers.get(value, ())
            if not self._elementwise(value, reader)
        }
        dtype = types.pop() if len(types) == 1 else None
        return dtype if dtype and self._narrower(dtype, value) else None

    def _elementwise(self, value: int, reader: int) -> bool:
        """Whether an operation other than a cast makes an element of each element of a value."""
        op = self._graph.ops[reader]
        if op.rule is None or not op.results or op.name in (_CONVERT, _BARRIER):
            return False
        return op.rule.operands[op.operands.index(value)] == op.rule.results[0]

    def _narrower(self, dtype: str, value: int) -> bool:
        return dtype_bytes(dtype) < dtype_bytes(self._graph.values[value].dtype)

    def _cast_of_slices(self, stack: int) -> str | None:
        """The narrower type that all that is sliced from a stack is cast to."""
        readers = self._readers.get(stack, ())
        ops = [self._graph.ops[reader] for reader in readers]
        if any(op.name != _SLICE for op in ops):
            return None
        types = {self._cast(op.results[0]) for op in ops}
        dtype = types.pop() if len(types) == 1 else None
        return dtype if dtype and self._narrower(dtype, stack) else None

    def _needed_by(self, value: int, reader: int) -> str | None:
        if reader < 0:
            return None
        op = self._graph.ops[reader]
        if op.name == _CONVERT:
            return self._graph.values[op.results[0]].dtype
        if op.name == _LOOKUP and op.operands[0] == value:
            return self._cast(op.results[0])
        return self._inits.get((reader, value))

    def _cast(self, value: int) -> str | None:
        """The type that everything which reads a value casts it to, or None."""
        found: set[str | None] = set()
        for reader in self._readers.get(value, ()):
            op = self._graph.ops[reader]
            if op.name == _CONVERT:
                found.add(self._graph.values[op.results[0]].dtype)
            elif op.name in _KEEP_ELEMENTS and op.results[0] not in self._kept:
                found.add(self._cast(op.results[0]))
            else:
                return None
        return found.pop() if len(found) == 1 and value not in self._kept else None
