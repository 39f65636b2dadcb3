"""Where the planner has a choice: operations grouped into nodes that each take one strategy.

Connected elementwise operations form one node, since resharding inside a fused chain never pays.
Reductions join the node of what they reduce, broadcasts the node of what they make. Every other
operation, argument, loop-carried value and result is a node of its own. A node's strategy assigns
mesh axes to its factors, and everything that the node touches follows from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from shardwright.planner.given import CONSTRAINT, MANUAL
from shardwright.planner.graph import Op, OpGraph, Value
from shardwright.planner.rules import DimFactors, Rule

ARGUMENT, CARRY, GROUP, OPERATION, RESULT, JOIN = (
    "argument", "carry", "group", "operation", "result", "join",
)  # fmt: skip

BARRIER = "stablehlo.optimization_barrier"


@dataclass(frozen=True)
class Port:
    """A value as a node sees it.

    Attributes:
      node: the node.
      value: the value.
      dims: the node's factors that each dimension of the value consists of.
      partial: factors that leave the value as partial sums where they are sharded.
    """

    node: int
    value: int
    dims: DimFactors
    partial: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Use:
    """One place where a value is demanded.

    Attributes:
      op: the operation that reads it, or -1 (loop carry, result of main, join).
      operand: which operand of the operation.
      trips: how often the value is demanded here in one execution.
      time: the program point (an operation's id) at which it is demanded.
    """

    port: Port
    op: int
    operand: int
    trips: float
    time: int


@dataclass(frozen=True)
class Node:
    """Something that takes one strategy.

    Attributes:
      sizes: sizes of its factors.
      shardable: factors that mesh axes may be assigned to.
      exact: uneven shardings are refused here (arguments and results of the program, kernels).
      ops: the operations in it, each with its rule's factors as factors of the node (-1: size 1).
      label: what a person would call it.
    """

    id: int
    kind: str
    sizes: tuple[int, ...]
    shardable: frozenset[int]
    exact: bool
    ops: dict[int, tuple[int, ...]] = field(repr=False)
    label: str


@dataclass(frozen=True)
class NodeGraph:
    """The nodes of a program and the values that run between them.

    Attributes:
      producers: value id -> the port that makes it (none for free values).
      uses: value id -> where it is demanded, internal uses of a group left out.
      node_of_op: operation id -> node id, or -1 where nothing is to be decided.
      argument_nodes: for each argument of main, its node.
      result_nodes: for each result of main, its node (that of the aliased argument where donated).
    """

    graph: OpGraph = field(repr=False)
    nodes: tuple[Node, ...]
    producers: dict[int, Port] = field(repr=False)
    uses: dict[int, list[Use]] = field(repr=False)
    node_of_op: tuple[int, ...] = field(repr=False)
    argument_nodes: tuple[int, ...]
    result_nodes: tuple[int, ...]

    def whole_dims(self, value: int) -> DimFactors:
        """How a node that stands for one value (an argument, a carry) maps its dimensions."""
        return whole_dims(self.graph.values[value].shape)


def whole_dims(shape: Sequence[int]) -> DimFactors:
    """A factor for each dimension larger than 1, in order."""
    dims: list[tuple[int, ...]] = []
    for size in shape:
        dims.append((sum(map(len, dims)),) if size > 1 else ())
    return tuple(dims)


def is_trivial(value: Value) -> bool:
    """A value with a single element: there is nothing to shard."""
    return all(size == 1 for size in value.shape)


def build_nodes(graph: OpGraph) -> NodeGraph:
    """Groups the operations of a program into nodes and connects them."""
    return _Builder(graph).build()


@lru_cache(maxsize=1 << 16)
def value_dims(dims: DimFactors, factors: tuple[int, ...]) -> DimFactors:
    """A rule's dimension factors as factors of a node; factors of size 1 are left out."""
    return tuple(tuple(factors[f] for f in dim if factors[f] >= 0) for dim in dims)


@dataclass
class _Group:
    """A node under construction; merging changes it."""

    sizes: list[int]
    ops: dict[int, tuple[int, ...]]


class _Builder:
    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._groups: list[_Group | None] = []
        self._group_of: dict[int, int] = {}
        self._nodes: list[Node] = []
        self._producers: dict[int, Port] = {}
        self._uses: dict[int, list[Use]] = {}
        self._node_of_op = [-1] * len(graph.ops)
        self._open = [not value.free and not is_trivial(value) for value in graph.values]
        self._known_members: dict[int, list[int] | None] = {}

    def build(self) -> NodeGraph:
        for op in self._graph.ops:
            self._place(op)
        self._make_op_nodes()
        self._connect_ops()
        self._make_loop_nodes()
        self._make_join_nodes()
        self._make_local_nodes()
        argument_nodes = self._make_argument_nodes()
        result_nodes = self._make_result_nodes(argument_nodes)
        return NodeGraph(
            graph=self._graph,
            nodes=tuple(self._nodes),
            producers=self._producers,
            uses=self._uses,
            node_of_op=tuple(self._node_of_op),
            argument_nodes=argument_nodes,
            result_nodes=result_nodes,
        )

    def _decides(self, value: int) -> bool:
        """Whether a value's sharding is a decision."""
        return self._open[value]

    def _members(self, op: Op) -> list[int] | None:
        """`_member_dims` of an operation; operations of one form are looked at once."""
        if op.form not in self._known_members:
            self._known_members[op.form] = _member_dims(op, op.rule, self._graph)
        return self._known_members[op.form]

    # -- groups of elementwise operations ------------------------------------------------------

    def _place(self, op: Op) -> None:
        rule = op.rule
        if rule is None or not any(map(self._decides, (*op.operands, *op.results))):
            return
        if all(self._graph.values[r].free for r in op.results):
            return
        base = self._members(op)
        if base is None:
            factors = _large_factors(rule)
            self._new_group(op, [rule.sizes[f] for f in factors], factors)
            return
        self._new_group(op, [rule.sizes[f] for f in base], base)
        for position, operand in enumerate(op.operands):
            self._join_producer(op, position, operand)

    def _new_group(self, op: Op, sizes: list[int], factors: list[int]) -> None:
        index = {factor: i for i, factor in enumerate(factors)}
        assert op.rule is not None
        mapping = tuple(index.get(f, -1) for f in range(len(op.rule.sizes)))
        self._group_of[op.id] = len(self._groups)
        self._groups.append(_Group(sizes, {op.id: mapping}))

    def _join_producer(self, op: Op, position: int, operand: int) -> None:
        """Merges the operation's group with that of an elementwise producer of a full operand."""
        producer_id = self._graph.values[operand].producer
        if producer_id < 0 or producer_id not in self._group_of:
            return
        producer = self._graph.ops[producer_id]
        assert producer.rule is not None and op.rule is not None
        if producer.loop != op.loop or self._members(producer) is None:
            return
        ours, theirs = self._group_of[op.id], self._group_of[producer_id]
        if ours == theirs:
            return
        group, other = self._groups[ours], self._groups[theirs]
        assert group is not None and other is not None
        made = producer.rule.results[producer.results.index(operand)]
        pairs = [
            (a, b)
            for a, b in zip(
                value_dims(op.rule.operands[position], group.ops[op.id]),
                value_dims(made, other.ops[producer_id]),
                strict=True,
            )
            if a or b
        ]
        if any(len(a) != 1 or len(b) != 1 for a, b in pairs):
            return
        to_ours = {b[0]: a[0] for a, b in pairs}
        full = len(pairs) == len(group.sizes) == len(other.sizes)
        if not full or len(to_ours) != len(pairs) or len(set(to_ours.values())) != len(pairs):
            return
        self._merge(ours, theirs, to_ours)

    def _merge(self, ours: int, theirs: int, to_ours: dict[int, int]) -> None:
        group, other = self._groups[ours], self._groups[theirs]
        assert group is not None and other is not None
        if len(group.ops) < len(other.ops):
            return self._merge(theirs, ours, {a: b for b, a in to_ours.items()})
        for op_id, mapping in other.ops.items():
            group.ops[op_id] = tuple(to_ours.get(f, -1) for f in mapping)
            self._group_of[op_id] = ours
        self._groups[theirs] = None
        return None

    # -- nodes ---------------------------------------------------------------------------------

    def _add_node(
        self,
        kind: str,
        sizes: Sequence[int],
        label: str,
        *,
        shardable: frozenset[int] | None = None,
        exact: bool = False,
        ops: dict[int, tuple[int, ...]] | None = None,
    ) -> int:
        node = len(self._nodes)
        if shardable is None:
            shardable = frozenset(range(len(sizes)))
        self._nodes.append(Node(node, kind, tuple(sizes), shardable, exact, ops or {}, label))
        return node

    def _make_op_nodes(self) -> None:
        for group in self._groups:
            if group is None:
                continue
            ops = [self._graph.ops[i] for i in group.ops]
            alone = len(ops) == 1
            shardable = frozenset(range(len(group.sizes)))
            if ops[0].manual:
                shardable = frozenset()
            elif alone:
                rule = ops[0].rule
                assert rule is not None
                mapping = group.ops[ops[0].id]
                shardable -= {mapping[f] for f in rule.replicated}
            kind = GROUP
            if alone and self._members(ops[0]) is None:
                kind = OPERATION
            label = ops[-1].key.location or ops[-1].name
            # A shard_map needs shards of one size.
            exact = "kernel" in ops[0].detail
            node = self._add_node(
                kind, group.sizes, label, shardable=shardable, exact=exact, ops=group.ops
            )
            for op in ops:
                self._node_of_op[op.id] = node
        for op in self._graph.ops:
            unknown = op.rule is None and not op.name.startswith(_STRUCTURED)
            if unknown and any(map(self._decides, (*op.operands, *op.results))):
                node = self._add_node(OPERATION, (), op.key.location or op.name, ops={op.id: ()})
                self._node_of_op[op.id] = node

    def _connect_ops(self) -> None:
        for op in self._graph.ops:
            node = self._node_of_op[op.id]
            if op.name == BARRIER:
                self._connect_barrier(op)
            if node < 0:
                continue
            mapping = self._nodes[node].ops[op.id]
            for k, result in enumerate(op.results):
                value = self._graph.values[result]
                if value.free:
                    continue
                if op.rule is None:
                    dims: DimFactors = ((),) * len(value.shape)
                    partial: frozenset[int] = frozenset()
                else:
                    dims = value_dims(op.rule.results[k], mapping)
                    partial = frozenset(mapping[f] for f in op.rule.reduction if mapping[f] >= 0)
                self._producers[result] = Port(node, result, dims, partial)
        for op in self._graph.ops:
            node = self._node_of_op[op.id]
            if node < 0:
                continue
            mapping = self._nodes[node].ops[op.id]
            for k, operand in enumerate(op.operands):
                if not self._decides(operand):
                    continue
                if op.rule is None:
                    dims = ((),) * len(self._graph.values[operand].shape)
                else:
                    dims = value_dims(op.rule.operands[k], mapping)
                made = self._producers.get(operand)
                internal = (
                    made is not None
                    and made.node == node
                    and not made.partial
                    and made.dims == dims
                )
                if not internal:
                    self._use(operand, node, dims, op.id, k, op.trips, op.id)

    def _use(
        self, value: int, node: int, dims: DimFactors, op: int, operand: int, trips: float,
        time: int,
    ) -> None:  # fmt: skip
        use = Use(Port(node, value, dims), op, operand, trips, time)
        self._uses.setdefault(value, []).append(use)

    def _whole_value_node(
        self, kind: str, value: int, label: str, exact: bool = False, inner_dims: int = 0
    ) -> int:
        """A node whose factors are the dimensions of one value; the inner ones stay whole."""
        shape = self._graph.values[value].shape
        sizes = [s for s in shape if s > 1]
        outer = sum(s > 1 for s in shape[: len(shape) - inner_dims])
        return self._add_node(kind, sizes, label, exact=exact, shardable=frozenset(range(outer)))

    def _whole_dims(self, value: int) -> DimFactors:
        return whole_dims(self._graph.values[value].shape)

    def _connect_barrier(self, op: Op) -> None:
        """A barrier hands every operand on in its own sharding."""
        for k, (operand, result) in enumerate(zip(op.operands, op.results, strict=True)):
            if not self._decides(operand):
                continue
            node = self._whole_value_node(GROUP, operand, op.key.location or op.name)
            dims = self._whole_dims(operand)
            self._use(operand, node, dims, op.id, k, op.trips, op.id)
            self._producers[result] = Port(node, result, dims)

    def _make_loop_nodes(self) -> None:
        for loop in self._graph.loops:
            outer = 1.0 if loop.parent < 0 else self._graph.ops[loop.first_op - 1].trips
            for k, carry in enumerate(loop.carries):
                if not self._decides(carry.argument):
                    continue
                node = self._whole_value_node(CARRY, carry.argument, f"loop {loop.id} carry {k}")
                dims = self._whole_dims(carry.argument)
                for value in (carry.argument, carry.result):
                    self._producers[value] = Port(node, value, dims)
                start = loop.first_op - 1
                if self._decides(carry.init):
                    self._use(carry.init, node, dims, -1, k, outer, start)
                if not carry.invariant and self._decides(carry.yielded):
                    trips = outer * loop.trips
                    self._use(carry.yielded, node, dims, -1, k, trips, loop.last_op - 1)

    def _make_join_nodes(self) -> None:
        for join in self._graph.joins:
            if not self._decides(join.result):
                continue
            op = self._graph.ops[join.op]
            node = self._whole_value_node(JOIN, join.result, op.key.location or op.name)
            dims = self._whole_dims(join.result)
            self._producers[join.result] = Port(node, join.result, dims)
            for branch, value in enumerate(join.yields):
                if self._decides(value):
                    share = op.trips / len(join.yields)
                    self._use(value, node, dims, -1, branch, share, join.op)

    def _make_local_nodes(self) -> None:
        """Arguments of `shard_map` bodies are local arrays: there is nothing to choose."""
        made = set(self._producers) | set(self._graph.arguments)
        read = {v for op in self._graph.ops if op.manual for v in op.operands}
        for value in sorted(read - made):
            if self._graph.values[value].producer < 0 and self._decides(value):
                node = self._add_node(GROUP, (), "shard_map argument", shardable=frozenset())
                dims: DimFactors = ((),) * len(self._graph.values[value].shape)
                self._producers[value] = Port(node, value, dims)

    def _make_argument_nodes(self) -> tuple[int, ...]:
        nodes = []
        for k, value in enumerate(self._graph.arguments):
            node = self._whole_value_node(
                ARGUMENT,
                value,
                self._graph.argument_names[k],
                exact=True,
                inner_dims=self._graph.argument_inner_dims[k],
            )
            self._producers[value] = Port(node, value, self._whole_dims(value))
            nodes.append(node)
        return tuple(nodes)

    def _make_result_nodes(self, argument_nodes: tuple[int, ...]) -> tuple[int, ...]:
        nodes = []
        end = len(self._graph.ops)
        for k, value in enumerate(self._graph.results):
            aliased = self._graph.aliases.get(k)
            if aliased is None:
                inner = self._graph.result_inner_dims[k]
                node = self._whole_value_node(RESULT, value, f"result {k}", True, inner)
            else:
                node = argument_nodes[aliased]
            nodes.append(node)
            if self._decides(value):
                self._use(value, node, self._whole_dims(value), -1, k, 1.0, end)
        return tuple(nodes)


_STRUCTURED = ("stablehlo.while", "stablehlo.if", "stablehlo.case", BARRIER)


def _large_factors(rule: Rule) -> list[int]:
    return [f for f, size in enumerate(rule.sizes) if size > 1]


def _member_dims(op: Op, rule: Rule | None, graph: OpGraph) -> list[int] | None:
    """The factors, in order, that a group of this operation has; None where it is no member.

    Members are elementwise operations in the wide sense (transposes and size-1 reshapes too),
    broadcasts, and reductions.
    """
    if rule is None or rule.replicated or rule.permutation or op.name in (CONSTRAINT, MANUAL):
        return None
    if "kernel" in op.detail:
        return None
    mappings = (*rule.operands, *rule.results)
    if any(len(dim) > 1 for mapping in mappings for dim in mapping):
        return None
    base = rule.results[0]
    if op.name == "stablehlo.reduce":
        base = rule.operands[0]
    elif rule.reduction:
        return None
    factors = [f for dim in base for f in dim if rule.sizes[f] > 1]
    if len(set(factors)) != len(factors):
        return None
    covered = all(
        f in factors for mapping in mappings for dim in mapping for f in dim if rule.sizes[f] > 1
    )
    if not covered:
        return None
    # A dimension whose factor is smaller than itself (a slice, say) is not carried over whole.
    values = [graph.values[v] for v in (*op.operands, *op.results)]
    whole = all(
        size == (rule.sizes[dim[0]] if dim else 1)
        for value, mapping in zip(values, mappings, strict=True)
        for size, dim in zip(value.shape, mapping, strict=True)
    )
    return factors if whole else None
