"""Step 3: the sharding problem of a program on one logical mesh.

Every node of the program gets its strategies with their compute seconds; every value that runs
between nodes gets an edge whose table prices the reshard from the produced to the demanded
sharding. Where several nodes demand one value, a copy node stands between: the value is
resharded to the copy once, and each reader reshards from there if it still has to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models.memory import Buffer, PeakMemory, peak_memory
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.collectives import DimAxes, compiled_step
from shardwright.planner.fusion import FusionPlan
from shardwright.planner.graph import OpGraph
from shardwright.planner.halo import halo_seconds
from shardwright.planner.liveness import Lifetime
from shardwright.planner.manual import manual_collectives
from shardwright.planner.mlir import PREFETCHABLE
from shardwright.planner.nodes import OPERATION, Node, NodeGraph, Port, Use, is_trivial
from shardwright.planner.op_costs import kernel_seconds, local_bytes
from shardwright.planner.partial_sums import sums_of_products
from shardwright.planner.reshard import ReshardCosts
from shardwright.planner.rules import DimFactors
from shardwright.planner.solver import Edge, MemoryTerm, Problem
from shardwright.planner.strategies import (
    IntArray,
    assignments,
    codes,
    local_dims,
    partial_masks,
)
from shardwright.planner.unsound import sound

FloatArray = NDArray[np.float64]
Fixed = Mapping[int, tuple[int | None, ...]]
"""Node id -> for each mesh axis the factor it must have (-1: none), or None where free."""


@dataclass(frozen=True)
class Copy:
    """A value resharded once for several readers; its node comes after the program's nodes."""

    node: int
    value: int
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Transfer:
    """Seconds to bring a value from one node's sharding to another's, for the whole program.

    Attributes:
      gathers: seconds of all-gathers that can run ahead of their use and hide behind compute.
      exposed: seconds of everything else.
    """

    a: int
    b: int
    gathers: FloatArray | None
    exposed: FloatArray


@dataclass(frozen=True)
class ShardingProblem:
    """Strategies and costs of a program on one mesh, before they are weighed together."""

    mesh: LogicalMesh
    node_graph: NodeGraph = field(repr=False)
    strategies: tuple[IntArray, ...] = field(repr=False)
    copies: tuple[Copy, ...] = field(repr=False)
    compute: tuple[FloatArray, ...] = field(repr=False)
    exposed: tuple[FloatArray, ...] = field(repr=False)
    transfers: tuple[Transfer, ...] = field(repr=False)
    memory: tuple[MemoryTerm, ...] = field(repr=False)

    def weighed(self, hiding: float, memory_limit: float) -> Problem:
        """The integer program for one weight of what hides against what it hides behind.

        A step takes max(compute, gathers) + exposed seconds. For any weight in [0, 1],
        (1 - weight) * compute + weight * gathers + exposed is a lower bound of that, and for the
        right weight its optimum is the best step (Lagrangian duality).

        Args:
          hiding: the weight.
          memory_limit: bytes of one device that the program may use.
        """
        costs = [
            (1.0 - hiding) * compute + exposed + _SIMPLER * (rows + 1).sum(axis=1)
            for compute, exposed, rows in zip(
                self.compute, self.exposed, self.strategies, strict=True
            )
        ]
        edges = [
            Edge(t.a, t.b, t.exposed if t.gathers is None else t.exposed + hiding * t.gathers)
            for t in self.transfers
        ]
        names = [node.label for node in self.node_graph.nodes]
        names += [f"copy of value {copy.value}" for copy in self.copies]
        return Problem(
            costs=tuple(costs),
            edges=tuple(edges),
            memory=self.memory,
            memory_limit=memory_limit,
            names=tuple(names),
        )

    def peak_memory(self, choices: Sequence[int]) -> PeakMemory:
        """The memory of a choice of strategies as the integer program counts it."""
        names = [node.label for node in self.node_graph.nodes]
        names += ["a gathered copy"] * len(self.copies)
        return peak_memory(
            [
                Buffer(names[m.node], m.start, m.end, float(m.usage[choices[m.node]]))
                for m in self.memory
            ]
        )

    def seconds(self, choices: Sequence[int]) -> tuple[float, float, float]:
        """Compute, gather and exposed seconds of a choice of strategies."""
        pairs = list(zip(choices, self.compute, self.exposed, strict=True))
        compute = sum(float(c[s]) for s, c, _ in pairs)
        exposed = sum(float(e[s]) for s, _, e in pairs)
        gathers = 0.0
        for t in self.transfers:
            at = (choices[t.a], choices[t.b])
            exposed += float(t.exposed[at])
            gathers += 0.0 if t.gathers is None else float(t.gathers[at])
        return compute, gathers, exposed


def build_problem(
    nodes: NodeGraph,
    fusions: FusionPlan,
    buffers: Sequence[Lifetime],
    mesh: LogicalMesh,
    fixed: Fixed | None = None,
    reshard_costs: ReshardCosts | None = None,
) -> ShardingProblem:
    """Prices every strategy and every reshard of a program on a mesh.

    Args:
      fixed: strategies that are given (pinned arguments, constraints in the program).
      reshard_costs: tables to share between problems on the same mesh.
    """
    builder = _Builder(nodes, fusions, mesh, fixed or {}, reshard_costs or ReshardCosts(mesh))
    return builder.build(buffers)


def node_strategies(nodes: NodeGraph, axis_sizes: Sequence[int], fixed: Fixed) -> list[IntArray]:
    """The strategies of every node."""
    split: dict[int, set[tuple[int, ...]]] = {}
    ports = [*nodes.producers.values(), *(u.port for uses in nodes.uses.values() for u in uses)]
    for port in ports:
        split.setdefault(port.node, set()).update(dim for dim in port.dims if len(dim) > 1)
    sizes = tuple(axis_sizes)
    found = []
    for node in nodes.nodes:
        rows = assignments(
            node.sizes,
            node.shardable,
            node.exact,
            frozenset(split.get(node.id, ())),
            sizes,
            fixed.get(node.id, ()),
        )
        right = np.ones(len(rows), dtype=bool)
        for op_id, factors in node.ops.items():
            right &= sound(nodes.graph.ops[op_id], factors, rows, sizes)
        found.append(rows if right.all() else rows[right])
    return found


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


_SIMPLER = 1e-10
"""Seconds for each factor number in a strategy: among equals the one that shards least, and
leading dimensions, is taken."""


class _Builder:
    def __init__(
        self,
        nodes: NodeGraph,
        fusions: FusionPlan,
        mesh: LogicalMesh,
        fixed: Fixed,
        reshard_costs: ReshardCosts,
    ) -> None:
        self._nodes = nodes
        self._graph = nodes.graph
        self._fusions = fusions
        self._mesh = mesh
        self._axis_sizes = tuple(mesh.shape.values())
        self._chip = mesh.slice.chip
        self._costs = reshard_costs
        self._rows = node_strategies(nodes, self._axis_sizes, fixed)
        self._copies: list[Copy] = []
        self._transfers: list[Transfer] = []
        self._exposed: list[FloatArray] = [np.zeros(len(rows)) for rows in self._rows]
        self._prefetch = prefetchable_values(self._graph)
        self._sums = sums_of_products(self._graph)
        self._local: dict[tuple[object, ...], IntArray] = {}

    def build(self, buffers: Sequence[Lifetime]) -> ShardingProblem:
        compute = self._compute()
        for node in self._nodes.nodes:
            if node.kind == OPERATION:
                self._add_halos(node)
        for op, array, step in manual_collectives(self._graph, self._mesh):
            at = self._nodes.node_of_op[op.id]
            _, seconds = compiled_step(step, array.nbytes, self._mesh)
            self._exposed[at] = self._exposed[at] + op.trips * seconds
        for value, producer in self._nodes.producers.items():
            self._connect(value, producer)
        compute += [np.zeros(len(rows)) for rows in self._rows[len(compute) :]]
        self._exposed += [np.zeros(len(r)) for r in self._rows[len(self._exposed) :]]
        return ShardingProblem(
            mesh=self._mesh,
            node_graph=self._nodes,
            strategies=tuple(self._rows),
            copies=tuple(self._copies),
            compute=tuple(compute),
            exposed=tuple(self._exposed),
            transfers=tuple(self._transfers),
            memory=tuple(self._memory(buffers)),
        )

    # -- compute -------------------------------------------------------------------------------

    def _compute(self) -> list[FloatArray]:
        seconds = [np.zeros(len(rows)) for rows in self._rows]
        for fusion in self._fusions.fusions:
            first = self._graph.ops[fusion.ops[0]]
            node = self._nodes.node_of_op[first.id]
            kernel = kernel_seconds(self._graph, fusion, self._local_dims, self._chip)
            seconds[node] = seconds[node] + first.trips * kernel.total
        return seconds

    def _local_dims(self, op_id: int, position: int) -> IntArray:
        """Local shapes of an operand or result under the strategies of the operation's node."""
        op = self._graph.ops[op_id]
        node = self._nodes.nodes[self._nodes.node_of_op[op_id]]
        value = op.operands[position] if position >= 0 else op.results[-1 - position]
        dims = self._op_dims(node, op_id, position)
        return self._shapes(node.id, value, dims)

    def _op_dims(self, node: Node, op_id: int, position: int) -> DimFactors:
        op = self._graph.ops[op_id]
        if op.rule is None:
            value = op.operands[position] if position >= 0 else op.results[-1 - position]
            return ((),) * len(self._graph.values[value].shape)
        mapping = node.ops[op_id]
        rule = op.rule.operands[position] if position >= 0 else op.rule.results[-1 - position]
        return tuple(tuple(mapping[f] for f in dim if mapping[f] >= 0) for dim in rule)

    def _shapes(self, node: int, value: int, dims: DimFactors) -> IntArray:
        shape = self._graph.values[value].shape
        key = (id(self._rows[node]), shape, dims)
        if key not in self._local:
            self._local[key] = local_dims(self._rows[node], shape, dims, self._axis_sizes)
        return self._local[key]

    def _add_halos(self, node: Node) -> None:
        for op_id in node.ops:
            op = self._graph.ops[op_id]
            if op.rule is None or not op.rule.permutation:
                continue
            seconds = halo_seconds(
                op, self._graph, self._rows[node.id], self._local_dims, self._mesh
            )
            self._exposed[node.id] = self._exposed[node.id] + op.trips * seconds

    # -- communication -------------------------------------------------------------------------

    def _connect(self, value: int, producer: Port) -> None:
        uses = self._distinct_uses(value)
        if is_trivial(self._graph.values[value]) or not uses:
            self._finish_partial(value, producer)
            return
        others = {use.port.node for use in uses} - {producer.node}
        # Partial sums are added up once, whoever reads them.
        if len(others) < 2 and not (producer.partial and len(uses) > 1):
            self._transfers_to(value, producer, uses)
            return
        copy = self._add_copy(value, tuple(uses))
        port = Port(copy, value, tuple((d,) for d in range(len(self._graph.values[value].shape))))
        # A branch may read it less often, but it is made where the value is.
        self._transfer(value, producer, port, np.full(1, self._graph.value_trips(value)))
        self._transfers_to(value, port, uses)

    def _transfers_to(self, value: int, source: Port, uses: Sequence[Use]) -> None:
        demanded: dict[int, list[IntArray]] = {}
        for use in uses:
            earlier = demanded.setdefault(use.port.node, [])
            wanted = codes(self._rows[use.port.node], use.port.dims)
            # A node that reads a value in two ways may need one sharding for both.
            again = np.zeros(len(wanted), dtype=bool)
            for other in earlier:
                again |= other == wanted
            self._transfer(value, source, use.port, use.trips * ~again)
            earlier.append(wanted)

    def _distinct_uses(self, value: int) -> list[Use]:
        found: dict[tuple[int, DimFactors], Use] = {}
        for use in self._nodes.uses.get(value, ()):
            found.setdefault((use.port.node, use.port.dims), use)
        return list(found.values())

    def _add_copy(self, value: int, uses: tuple[Use, ...]) -> int:
        shape = self._graph.values[value].shape
        large = frozenset(d for d, size in enumerate(shape) if size > 1)
        node = len(self._rows)
        self._rows.append(assignments(shape, large, False, frozenset(), self._axis_sizes))
        self._copies.append(Copy(node, value, uses))
        return node

    def _transfer(self, value: int, source: Port, target: Port, trips: FloatArray) -> None:
        """Adds the seconds of a reshard that runs `trips` times, by strategy of the target."""
        gathers, exposed = self._table(value, source, target)
        if source.node == target.node:
            # Within one node both sides are the same strategy.
            extra = np.diagonal(gathers + exposed)
            self._exposed[source.node] = self._exposed[source.node] + trips * extra
            return
        hides = value in self._prefetch and bool(gathers.any())
        if not hides:
            exposed = exposed + gathers
        if hides or exposed.any():
            ahead = trips * gathers if hides else None
            self._transfers.append(Transfer(source.node, target.node, ahead, trips * exposed))

    def _table(self, value: int, source: Port, target: Port) -> tuple[FloatArray, FloatArray]:
        tensor = self._graph.values[value]
        shape, nbytes = tensor.shape, tensor.nbytes
        from_rows, to_rows = self._rows[source.node], self._rows[target.node]
        before, after = codes(from_rows, source.dims), codes(to_rows, target.dims)
        gather, rest = self._costs.tables(shape, nbytes)
        pick = np.ix_(before, after)
        gathers, others = gather[pick], rest[pick]
        if source.partial:
            masks = partial_masks(from_rows, source.partial)
            _, added_up = self._sums.get(value, (value, 1))
            for mask in np.unique(masks[masks > 0]):
                at = masks == mask
                extra = self._costs.partial_table(shape, nbytes, int(mask))
                others[at] += extra[np.ix_(before[at], after)] / added_up
        return gathers, others

    def _finish_partial(self, value: int, producer: Port) -> None:
        """What nobody reads sharded, but is left as partial sums, is added up where it is made."""
        if not producer.partial:
            return
        rows = self._rows[producer.node]
        tensor = self._graph.values[value]
        masks = partial_masks(rows, producer.partial)
        made = codes(rows, producer.dims)
        trips = self._graph.value_trips(value)
        for mask in np.unique(masks[masks > 0]):
            table = self._costs.partial_table(tensor.shape, tensor.nbytes, int(mask))
            extra = np.where(masks == mask, trips * table[made, made], 0.0)
            self._exposed[producer.node] = self._exposed[producer.node] + extra

    # -- memory --------------------------------------------------------------------------------

    def _memory(self, buffers: Sequence[Lifetime]) -> list[MemoryTerm]:
        terms = []
        for buffer in buffers:
            port = self._nodes.producers.get(buffer.value)
            if port is not None:
                usage = self._usage(port.node, buffer.value, port.dims)
                terms.append(MemoryTerm(port.node, buffer.start, buffer.end, usage))
        shared = set()
        for copy in self._copies:
            shared.add(copy.value)
            rank = len(self._graph.values[copy.value].shape)
            dims = tuple((d,) for d in range(rank))
            usage = self._usage(copy.node, copy.value, dims)
            times = [use.time for use in copy.uses]
            # Bytes beyond what the value takes anyway: only a gathered copy has its own buffer.
            extra = usage - usage.min()
            terms.append(MemoryTerm(copy.node, min(times), max(times) + 1, extra))
        for loop in self._graph.loops:
            for carry in loop.carries:
                port = self._nodes.producers.get(carry.argument)
                if carry.invariant and port is not None:
                    # It shares the buffer of its initial value unless it is gathered before.
                    usage = self._usage(port.node, carry.argument, port.dims)
                    extra = usage - usage.min()
                    terms.append(MemoryTerm(port.node, loop.first_op - 1, loop.last_op, extra))
        for value, uses in self._nodes.uses.items():
            for use in uses:
                node = self._nodes.nodes[use.port.node]
                if value not in shared and node.kind == OPERATION:
                    usage = self._usage(node.id, value, use.port.dims)
                    extra = usage - usage.min()
                    terms.append(MemoryTerm(node.id, use.time, use.time + 1, extra))
        return [term for term in terms if np.any(term.usage)]

    def _usage(self, node: int, value: int, dims: DimFactors) -> FloatArray:
        return local_bytes(self._shapes(node, value, dims), self._graph.values[value].dtype)


def sharding_of(row: Sequence[int], dims: DimFactors, names: Sequence[str]) -> DimAxes:
    """The mesh axes on each dimension of a value under one strategy."""
    return tuple(
        tuple(
            AxisRef(names[axis])
            for factor in dim
            for axis in range(len(names))
            if row[axis] == factor
        )
        for dim in dims
    )
