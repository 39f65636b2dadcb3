"""Reads what Shardy's passes made of a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.planner import mlir
from shardwright.planner.collectives import (
    KINDS,
    DimAxes,
    Step,
    merge_reduce_and_slice,
    parse_sharding,
    read_step,
)
from shardwright.planner.graph import OpGraph
from shardwright.planner.graph_reader import OP_ID
from shardwright.planner.mlir import ir
from shardwright.planner.narrowing import Narrowing
from shardwright.planner.partitioned import Communication

_SHARDING = "sdy.sharding"


class FunctionReader:
    """Walks a function of a partitioned module once.

    Attributes:
      operands, results, values, communications: as of `Partitioned`.
      places: for each communication the operation after which it comes, -1 before the first.
    """

    def __init__(self, graph: OpGraph, narrowing: Narrowing, sizes: Mapping[str, int]) -> None:
        self._graph = graph
        self._narrowing = narrowing
        self._sizes = sizes
        self._shardings: dict[Any, DimAxes] = {}
        self._origin: dict[Any, int] = {}
        self._prefetchable: dict[Any, bool] = {}
        self._merged: dict[Any, tuple[Step, DimAxes]] = {}
        self._text: dict[Any, DimAxes] = {}
        self._last_id = -1
        self._returned: Sequence[int] = ()
        self.operands: dict[int, tuple[DimAxes, ...]] = {}
        self.results: dict[int, tuple[DimAxes, ...]] = {}
        self.values: dict[int, DimAxes] = {}
        self.communications: list[Communication] = []
        self.places: list[int] = []

    def read(
        self, function: Any, arguments: Sequence[tuple[int, bool]], returned: Sequence[int]
    ) -> None:
        """Reads a function.

        Args:
          arguments: for each the value that it is, and whether it depends on arguments of main
            and loop invariants alone.
          returned: for each result the operation that reads it, -1 for results of main.
        """
        self._returned = returned
        block = mlir.entry_block(function)
        inputs = self.shardings_of(function, "arg_attrs", block.arguments)
        given = zip(block.arguments, inputs, arguments, strict=True)
        for argument, sharding, (value, prefetchable) in given:
            self._define(argument, sharding, value, prefetchable)
        self._read_block(block, 1.0, -1)

    def shardings_of(self, function: Any, kind: str, values: Any) -> list[DimAxes]:
        """The shardings of a function's arguments ("arg_attrs") or results ("res_attrs")."""
        given = function.attributes.get(kind, None)
        found = []
        for i, value in enumerate(values):
            attributes = ir.DictAttr(given[i]) if given is not None else {}
            if _SHARDING in attributes:
                found.append(self._parse(attributes[_SHARDING]))
            else:
                found.append(self._replicated(value))
        return found

    def _parse(self, attribute: Any) -> DimAxes:
        if attribute not in self._text:
            self._text[attribute] = parse_sharding(str(attribute))
        return self._text[attribute]

    @staticmethod
    def _replicated(value: Any) -> DimAxes:
        rank = value.type.rank if isinstance(value.type, ir.RankedTensorType) else 0
        return ((),) * rank

    def _define(
        self, value: Any, sharding: DimAxes, origin: int, prefetchable: bool = False
    ) -> None:
        self._shardings[value] = sharding
        self._origin[value] = origin
        self._prefetchable[value] = prefetchable
        if origin >= 0:
            self.values.setdefault(origin, sharding)

    def _result_shardings(self, op: Any) -> list[DimAxes]:
        if _SHARDING not in op.attributes:
            return [self._replicated(r) for r in op.results]
        text = str(op.attributes[_SHARDING])
        key = op.attributes[_SHARDING]
        if len(op.results) == 1:
            return [self._parse(key)]
        pieces = text.split("@")[1:]
        return [parse_sharding("@" + piece) for piece in pieces]

    def _read_block(self, block: Any, trips: float, loop: int) -> None:
        for op in mlir.walk_block(block):
            if op.name in KINDS:
                self._read_collective(op, trips, loop)
            elif OP_ID in op.attributes:
                self._read_op(op, trips, loop)
            elif len(op.results):
                for result, sharding in zip(op.results, self._result_shardings(op), strict=True):
                    self._define(result, sharding, -1)

    def _read_op(self, op: Any, trips: float, loop: int) -> None:
        number = ir.IntegerAttr(op.attributes[OP_ID]).value
        self._last_id = number
        known = self._graph.ops[number]
        self.operands[number] = tuple(
            self._shardings.get(v, self._replicated(v)) for v in op.operands
        )
        shardings = self._result_shardings(op)
        self.results[number] = tuple(shardings)
        ahead = bool(op.operands) and self._prefetchable.get(next(iter(op.operands)), False)
        ahead = ahead and op.name in mlir.PREFETCHABLE
        for result, sharding, value in zip(op.results, shardings, known.results, strict=True):
            self._define(result, sharding, value, ahead)
        if op.name == "stablehlo.while":
            inner = next(x for x in self._graph.loops if x.first_op == number + 1)
            body = op.regions[1].blocks[0]
            for argument, sharding, carry, init in zip(
                body.arguments, shardings, inner.carries, op.operands, strict=True
            ):
                ahead = carry.invariant and self._prefetchable.get(init, False)
                self._define(argument, sharding, carry.argument, ahead)
            self._read_block(body, trips * inner.trips, inner.id)
        elif op.name in ("stablehlo.if", "stablehlo.case"):
            for region in op.regions:
                self._read_block(region.blocks[0], trips / len(op.regions), loop)

    def _read_collective(self, op: Any, trips: float, loop: int) -> None:
        operand = next(iter(op.operands))
        result = next(iter(op.results))
        before = self._shardings.get(operand, self._replicated(operand))
        step, after = read_step(op, before, self._sizes)
        origin = self._origin.get(operand, -1)
        prefetchable = self._prefetchable.get(operand, False)
        if operand in self._merged:
            reduce, unreduced = self._merged.pop(operand)
            step = Step("reduce_scatter", reduce.axes, reduce.divisor)
            before = unreduced
        elif step.kind == "all_reduce" and self._only_user_scatters(result, step, after):
            self._merged[result] = (step, before)
            self._define(result, after, -1)
            self._origin[result] = origin
            return
        self._define(result, after, -1, prefetchable)
        self._origin[result] = origin
        type_ = op.operands[0].type
        dtype = str(type_.element_type)
        readers = tuple(sorted(set(self._readers(result))))
        if step.kind == "all_gather" and origin >= 0:
            dtype = self._narrowing.dtype_for(origin, readers) or dtype
        near = self._graph.values[origin].producer if origin >= 0 else -1
        self.places.append(self._last_id)
        self.communications.append(
            Communication(
                step=step,
                shape=tuple(type_.shape),
                dtype=dtype,
                before=before,
                after=after,
                near=near if near >= 0 else (readers[0] if readers else max(self._last_id, 0)),
                trips=trips,
                loop=loop,
                prefetchable=prefetchable,
                read_by=readers,
                from_value=origin,
                on_the_way=all(use.owner.operation.name in KINDS for use in result.uses),
            )
        )

    def _only_user_scatters(self, value: Any, reduce: Step, sharding: DimAxes) -> bool:
        users = [use.owner.operation for use in value.uses]
        if len(users) != 1 or users[0].name != "sdy.all_slice":
            return False
        sliced, _ = read_step(users[0], sharding, self._sizes)
        return merge_reduce_and_slice(reduce.axes, sliced, self._sizes)

    def _readers(self, value: Any) -> list[int]:
        """Operations that read a value, looking through collectives."""
        found = []
        for use in value.uses:
            op = use.owner.operation
            if op.name in KINDS:
                found += self._readers(next(iter(op.results)))
            elif OP_ID in op.attributes:
                found.append(ir.IntegerAttr(op.attributes[OP_ID]).value)
            elif op.parent.name == "func.func":
                found.append(self._returned[use.operand_number])
            else:
                found.append(self._end_of(op.parent))
        return found

    def _end_of(self, holder: Any) -> int:
        """The operation at which what a block yields is read."""
        number = ir.IntegerAttr(holder.attributes[OP_ID]).value
        ends = [loop.last_op - 1 for loop in self._graph.loops if loop.first_op == number + 1]
        return ends[0] if ends else number
