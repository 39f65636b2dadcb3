"""Partitions a constrained program by its different pieces: each is partitioned once.

Every different piece becomes a function of one module. What Shardy makes of it holds for all pieces
that are alike, with their own operations and values in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxlib.mlir.dialects import func

from shardwright.planner import mlir
from shardwright.planner.annotate import Place, constrain, mesh_symbol, set_shardings
from shardwright.planner.collectives import DimAxes
from shardwright.planner.constraints import ValueConstraint
from shardwright.planner.graph import OpGraph
from shardwright.planner.graph_reader import OP_ID
from shardwright.planner.mlir import ir
from shardwright.planner.narrowing import Narrowing
from shardwright.planner.partition_reader import FunctionReader
from shardwright.planner.partitioned import Communication, Partitioned
from shardwright.planner.partitioning import partition, run_shardy
from shardwright.planner.pieces import Piece, Pieces, Reading
from shardwright.planner.program import Program

_FEW = 0.5
"""A program is partitioned by pieces where the different ones hold at most this part of it."""


def partition_constrained(
    program: Program,
    graph: OpGraph,
    mesh_shape: Mapping[str, int],
    constraints: Sequence[ValueConstraint],
    inputs: Sequence[DimAxes],
    outputs: Sequence[DimAxes],
) -> Partitioned:
    """As `partition`, for a program whose constraints leave propagation no freedom."""
    given = program, graph, mesh_shape, constraints, inputs, outputs
    return partition_pieces(*given) or partition(*given)


def partition_pieces(
    program: Program,
    graph: OpGraph,
    mesh_shape: Mapping[str, int],
    constraints: Sequence[ValueConstraint],
    inputs: Sequence[DimAxes],
    outputs: Sequence[DimAxes],
) -> Partitioned | None:
    """What `partition` makes of a program, or None where it has to be partitioned as a whole.

    That is where it has loops, branches, `shard_map` regions or shardings of its own, where few of
    its pieces are alike, or where Shardy reshards what a piece reads, which no constraint asked
    for: the reshard may serve other pieces too. Of operations on constants alone nothing is told.
    """
    if graph.loops or graph.joins or program.mesh_axes is not None:
        return None
    pieces = Pieces(graph, constraints, inputs)
    first: dict[int, Piece] = {}
    for piece in pieces.pieces:
        first.setdefault(piece.alike, piece)
    different, every = (
        sum(len(piece.ops) for piece in some) for some in (first.values(), pieces.pieces)
    )
    if different > _FEW * every:
        return None
    narrowing = Narrowing(graph)
    with program.module() as module:
        found = _Partitioner(module, graph, narrowing, pieces, mesh_shape).run(first)
    if found is None:
        return None
    return _assemble(graph, narrowing, pieces, found, inputs, outputs)


@dataclass(frozen=True)
class _Found:
    """A piece and what became of it."""

    piece: Piece
    read: FunctionReader


class _Partitioner:
    """Makes functions of pieces, in a module of their own, and partitions them."""

    def __init__(
        self,
        module: Any,
        graph: OpGraph,
        narrowing: Narrowing,
        pieces: Pieces,
        mesh_shape: Mapping[str, int],
    ) -> None:
        self._graph = graph
        self._narrowing = narrowing
        self._pieces = pieces
        self._mesh_shape = mesh_shape
        main = mlir.entry_block(mlir.main_function(module))
        self._ops = list(mlir.walk_block(main))
        self._arguments = dict(zip(graph.arguments, main.arguments, strict=True))
        self._i32 = ir.IntegerType.get_signless(32)
        self._places: list[Place] = []
        self._boundaries: list[tuple[Any, str, list[DimAxes], list[DimAxes]]] = []

    def run(self, first: Mapping[int, Piece]) -> dict[int, _Found] | None:
        """The pieces partitioned, by what they are alike in; None where they do not tell."""
        with ir.Location.unknown():
            module = ir.Module.create()
            mesh = mesh_symbol(module, self._mesh_shape)
            functions = {}
            with ir.InsertionPoint(module.body):
                _empty_main()
            for alike, piece in first.items():
                with ir.InsertionPoint(module.body):
                    functions[alike] = self._function(f"piece{alike}", piece, mesh)
            constrain(self._places, mesh, self._mesh_shape)
            self._set_boundaries()
            # Propagation takes uneven shardings from what functions take and return; between
            # pieces tensors keep them.
            run_shardy(module, functions.values(), self._graph, self._set_boundaries)
        found = {}
        for alike, function in functions.items():
            piece = first[alike]
            reader = FunctionReader(self._graph, self._narrowing, self._mesh_shape)
            given = [(one.value, one.prefetchable) for one in piece.given]
            if piece.argument >= 0:
                given = [(piece.argument, True)]
            reader.read(function, given, [reading[0] for reading in self._outside(piece)])
            own = self._own(piece)
            if any(c.from_value not in own for c in reader.communications):
                return None
            found[alike] = _Found(piece, reader)
        return found

    def _own(self, piece: Piece) -> list[int]:
        """The values that a piece makes, or is."""
        if piece.argument >= 0:
            return [piece.argument]
        return [value for op in piece.ops for value in self._graph.ops[op].results]

    def _outside(self, piece: Piece) -> list[Reading]:
        """Where others read what a piece makes: the results of its function, in order."""
        inside = set(piece.ops)
        readings = self._pieces.readings
        return [r for v in self._own(piece) for r in readings.get(v, ()) if r[0] not in inside]

    def _function(self, name: str, piece: Piece, mesh: str) -> Any:
        function = func.FuncOp(name, ir.FunctionType.get([], [])).operation
        block = function.regions[0].blocks.append()
        made = self._emit(piece, block)
        outside: list[tuple[Any, DimAxes]] = []
        uses: dict[Reading, tuple[Any, int]] = {}
        for value in self._own(piece):
            for reading in self._pieces.readings.get(value, ()):
                op, operand = reading
                if op in self._emitted:
                    uses[reading] = (self._emitted[op], operand)
                    continue
                sharding = self._pieces.sharding_at(value, reading)
                whole = ((),) * len(self._graph.values[value].shape)
                uses[reading] = (None, len(outside))
                outside.append((made[value], whole if sharding is None else sharding))
        with ir.InsertionPoint(block):
            end = func.ReturnOp([value for value, _ in outside]).operation
        for value in self._own(piece):
            constraint = self._pieces.constraints.get(value)
            if constraint is not None:
                told = [(demand, *uses[reading]) for reading, demand in self._pieces.demands(value)]
                self._places.append(
                    (constraint, made[value], [(d, op or end, k) for d, op, k in told])
                )
        types = [a.type for a in block.arguments], [value.type for value, _ in outside]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(*types))
        shardings = [one.sharding for one in piece.given]
        if piece.argument >= 0:
            shardings = [self._pieces.inputs[piece.argument]]
        self._boundaries.append((function, mesh, shardings, [given for _, given in outside]))
        return function

    def _set_boundaries(self) -> None:
        for boundary in self._boundaries:
            set_shardings(*boundary)

    def _emit(self, piece: Piece, block: Any) -> dict[int, Any]:
        """Puts the operations of a piece in a block; returns the values that it makes."""
        self._emitted: dict[int, Any] = {}
        unknown = ir.Location.unknown()
        if piece.argument >= 0:
            type_ = self._arguments[piece.argument].type
            return {piece.argument: block.add_argument(type_, unknown)}
        given = {}
        for one in piece.given:
            value = block.add_argument(self._value(one.value).type, unknown)
            given[one.value, one.sharding] = value
        made: dict[int, Any] = {}
        free: dict[int, Any] = {}
        with ir.InsertionPoint(block):
            for op_id in piece.ops:
                operands = []
                for position, operand in enumerate(self._graph.ops[op_id].operands):
                    if operand in made:
                        operands.append(made[operand])
                    elif self._graph.values[operand].free:
                        operands.append(self._emit_free(operand, free))
                    else:
                        sharding = self._pieces.sharding_at(operand, (op_id, position))
                        whole = ((),) * len(self._graph.values[operand].shape)
                        operands.append(given[operand, whole if sharding is None else sharding])
                op = self._clone(op_id, operands)
                op.attributes[OP_ID] = ir.IntegerAttr.get(self._i32, op_id)
                self._emitted[op_id] = op
                made.update(zip(self._graph.ops[op_id].results, op.results, strict=True))
        return made

    def _value(self, value: int) -> Any:
        """A value in the program's own module."""
        if value in self._arguments:
            return self._arguments[value]
        producer = self._graph.values[value].producer
        return self._ops[producer].results[self._graph.ops[producer].results.index(value)]

    def _emit_free(self, value: int, emitted: dict[int, Any]) -> Any:
        """A value that is computed of constants alone, with all that it is computed of."""
        needed: set[int] = set()
        pending = [value]
        while pending:
            producer = self._graph.values[pending.pop()].producer
            if producer not in needed:
                needed.add(producer)
                pending += [v for v in self._graph.ops[producer].operands if v not in emitted]
        for op in (self._graph.ops[producer] for producer in sorted(needed)):
            if op.results[0] not in emitted:
                clone = self._clone(op.id, [emitted[v] for v in op.operands])
                emitted.update(zip(op.results, clone.results, strict=True))
        return emitted[value]

    def _clone(self, op_id: int, operands: Sequence[Any]) -> Any:
        clone = self._ops[op_id].clone().operation
        for position, operand in enumerate(operands):
            clone.operands[position] = operand
        return clone


def _empty_main() -> None:
    """A main function, without which Shardy's passes end the process."""
    function = func.FuncOp("main", ir.FunctionType.get([], []))
    with ir.InsertionPoint(function.add_entry_block()):
        func.ReturnOp([])


def _assemble(
    graph: OpGraph,
    narrowing: Narrowing,
    pieces: Pieces,
    found: Mapping[int, _Found],
    inputs: Sequence[DimAxes],
    outputs: Sequence[DimAxes],
) -> Partitioned:
    """What became of all pieces, by what became of one of each."""
    operands: dict[int, tuple[DimAxes, ...]] = {}
    results: dict[int, tuple[DimAxes, ...]] = {}
    values = dict(zip(graph.arguments, inputs, strict=True))
    sent: list[tuple[tuple[int, int], Communication]] = []
    for piece in pieces.pieces:
        example = found[piece.alike]
        read = example.read
        for op, like in zip(piece.ops, example.piece.ops, strict=True):
            operands[op], results[op] = read.operands[like], read.results[like]
            for value, other in zip(graph.ops[op].results, graph.ops[like].results, strict=True):
                values[value] = read.values[other]
        if not read.communications:
            continue
        moved = _Moved(graph, narrowing, pieces, example.piece, piece)
        for place, communication in zip(read.places, read.communications, strict=True):
            # Constraints on arguments are put before all else, the last argument's first.
            after = (moved.op(place), 0) if place >= 0 else (-1, -piece.argument)
            sent.append((after, moved.communication(communication)))
    sent.sort(key=lambda one: one[0])
    return Partitioned(
        operands, results, values, tuple(inputs), tuple(outputs), tuple(c for _, c in sent)
    )


class _Moved:
    """What is told of one piece, told of another that is alike."""

    def __init__(
        self, graph: OpGraph, narrowing: Narrowing, pieces: Pieces, example: Piece, piece: Piece
    ) -> None:
        self._graph = graph
        self._narrowing = narrowing
        self._pieces = pieces
        self._ops = dict(zip(example.ops, piece.ops, strict=True))
        self._arguments = {example.argument: piece.argument}

    def op(self, op: int) -> int:
        """The operation in the place of one of the example's."""
        return self._ops[op]

    def communication(self, told: Communication) -> Communication:
        value = self._value(told.from_value)
        # Nothing reads what an argmax finds besides the index, and yet it is reduced.
        theirs, ours = (self._pieces.readings.get(v, []) for v in (told.from_value, value))
        place_of = {like[0]: own[0] for like, own in zip(theirs, ours, strict=True)}
        read_by = tuple(sorted({self._reader(r, place_of) for r in told.read_by}))
        dtype = told.dtype
        if told.step.kind == "all_gather":
            wide = self._graph.values[value].dtype
            dtype = self._narrowing.dtype_for(value, read_by) or wide
        producer = self._graph.values[value].producer
        near = producer if producer >= 0 else (read_by or (told.near,))[0]
        return replace(told, dtype=dtype, near=near, read_by=read_by, from_value=value)

    def _value(self, value: int) -> int:
        if value in self._arguments:
            return self._arguments[value]
        op = self._graph.ops[self._graph.values[value].producer]
        return self._graph.ops[self._ops[op.id]].results[op.results.index(value)]

    def _reader(self, reader: int, place_of: Mapping[int, int]) -> int:
        return place_of[reader] if reader in place_of else self._ops[reader]
