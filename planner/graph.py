"""Step 2: the op graph of a program.

Operations in program order with their sharding rules; loops with their trip counts and carried
values; which values cost nothing to make in any sharding (constants, iotas, what is computed
from them alone).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np

from shardwright.cost_models.memory import dtype_bytes
from shardwright.planner import mlir
from shardwright.planner.given import (
    CONSTRAINT,
    MANUAL,
    constraint_detail,
    manual_rule,
    replica_groups,
)
from shardwright.planner.kernel_ops import pallas_cost, read_kernel
from shardwright.planner.mlir import ir
from shardwright.planner.program import Program
from shardwright.planner.rules import Rule, RuleReader, operation_name

OP_ID = "shardwright.op"
"""Attribute that numbers the operations of a module, so that they are known after passes."""

_CONSTANTS = ("stablehlo.constant", "sdy.constant")
_SOURCES = (*_CONSTANTS, "stablehlo.iota")
_CONV_LABELS = re.compile(r"\[([^\]]*)\]")
_GROUPED = ("stablehlo.reduce_scatter", "stablehlo.collective_permute")
_TERMINATORS = ("stablehlo.return", "func.return", "sdy.return")


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
    manual: bool = False


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
        graph = nx.DiGraph()
        for op in self.ops:
            graph.add_node(op.id, name=op.name, source=op.source, trips=op.trips)
        for op in self.ops:
            for operand in op.operands:
                value = self.values[operand]
                if value.producer >= 0:
                    graph.add_edge(value.producer, op.id, value=operand, shape=value.shape)
        return graph


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
    yield from _operations(mlir.entry_block(mlir.main_function(module)))


def operation_keys(module: Any) -> dict[OpKey, Any]:
    """Every numbered operation of an inlined module by its key."""
    make_key = _KeyMaker()
    return {make_key(op): op for op in operations(module)}


def _operations(block: Any) -> Iterator[Any]:
    for op in mlir.walk_block(block):
        if op.name in _TERMINATORS:
            continue
        yield op
        for region in _walked_regions(op):
            for inner in region.blocks:
                yield from _operations(inner)


def _walked_regions(op: Any) -> list[Any]:
    """The regions whose operations work on whole tensors (a loop's condition does not)."""
    if op.name == "stablehlo.while":
        return [op.regions[1]]
    if op.name in ("stablehlo.if", "stablehlo.case", MANUAL):
        return list(op.regions)
    return []


class _KeyMaker:
    """Numbers operations that share a location and a name."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def __call__(self, op: Any) -> OpKey:
        pair = (mlir.location_name(op), op.name)
        self._seen[pair] += 1
        return OpKey(*pair, self._seen[pair] - 1)


class _Reader:
    """Walks a module once, numbering values and operations."""

    def __init__(self, module: Any, mesh: Mapping[str, int]) -> None:
        self._mesh = mesh
        self._manual = False
        self._main = mlir.main_function(module)
        self._make_key = _KeyMaker()
        self._values: list[Value] = []
        self._ids: dict[Any, int] = {}
        self._ops: list[Op] = []
        self._loops: list[Loop | None] = []
        self._joins: list[Join] = []
        self._constants: dict[int, int] = {}
        self._sources = _SourceLines()
        self._read_rule = RuleReader()

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
        ranked = isinstance(type_, ir.RankedTensorType)
        shape = tuple(type_.shape) if ranked else ()
        dtype = str(type_.element_type) if ranked else str(type_)
        self._values.append(Value(index, shape, dtype, producer, free))
        self._ids[value] = index
        return index

    def _read_block(self, block: Any, trips: float, loop: int) -> tuple[int, ...]:
        """Reads the operations of a block; returns the values that it yields."""
        for op in mlir.walk_block(block):
            if op.name in _TERMINATORS:
                return tuple(self._ids[v] for v in op.operands)
            self._read_op(op, trips, loop)
        return ()

    def _read_op(self, op: Any, trips: float, loop: int) -> None:
        operands = tuple(self._ids[v] for v in op.operands)
        index = len(self._ops)
        structured = bool(_walked_regions(op))
        rule = None if structured else self._read_rule(op)
        detail = _detail(op)
        if op.name == MANUAL:
            rule, detail = manual_rule(op, self._mesh)
        free = not structured and self._is_free(op, rule, operands)
        key = self._make_key(op)
        plain = not structured and op.name != MANUAL
        results: tuple[int, ...] = ()
        if plain:
            results = tuple(self._add_value(r, index, free) for r in op.results)
            if op.name in _CONSTANTS:
                self._remember_constant(op, results[0])
        self._ops.append(
            Op(
                id=index,
                name=operation_name(op),
                operands=operands,
                results=results,
                rule=rule,
                trips=trips,
                loop=loop,
                key=key,
                source="" if free else self._sources(op),
                detail=detail,
                manual=self._manual,
            )
        )
        if plain:
            return
        if op.name == "stablehlo.while":
            results = self._read_while(op, index, operands, trips, loop, key)
        elif op.name == MANUAL:
            results = self._read_manual(op, index, trips, loop)
        else:
            results = self._read_branches(op, index, trips, loop)
        self._ops[index] = replace(self._ops[index], results=results)

    def _is_free(self, op: Any, rule: Rule | None, operands: tuple[int, ...]) -> bool:
        if op.name in _SOURCES:
            return True
        cheap = rule is not None and rule.passes_through and len(operands) > 0
        return cheap and all(self._values[o].free for o in operands)

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


class _SourceLines:
    """Source lines of operations; locations repeat, and printing one is slow."""

    def __init__(self) -> None:
        self._seen: dict[Any, str] = {}

    def __call__(self, op: Any) -> str:
        location = op.location
        if location not in self._seen:
            self._seen[location] = mlir.source_line(op)
        return self._seen[location]


def _scalar_integer(op: Any) -> int | None:
    """What a constant operation holds where that is one integer."""
    if op.name not in _CONSTANTS or not isinstance(op.results[0].type.element_type, ir.IntegerType):
        return None
    dense = op.attributes["value"]
    return int(dense[0]) if dense.type.rank == 0 else None


def _argument_number(value: Any, block: Any) -> int | None:
    return next((i for i, a in enumerate(block.arguments) if a == value), None)


def _detail(op: Any) -> dict[str, Any]:
    """The attributes that costs are computed from."""
    if op.name == CONSTRAINT:
        return constraint_detail(op)
    if op.name.startswith("stablehlo.all_") or op.name in _GROUPED:
        return replica_groups(op)
    if op.name == "stablehlo.custom_call":
        return _kernel_detail(op)
    if op.name == "stablehlo.reduce_window":
        window = list(ir.DenseI64ArrayAttr(op.attributes["window_dimensions"]))
        return {"reach": _reach(op, range(len(window)), window, "base_dilations")}
    if op.name != "stablehlo.convolution":
        return {}
    numbers = str(op.attributes["dimension_numbers"])
    inputs, kernel, output = (labels.split(", ") for labels in _CONV_LABELS.findall(numbers))
    spatial = [label for label in kernel if label.isdigit()]
    input_spatial = [inputs.index(label) for label in spatial]
    window = [op.operands[1].type.shape[kernel.index(label)] for label in spatial]
    return {
        "reach": _reach(op, input_spatial, window, "lhs_dilation"),
        "input_spatial": input_spatial,
        "output_spatial": [output.index(label) for label in spatial],
        "output_batch": output.index("b"),
        "kernel_spatial": [kernel.index(label) for label in spatial],
        "kernel_input_feature": kernel.index("i"),
        "kernel_output_feature": kernel.index("o"),
        "feature_group_count": ir.IntegerAttr(op.attributes["feature_group_count"]).value,
        "batch_group_count": ir.IntegerAttr(op.attributes["batch_group_count"]).value,
    }


def _kernel_detail(op: Any) -> dict[str, Any]:
    """What is known of the cost of a kernel: "kernel" of `sw.kernel`, "pallas" of a raw one."""
    kernel, raw = read_kernel(op), pallas_cost(op)
    return ({"kernel": kernel} if kernel else {}) | ({"pallas": raw} if raw else {})


def _reach(op: Any, dims: Sequence[int], window: Sequence[int], spread: str) -> dict[int, int]:
    """For each dimension that a window slides over, the elements it needs from a neighbour.

    Where input and output are cut alike, the window of a shard's first output starts as far
    before the shard as the padding, and that of its last output ends the rest of the window, less
    one stride, behind it. `spread` names the attribute that pulls input elements apart.
    """
    count = len(window)

    def numbers(name: str) -> list[int]:
        given = name in op.attributes
        return list(ir.DenseI64ArrayAttr(op.attributes[name])) if given else [1] * count

    strides, between = numbers("window_strides"), numbers(spread)
    dilations = numbers("rhs_dilation" if spread == "lhs_dilation" else "window_dilations")
    padding = np.zeros((count, 2), dtype=np.int64)
    if "padding" in op.attributes:
        padding = np.array(ir.DenseElementsAttr(op.attributes["padding"])).reshape(count, 2)
    reach = {}
    for i, dim in enumerate(dims):
        span = (window[i] - 1) * dilations[i] + 1
        before = int(padding[i, 0])
        reach[dim] = math.ceil(max(before, span - strides[i] - before, 0) / between[i])
    return reach
