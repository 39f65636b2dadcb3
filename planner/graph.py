"""The op graph of a program.

Operations in program order with their sharding rules; loops with their trip counts and carried
values; which values cost nothing to make in any sharding (constants, iotas, what is computed
from them alone).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwright.cost_models.memory import dtype_bytes
from shardwright.planner.rules import Rule

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Value:
    """One tensor of the program.

    Attributes:
      producer: the operation that makes it, or -1 for an argument of main or of a loop body.
      free: it can be made in any sharding at no cost.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    producer: int
    free: bool

    @property
    def nbytes(self) -> float:
        """Bytes of the whole tensor, without padding."""
        return float(math.prod(self.shape)) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class OpKey:
    """Names an operation so that it is found again in a new lowering of the same program.

    Attributes:
      location: the name that JAX gave it.
      op: its MLIR name.
      ordinal: which of the operations with that location and name, in program order.
    """

    location: str
    op: str
    ordinal: int


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
      rule: what it can shard; None where nothing is known, so that it runs replicated.
      trips: how many times it runs in one execution of the program.
      loop: the innermost loop that holds it, or -1.
      source: "file:line" of the user's code, where known.
      detail: what the costs need beyond shapes (reach of a window, replica groups, a kernel's
        own cost), and what the program gives (the axes of a sharding constraint).
      manual: it is inside a `shard_map` region and works on local arrays already.
      form: equal for operations that have name, rule, detail and types in common.
    """

    id: int
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None = field(repr=False)
    trips: float
    loop: int
    key: OpKey
    source: str
    detail: dict[str, Any] = field(repr=False)
    manual: bool
    form: int = field(repr=False)


@dataclass(frozen=True)
class Carry:
    """One value that a loop carries: all four have one sharding and share one buffer."""

    init: int
    argument: int
    yielded: int
    result: int

    @property
    def invariant(self) -> bool:
        """The body hands it on unchanged."""
        return self.argument == self.yielded


@dataclass(frozen=True)
class Loop:
    """A `while`, with its operations as the half-open range [first_op, last_op)."""

    id: int
    parent: int
    trips: int
    known_trips: bool
    carries: tuple[Carry, ...]
    first_op: int
    last_op: int
    key: OpKey


@dataclass(frozen=True)
class Join:
    """A result of `if` or `case`: whichever branch runs yields it."""

    result: int
    yields: tuple[int, ...]
    op: int


@dataclass(frozen=True)
class OpGraph:
    """The program as the planner sees it.

    Attributes:
      arguments: value ids of main's arguments in order.
      argument_names: their paths in the pytree.
      results: value ids of main's results in order.
      argument_inner_dims, result_inner_dims: how many of their last dimensions cannot be sharded.
      aliases: result position -> argument position.
    """

    values: tuple[Value, ...] = field(repr=False)
    ops: tuple[Op, ...] = field(repr=False)
    loops: tuple[Loop, ...] = field(repr=False)
    joins: tuple[Join, ...] = field(repr=False)
    arguments: tuple[int, ...] = field(repr=False)
    argument_names: tuple[str, ...] = field(repr=False)
    results: tuple[int, ...] = field(repr=False)
    argument_inner_dims: tuple[int, ...] = field(repr=False)
    result_inner_dims: tuple[int, ...] = field(repr=False)
    aliases: dict[int, int] = field(repr=False)

    def uses(self) -> dict[int, list[int]]:
        """Value id -> the operations that read it, in program order; not to be changed."""
        return self._uses

    @cached_property
    def _uses(self) -> dict[int, list[int]]:
        uses: dict[int, list[int]] = {}
        for op in self.ops:
            for operand in dict.fromkeys(op.operands):
                uses.setdefault(operand, []).append(op.id)
        return uses

    def value_trips(self, value: int) -> float:
        """How many times a value is made in one execution of the program."""
        producer = self.values[value].producer
        if producer >= 0:
            return self.ops[producer].trips
        for loop in self.loops:
            if any(carry.argument == value for carry in loop.carries):
                return self.ops[loop.first_op - 1].trips * loop.trips
        return 1.0

    def to_networkx(self) -> nx.DiGraph:
        """Operations as nodes, an edge for each value from its producer to each reader."""
        import networkx as nx  # which planning does without

        graph = nx.DiGraph()
        for op in self.ops:
            graph.add_node(op.id, name=op.name, source=op.source, trips=op.trips)
        for op in self.ops:
            for operand in op.operands:
                value = self.values[operand]
                if value.producer >= 0:
                    graph.add_edge(value.producer, op.id, value=operand, shape=value.shape)
        return graph
