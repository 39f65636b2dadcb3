"""What nodes hold in memory, and for how long, as far as no mesh changes it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from shardwright.planner.graph import OpGraph
from shardwright.planner.liveness import Lifetime
from shardwright.planner.mlir import PREFETCHABLE
from shardwright.planner.nodes import GROUP, OPERATION, NodeGraph, Port, Use, is_trivial
from shardwright.planner.rules import DimFactors

_K = TypeVar("_K", bound=Hashable)


class Numbers(dict[_K, int]):
    """Numbers different things in the order in which they come."""

    def __call__(self, key: _K) -> int:
        """The number of a thing."""
        return self.setdefault(key, len(self))


@dataclass(frozen=True)
class Copy:
    """A value resharded once for several readers; its node comes after the program's nodes."""

    node: int
    value: int
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Held:
    """The local bytes of a tensor, as far as no mesh changes them.

    Attributes:
      above_least: count only what is above the least that any strategy holds.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: DimFactors
    above_least: bool


@dataclass(frozen=True)
class Hold:
    """Memory of a node in the program points [start, end); `what` numbers the skeleton's `held`."""

    node: int
    start: int
    end: int
    what: int


def find_holds(
    nodes: NodeGraph, copies: Sequence[Copy], buffers: Sequence[Lifetime], prefetch: frozenset[int]
) -> tuple[tuple[Held, ...], tuple[Hold, ...]]:
    """The different buffers, and what holds them when.

    Args:
      prefetch: values that can be gathered long before they are needed.
    """
    finder = _Finder(nodes, copies, prefetch)
    holds = tuple(finder.find(buffers))
    return tuple(finder.held), holds


def prefetchable_values(graph: OpGraph) -> frozenset[int]:
    """Values that depend on arguments and loop invariants alone through views and casts.

    Gathering them can start long before they are needed.
    """
    found = set(graph.arguments)
    for loop in graph.loops:
        # Loops come in program order, so an outer loop's values are known before an inner one's.
        found.update(c.argument for c in loop.carries if c.invariant)
    for op in graph.ops:
        if op.name in PREFETCHABLE and op.operands and op.operands[0] in found:
            found.update(op.results)
    return frozenset(found)


def distinct_uses(nodes: NodeGraph, value: int) -> list[Use]:
    """The first of those uses of a value that read it alike."""
    found: dict[tuple[int, DimFactors], Use] = {}
    for use in nodes.uses.get(value, ()):
        found.setdefault((use.port.node, use.port.dims), use)
    return list(found.values())


def copy_port(graph: OpGraph, node: int, value: int) -> Port:
    """How the node of a copy reads and makes its value: a factor for each dimension."""
    return Port(node, value, tuple((d,) for d in range(len(graph.values[value].shape))))


class _Finder:
    def __init__(self, nodes: NodeGraph, copies: Sequence[Copy], prefetch: frozenset[int]) -> None:
        self._nodes = nodes
        self._graph = nodes.graph
        self._copies = copies
        self._prefetch = prefetch
        self._arguments = frozenset(nodes.graph.arguments)
        self.held: Numbers[Held] = Numbers()

    def find(self, buffers: Sequence[Lifetime]) -> list[Hold]:
        """What buffers and copies hold."""
        holds = []
        reduced = self._reduced_to()
        for buffer in buffers:
            port = self._nodes.producers.get(buffer.value)
            if port is None:
                continue
            what = self._hold(buffer.value, port.dims, above_least=False, dtype=buffer.dtype)
            target = reduced.get(buffer.value)
            if target is None:
                holds.append(Hold(port.node, buffer.start, buffer.end, what))
                continue
            # Partial sums are added up where they are made; what is held is what becomes of them.
            holds.append(Hold(port.node, buffer.start, buffer.start + 1, what))
            what = self._hold(buffer.value, target.dims, above_least=False, dtype=buffer.dtype)
            holds.append(Hold(target.node, buffer.start + 1, buffer.end, what))
        # Stacks that are cast before the loop are counted as what they are cast to.
        cast = {buffer.value for buffer in buffers if buffer.dtype is not None}
        carries = [carry for loop in self._graph.loops for carry in loop.carries]
        cast_inits = {carry.init for carry in carries if carry.argument in cast}
        shared = set()
        for copy in self._copies:
            shared.add(copy.value)
            if copy.value in cast_inits or copy.value in reduced:
                continue
            holds += self._copy_holds(copy)
        for loop in self._graph.loops:
            for carry in loop.carries:
                port = self._nodes.producers.get(carry.argument)
                if carry.invariant and port is not None and carry.init not in cast_inits:
                    # It shares the buffer of its initial value unless it is gathered before.
                    what = self._hold(carry.argument, port.dims, above_least=True)
                    holds.append(Hold(port.node, loop.first_op - 1, loop.last_op, what))
        for value, uses in self._nodes.uses.items():
            if value in shared or value in reduced:
                continue
            for use in uses:
                if self._nodes.nodes[use.port.node].kind == OPERATION:
                    what = self._hold(value, use.port.dims, above_least=True)
                    holds.append(Hold(use.port.node, use.time, use.time + 1, what))
        return holds

    def _reduced_to(self) -> dict[int, Port]:
        """Who reads the sums of values that are left as partial sums: a copy or the only reader."""
        copies = {copy.value: copy.node for copy in self._copies}
        found = {}
        for value, producer in self._nodes.producers.items():
            if not producer.partial or is_trivial(self._graph.values[value]):
                continue
            if value in copies:
                found[value] = copy_port(self._graph, copies[value], value)
            elif uses := distinct_uses(self._nodes, value):
                (found[value],) = (use.port for use in uses)
        return found

    def _copy_holds(self, copy: Copy) -> list[Hold]:
        """Bytes beyond what the value takes anyway: only a gathered copy has its own buffer.

        What runs ahead and costs no time to gather may be gathered again by an operation that reads
        the copy: there it is held as the operation reads it, and as the copy in between.
        """
        dims = tuple((d,) for d in range(len(self._graph.values[copy.value].shape)))
        what = self._hold(copy.value, dims, above_least=True)
        uses = [u for u in copy.uses if not self._as_given(copy.value, u)] or list(copy.uses)
        first, last = min(u.time for u in uses), max(u.time for u in uses)
        if copy.value not in self._prefetch:
            return [Hold(copy.node, first, last + 1, what)]
        reads = [u for u in uses if self._nodes.nodes[u.port.node].kind == OPERATION]
        edges = sorted({first, last + 1, *(t for u in reads for t in (u.time, u.time + 1))})
        read_at = {u.time for u in reads}
        return [
            *(
                Hold(copy.node, start, end, what)
                for start, end in pairwise(edges)
                if start not in read_at
            ),
            *(
                Hold(
                    u.port.node,
                    u.time,
                    u.time + 1,
                    self._hold(copy.value, u.port.dims, above_least=True),
                )
                for u in reads
            ),
        ]

    def _as_given(self, value: int, use: Use) -> bool:
        """Whether elementwise work reads an argument: as it is sharded, not gathered."""
        elementwise = self._nodes.nodes[use.port.node].kind == GROUP
        return elementwise and value in self._arguments

    def _hold(
        self, value: int, dims: DimFactors, *, above_least: bool, dtype: str | None = None
    ) -> int:
        tensor = self._graph.values[value]
        return self.held(Held(tensor.shape, dtype or tensor.dtype, dims, above_least))
