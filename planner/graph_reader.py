"""Step 2: from a program to its op graph, asking Shardy for every operation's rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwright.planner import mlir
from shardwright.planner.given import MANUAL
from shardwright.planner.graph import Carry, Join, Loop, Op, OpGraph, OpKey, Value
from shardwright.planner.mlir import ir
from shardwright.planner.op_forms import STRUCTURED, FormReader
from shardwright.planner.program import Program
from shardwright.planner.rules import Rule

OP_ID = "shardwright.op"
"""Attribute that numbers the operations of a module, so that they are known after passes."""

_CONSTANTS = ("stablehlo.constant", "sdy.constant")
_SOURCES = (*_CONSTANTS, "stablehlo.iota")
_TERMINATORS = ("stablehlo.return", "func.return", "sdy.return")


def build_graph(program: Program) -> OpGraph:
    """Reads the op graph of a program, asking Shardy for every operation's rule."""
    with program.module() as module:
        mlir.run_passes(module, mlir.POPULATE_RULES)
        return _Reader(module, program.mesh_axes or {}).read(program)


def number_operations(module: Any) -> None:
    """Marks the operations of an inlined module with the ids that `build_graph` gives them."""
    i32 = ir.IntegerType.get_signless(32)
    for index, op in enumerate(operations(module)):
        op.attributes[OP_ID] = ir.IntegerAttr.get(i32, index)


def operations(module: Any) -> Iterator[Any]:
    """The operations that the graph numbers, in its order."""
    yield from operations_of(mlir.entry_block(mlir.main_function(module)))


def operation_keys(module: Any) -> dict[OpKey, Any]:
    """Every numbered operation of an inlined module by its key."""
    make_key, locations = _KeyMaker(), mlir.Locations()
    return {make_key(locations(op.location).name, op.name): op for op in operations(module)}


def operations_of(block: Any) -> Iterator[Any]:
    """The operations of a block that the graph numbers, in its order."""
    for op in mlir.walk_block(block):
        name = op.name
        if name in _TERMINATORS:
            continue
        yield op
        if name in STRUCTURED:
            # The operations of a loop's condition do not work on whole tensors.
            for region in op.regions[1:] if name == "stablehlo.while" else op.regions:
                for inner in region.blocks:
                    yield from operations_of(inner)


class _KeyMaker:
    """Numbers operations that share a location and a name."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], int] = {}

    def __call__(self, location: str, name: str) -> OpKey:
        ordinal = self._seen.get((location, name), 0)
        self._seen[location, name] = ordinal + 1
        return OpKey(location, name, ordinal)


class _Reader:
    """Walks a module once, numbering values and operations."""

    def __init__(self, module: Any, mesh: Mapping[str, int]) -> None:
        self._manual = False
        self._main = mlir.main_function(module)
        self._make_key = _KeyMaker()
        self._values: list[Value] = []
        self._ids: dict[Any, int] = {}
        self._ops: list[Op] = []
        self._loops: list[Loop | None] = []
        self._joins: list[Join] = []
        self._constants: dict[int, int] = {}
        self._types: dict[Any, tuple[tuple[int, ...], str]] = {}
        self._locations = mlir.Locations()
        self._read_form = FormReader(mesh)

    def read(self, program: Program) -> OpGraph:
        block = mlir.entry_block(self._main)
        arguments = tuple(self._add_value(a, producer=-1, free=False) for a in block.arguments)
        results = self._read_block(block, trips=1.0, loop=-1)
        return OpGraph(
            values=tuple(self._values),
            ops=tuple(self._ops),
            loops=tuple(loop for loop in self._loops if loop is not None),
            joins=tuple(self._joins),
            arguments=arguments,
            argument_names=tuple(tensor.path for tensor in program.inputs),
            argument_inner_dims=tuple(tensor.inner_dims for tensor in program.inputs),
            result_inner_dims=tuple(tensor.inner_dims for tensor in program.outputs),
            results=results,
            aliases=program.aliases,
        )

    def _add_value(self, value: Any, producer: int, free: bool) -> int:
        index = len(self._values)
        type_ = value.type
        if type_ not in self._types:
            self._types[type_] = _shape_and_dtype(type_)
        self._values.append(Value(index, *self._types[type_], producer, free))
        self._ids[value] = index
        return index

    def _read_block(self, block: Any, trips: float, loop: int) -> tuple[int, ...]:
        """Reads the operations of a block; returns the values that it yields."""
        for op in mlir.walk_block(block):
            name = op.name
            if name in _TERMINATORS:
                return tuple(self._ids[v] for v in op.operands)
            self._read_op(op, name, trips, loop)
        return ()

    def _read_op(self, op: Any, name: str, trips: float, loop: int) -> None:
        ids = self._ids
        operands = tuple([ids[v] for v in op.operands])
        index = len(self._ops)
        form = self._read_form(op, name)
        free = self._is_free(name, form.rule, operands)
        location = self._locations(op.location)
        key = self._make_key(location.name, name)
        results: tuple[int, ...] = ()
        if name not in STRUCTURED:
            results = tuple([self._add_value(r, index, free) for r in op.results])
            if name in _CONSTANTS:
                self._remember_constant(op, results[0])
        self._ops.append(
            Op(
                id=index,
                name=form.name,
                operands=operands,
                results=results,
                rule=form.rule,
                trips=trips,
                loop=loop,
                key=key,
                source="" if free else location.source,
                detail=form.detail,
                manual=self._manual,
                form=form.number,
            )
        )
        if name not in STRUCTURED:
            return
        if name == "stablehlo.while":
            results = self._read_while(op, index, operands, trips, loop, key)
        elif name == MANUAL:
            results = self._read_manual(op, index, trips, loop)
        else:
            results = self._read_branches(op, index, trips, loop)
        self._ops[index] = replace(self._ops[index], results=results)

    def _is_free(self, name: str, rule: Rule | None, operands: tuple[int, ...]) -> bool:
        if name in _SOURCES:
            return True
        if rule is None or not operands or name in STRUCTURED:
            return False
        return all(self._values[o].free for o in operands) and rule.passes_through

    def _read_while(
        self,
        op: Any,
        index: int,
        inits: tuple[int, ...],
        trips: float,
        parent: int,
        key: OpKey,
    ) -> tuple[int, ...]:
        loop_id = len(self._loops)
        self._loops.append(None)
        body = op.regions[1].blocks[0]
        yielded_values = list(mlir.last_operation(body).operands)
        arguments = []
        for argument, yielded, init in zip(body.arguments, yielded_values, inits, strict=True):
            free = yielded == argument and self._values[init].free
            arguments.append(self._add_value(argument, producer=-1, free=free))
        count = self._trip_count(op, inits, arguments)
        passes = 1 if count is None else count
        yields = self._read_block(body, trips * passes, loop_id)
        results = tuple(self._add_value(r, index, free=False) for r in op.results)
        self._loops[loop_id] = Loop(
            id=loop_id,
            parent=parent,
            trips=passes,
            known_trips=count is not None,
            carries=tuple(map(Carry, inits, arguments, yields, results)),
            first_op=index + 1,
            last_op=len(self._ops),
            key=key,
        )
        return results

    def _read_branches(self, op: Any, index: int, trips: float, loop: int) -> tuple[int, ...]:
        # Which branch runs is not known, so each counts as equally likely.
        share = trips / len(op.regions)
        yields = [self._read_block(region.blocks[0], share, loop) for region in op.regions]
        results = tuple(self._add_value(r, index, free=False) for r in op.results)
        for position, result in enumerate(results):
            self._joins.append(Join(result, tuple(y[position] for y in yields), index))
        return results

    def _read_manual(self, op: Any, index: int, trips: float, loop: int) -> tuple[int, ...]:
        body = op.regions[0].blocks[0]
        for argument in body.arguments:
            self._add_value(argument, producer=-1, free=False)
        outside, self._manual = self._manual, True
        self._read_block(body, trips, loop)
        self._manual = outside
        return tuple(self._add_value(r, index, free=False) for r in op.results)

    def _remember_constant(self, op: Any, value: int) -> None:
        number = _scalar_integer(op)
        if number is not None:
            self._constants[value] = number

    def _trip_count(self, op: Any, inits: tuple[int, ...], arguments: list[int]) -> int | None:
        """Trips of `while i < limit: ...; i += step` with constants; None for other loops."""
        condition = op.regions[0].blocks[0]
        body = op.regions[1].blocks[0]
        compare = mlir.last_operation(condition).operands[0].owner
        if not isinstance(compare, ir.OpView | ir.Operation) or (
            compare.operation.name != "stablehlo.compare"
        ):
            return None
        direction = str(compare.operation.attributes["comparison_direction"])
        counter = _argument_number(compare.operation.operands[0], condition)
        limit = self._known(compare.operation.operands[1], condition, body, inits)
        if counter is None or limit is None or not ("LT" in direction or "LE" in direction):
            return None
        start = self._constants.get(inits[counter])
        add = mlir.last_operation(body).operands[counter].owner
        if not isinstance(add, ir.OpView | ir.Operation) or add.operation.name != "stablehlo.add":
            return None
        operands = list(add.operation.operands)
        steps = [o for o in operands if _argument_number(o, body) != counter]
        step = self._known(steps[0], body, body, inits) if len(steps) == 1 else None
        if start is None or not step or step < 0:
            return None
        return max(0, math.ceil((limit + ("LE" in direction) - start) / step))

    def _known(self, value: Any, block: Any, body: Any, inits: tuple[int, ...]) -> int | None:
        """The integer that a value holds in every pass, looking through what the loop hands on."""
        number = _argument_number(value, block)
        if number is not None:
            handed_on = mlir.last_operation(body).operands[number] == body.arguments[number]
            return self._constants.get(inits[number]) if handed_on else None
        if value in self._ids:
            return self._constants.get(self._ids[value])
        owner = value.owner
        return None if isinstance(owner, ir.Block) else _scalar_integer(owner.operation)


def _shape_and_dtype(type_: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(type_, ir.RankedTensorType):
        return tuple(type_.shape), str(type_.element_type)
    return (), str(type_)


def _scalar_integer(op: Any) -> int | None:
    """What a constant operation holds where that is one integer."""
    if op.name not in _CONSTANTS or not isinstance(op.results[0].type.element_type, ir.IntegerType):
        return None
    dense = op.attributes["value"]
    return int(dense[0]) if dense.type.rank == 0 else None


def _argument_number(value: Any, block: Any) -> int | None:
    return next((i for i, a in enumerate(block.arguments) if a == value), None)
