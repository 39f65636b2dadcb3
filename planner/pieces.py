"""Pieces of a constrained program that the partitioner treats alike, found by their structure.

A constraint fixes the sharding of a value, so that nothing propagates across it: what a program
does between constraints is partitioned by itself. Equal pieces with equal shardings at their ends
come out equal, and a program of many equal layers has few that differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from shardwright.planner.collectives import DimAxes
from shardwright.planner.constraints import Demand, ValueConstraint
from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.holds import prefetchable_values

Reading = tuple[int, int]
"""An operation and which of its operands; (-1, k) is the k-th result of main."""


@dataclass(frozen=True)
class Given:
    """A value that a piece reads and does not make, in the sharding in which it reads it."""

    value: int
    sharding: DimAxes
    prefetchable: bool


@dataclass(frozen=True)
class Piece:
    """What is partitioned by itself: connected operations, or an argument of main.

    Attributes:
      ops: the operations, in program order; none for an argument.
      argument: the argument, or -1.
      given: what it reads of others, in the order in which it first reads them.
      alike: equal for pieces that are partitioned alike, place by place.
    """

    ops: tuple[int, ...] = field(repr=False)
    argument: int
    given: tuple[Given, ...] = field(repr=False)
    alike: int


class Pieces:
    """The pieces of a program without loops, branches and `shard_map` regions.

    Attributes:
      inputs: argument -> its sharding.
      constraints: value id -> its constraint.
      readings: value id -> where it is read, in program order.
      pieces: in the order of their first operations, arguments first.
    """

    def __init__(
        self, graph: OpGraph, constraints: Sequence[ValueConstraint], inputs: Sequence[DimAxes]
    ) -> None:
        self._graph = graph
        self.inputs = dict(zip(graph.arguments, inputs, strict=True))
        self._sites = {op.key: op.id for op in graph.ops}
        self.constraints: dict[int, ValueConstraint] = {}
        self._demands: dict[Reading, Demand] = {}
        self._demanded: dict[int, list[Reading]] = {}
        for constraint in constraints:
            self._remember(constraint)
        self.readings: dict[int, list[Reading]] = {}
        for op in graph.ops:
            for position, operand in enumerate(op.operands):
                self.readings.setdefault(operand, []).append((op.id, position))
        for position, result in enumerate(graph.results):
            self.readings.setdefault(result, []).append((-1, position))
        self._ahead = prefetchable_values(graph)
        self._free = [
            bool(op.results) and all(graph.values[r].free for r in op.results) for op in graph.ops
        ]
        self._numbers: dict[Hashable, int] = {}
        self._sharding_numbers: dict[int, int] = {}
        self._free_classes: dict[int, int] = {}
        for op in graph.ops:
            if self._free[op.id]:
                self._note_free(op)
        self.pieces = tuple(self._find())

    def demands(self, value: int) -> list[tuple[Reading, Demand]]:
        """What the constraint of a value says of places where it is read, in its order."""
        return [(reading, self._demands[reading]) for reading in self._demanded[value]]

    def sharding_at(self, value: int, reading: Reading) -> DimAxes | None:
        """The sharding in which a value is read somewhere; None where nothing constrains it."""
        constraint = self.constraints.get(value)
        if constraint is None:
            return self.inputs.get(value)
        demand = self._demands.get(reading)
        if demand is None:
            return constraint.made
        if demand.sharding is not None:
            return demand.sharding
        return constraint.made if constraint.copy is None else constraint.copy

    def _remember(self, constraint: ValueConstraint) -> None:
        site = constraint.site
        if site.kind == "argument":
            value = self._graph.arguments[site.index]
        else:
            assert site.key is not None
            value = self._graph.ops[self._sites[site.key]].results[site.index]
        self.constraints[value] = constraint
        self._demanded[value] = readings = []
        for demand in constraint.demands:
            key = demand.site.key
            readings.append((-1 if key is None else self._sites[key], demand.site.index))
            self._demands[readings[-1]] = demand

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _sharding(self, sharding: DimAxes | None) -> int:
        """A number for a sharding; most are the same objects, which are known by identity."""
        number = self._sharding_numbers.get(id(sharding))
        if number is None:
            number = self._sharding_numbers[id(sharding)] = self._number(("sharding", sharding))
        return number

    def _find(self) -> list[Piece]:
        found = []
        for argument, sharding in self.inputs.items():
            key = (
                self._graph.values[argument].shape,
                self._graph.values[argument].dtype,
                self._sharding(sharding),
                self._end(argument, {}),
            )
            found.append(Piece((), argument, (), self._number(key)))
        for ops in self._connected():
            found.append(self._piece(ops))
        return found

    def _connected(self) -> list[list[int]]:
        """Operations that are connected by values which nothing constrains."""
        graph = self._graph
        leader = list(range(len(graph.ops)))

        def find(op: int) -> int:
            while leader[op] != op:
                leader[op] = leader[leader[op]]
                op = leader[op]
            return op

        for op in graph.ops:
            if self._free[op.id]:
                continue
            for operand in op.operands:
                value = graph.values[operand]
                # There is nothing to shard in a scalar, so that nothing propagates through it.
                if value.producer < 0 or value.free or not value.shape:
                    continue
                if operand not in self.constraints:
                    leader[find(op.id)] = find(value.producer)
        members: dict[int, list[int]] = {}
        for op in graph.ops:
            if not self._free[op.id]:
                members.setdefault(find(op.id), []).append(op.id)
        return list(members.values())

    def _piece(self, ops: list[int]) -> Piece:
        graph = self._graph
        place = {op: number for number, op in enumerate(ops)}
        given: dict[tuple[int, int], Given] = {}
        order: dict[tuple[int, int], int] = {}
        told: list[Hashable] = []
        for op_id in ops:
            op = graph.ops[op_id]
            told.append(op.form)
            for position, operand in enumerate(op.operands):
                value = graph.values[operand]
                if value.free:
                    told.append(("free", self._free_classes[operand]))
                    continue
                sharding = self.sharding_at(operand, (op_id, position))
                number = self._sharding(sharding)
                if value.producer in place:
                    made = graph.ops[value.producer].results.index(operand)
                    told.append((place[value.producer], made, number))
                    continue
                key = (operand, number)
                if key not in order:
                    order[key] = len(order)
                    whole = ((),) * len(value.shape) if sharding is None else sharding
                    given[key] = Given(operand, whole, operand in self._ahead)
                told.append(("given", order[key], number, given[key].prefetchable))
            for result in op.results:
                told.append(self._end(result, place))
        return Piece(tuple(ops), -1, tuple(given.values()), self._number(tuple(told)))

    def _end(self, value: int, place: dict[int, int]) -> Hashable:
        """What becomes of a value that a piece makes, or that it is."""
        constraint = self.constraints.get(value)
        readings = self.readings.get(value, ())
        outside = tuple(
            (op < 0, self._sharding(self.sharding_at(value, (op, position))))
            if op not in place
            else (place[op], position)
            for op, position in readings
        )
        if constraint is None:
            return outside
        order = tuple(map(readings.index, self._demanded[value]))
        return self._sharding(constraint.made), self._sharding(constraint.copy), outside, order

    def _note_free(self, op: Op) -> None:
        """Numbers free values, so that those which are computed alike have equal numbers."""
        inputs = tuple([self._free_classes[v] for v in op.operands])
        for position, result in enumerate(op.results):
            self._free_classes[result] = self._number(("free", op.form, position, inputs))
