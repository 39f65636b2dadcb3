"""Step 6a: let Shardy partition an annotated module, and read what it decided.

After propagation and explicit reshards every operation has its real sharding, and every
communication is an operation of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.planner import mlir
from shardwright.planner.annotate import annotate
from shardwright.planner.collectives import (
    KINDS,
    DimAxes,
    Step,
    merge_reduce_and_slice,
    parse_sharding,
    read_step,
)
from shardwright.planner.constraints import ValueConstraint
from shardwright.planner.graph import OpGraph
from shardwright.planner.graph_reader import OP_ID, number_operations, operations
from shardwright.planner.mlir import ir
from shardwright.planner.narrowing import Narrowing
from shardwright.planner.nodes import BARRIER
from shardwright.planner.program import Program
from shardwright.planner.rules import write_own_rule

_SHARDING = "sdy.sharding"


@dataclass(frozen=True)
class Communication:
    """One collective of the partitioned program.

    Attributes:
      step: kind, axes and divisor.
      shape, dtype: the whole tensor, in the type in which it is communicated.
      before, after: its sharding around the collective.
      near: the operation (of the op graph) whose result is communicated, or that reads it.
      trips: runs in one execution of the program.
      loop: innermost loop, or -1.
      prefetchable: it depends on arguments and loop invariants alone.
      read_by: operations that read the result, through other collectives too. A loop reads its
        initial values; its last operation stands for what the body yields, -1 for main's results.
      from_value: the result is a change of this op-graph value's sharding, or -1.
      on_the_way: nothing but further collectives reads the result.
    """

    step: Step
    shape: tuple[int, ...]
    dtype: str
    before: DimAxes
    after: DimAxes
    near: int
    trips: float
    loop: int
    prefetchable: bool
    read_by: tuple[int, ...]
    from_value: int
    on_the_way: bool = False


@dataclass(frozen=True)
class Partitioned:
    """What Shardy made of a program.

    Attributes:
      operands: operation id -> the sharding of each operand as it computes.
      results: operation id -> the sharding of each result, before any reshard.
      values: op-graph value id -> its sharding.
      inputs, outputs: shardings of main's arguments and results.
      communications: every collective, in program order.
    """

    operands: dict[int, tuple[DimAxes, ...]] = field(repr=False)
    results: dict[int, tuple[DimAxes, ...]] = field(repr=False)
    values: dict[int, DimAxes] = field(repr=False)
    inputs: tuple[DimAxes, ...]
    outputs: tuple[DimAxes, ...]
    communications: tuple[Communication, ...]


def partition(
    program: Program,
    graph: OpGraph,
    mesh_shape: Mapping[str, int],
    constraints: Sequence[ValueConstraint] = (),
    in_shardings: Sequence[DimAxes | None] | None = None,
    out_shardings: Sequence[DimAxes | None] | None = None,
) -> Partitioned:
    """Runs Shardy on a program with these constraints, in process."""
    with program.module() as module:
        number_operations(module)
        annotate(module, mesh_shape, constraints, in_shardings, out_shardings)
        _write_own_rules(module, graph)
        mlir.run_passes(module, mlir.PROPAGATE)
        _write_own_rules(module, graph)  # propagation drops them
        mlir.run_passes(module, mlir.INSERT_RESHARDS, mlir.RESHARDS_TO_COLLECTIVES)
        _merge_equal(mlir.entry_block(mlir.main_function(module)))
        return _Reader(module, graph, mesh_shape).read()


def _merge_equal(block: Any) -> None:
    """Makes one of equal collectives on one value, as the compiler does.

    A tensor that several operations gather alike is gathered once. MLIR's `cse` leaves them.
    """
    first: dict[tuple[Any, str, str], Any] = {}
    for op in list(mlir.walk_block(block)):
        for region in op.regions:
            for inner in region.blocks:
                _merge_equal(inner)
        if op.name not in KINDS:
            continue
        key = (next(iter(op.operands)), op.name, str(op.attributes["out_sharding"]))
        result = next(iter(op.results))
        kept = first.setdefault(key, result)
        if kept != result:
            result.replace_all_uses_with(kept)
            op.erase()


def _write_own_rules(module: Any, graph: OpGraph) -> None:
    for op in operations(module):
        if OP_ID not in op.attributes or op.regions or op.name == BARRIER:
            continue
        known = graph.ops[ir.IntegerAttr(op.attributes[OP_ID]).value]
        if known.operands and known.results and not known.manual:
            write_own_rule(op, known.rule)


class _Reader:
    """Walks a partitioned module once."""

    def __init__(self, module: Any, graph: OpGraph, sizes: Mapping[str, int]) -> None:
        self._main = mlir.main_function(module)
        self._graph = graph
        self._sizes = sizes
        self._shardings: dict[Any, DimAxes] = {}
        self._origin: dict[Any, int] = {}
        self._prefetchable: dict[Any, bool] = {}
        self._merged: dict[Any, tuple[Step, DimAxes]] = {}
        self._operands: dict[int, tuple[DimAxes, ...]] = {}
        self._results: dict[int, tuple[DimAxes, ...]] = {}
        self._values: dict[int, DimAxes] = {}
        self._found: list[Communication] = []
        self._text: dict[Any, DimAxes] = {}
        self._last_id = 0
        self._narrowing = Narrowing(graph)

    def read(self) -> Partitioned:
        block = mlir.entry_block(self._main)
        inputs = self._function_shardings("arg_attrs", block.arguments)
        for number, (argument, sharding) in enumerate(zip(block.arguments, inputs, strict=True)):
            self._define(argument, sharding, self._graph.arguments[number], prefetchable=True)
        self._read_block(block, 1.0, -1)
        returned = mlir.last_operation(block)
        return Partitioned(
            operands=self._operands,
            results=self._results,
            values=self._values,
            inputs=tuple(inputs),
            outputs=tuple(self._function_shardings("res_attrs", returned.operands)),
            communications=tuple(self._found),
        )

    def _function_shardings(self, kind: str, values: Any) -> list[DimAxes]:
        given = self._main.attributes.get(kind, None)
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
            self._values.setdefault(origin, sharding)

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
        self._last_id = max(self._last_id, number)
        known = self._graph.ops[number]
        self._operands[number] = tuple(
            self._shardings.get(v, self._replicated(v)) for v in op.operands
        )
        shardings = self._result_shardings(op)
        self._results[number] = tuple(shardings)
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
        self._found.append(
            Communication(
                step=step,
                shape=tuple(type_.shape),
                dtype=dtype,
                before=before,
                after=after,
                near=near if near >= 0 else (readers[0] if readers else self._last_id),
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
            else:
                found.append(self._end_of(op.parent))
        return found

    def _end_of(self, holder: Any) -> int:
        """The operation at which what a block yields is read."""
        if OP_ID not in holder.attributes:
            return -1
        number = ir.IntegerAttr(holder.attributes[OP_ID]).value
        ends = [loop.last_op - 1 for loop in self._graph.loops if loop.first_op == number + 1]
        return ends[0] if ends else number
