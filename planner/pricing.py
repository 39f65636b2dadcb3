"""Prices every strategy and reshard of a program on one mesh.

What is alike in the program (see `skeleton`) is priced once and shares its arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.collectives import compiled_step
from shardwright.planner.feeding import feeding
from shardwright.planner.fusion import FusionPlan
from shardwright.planner.halo import halo_seconds
from shardwright.planner.liveness import Lifetime
from shardwright.planner.local_prices import LocalPrices, op_dims
from shardwright.planner.manual import manual_collectives
from shardwright.planner.nodes import NodeGraph
from shardwright.planner.problem import Fixed, FloatArray, ShardingProblem, Transfer
from shardwright.planner.reshard import ReshardCosts
from shardwright.planner.rules import DimFactors
from shardwright.planner.skeleton import Kind, Reshard, build_skeleton, node_kinds
from shardwright.planner.solver import MemoryTerm
from shardwright.planner.strategies import (
    Allowed,
    IntArray,
    assignments,
    codes,
    local_dims,
    partial_masks,
)
from shardwright.planner.unsound import sound


def build_problem(
    nodes: NodeGraph,
    fusions: FusionPlan,
    buffers: Sequence[Lifetime],
    mesh: LogicalMesh,
    fixed: Fixed | None = None,
    prices: LocalPrices | None = None,
) -> ShardingProblem:
    """Prices every strategy and every reshard of a program on a mesh.

    Args:
      fixed: strategies that are given (pinned arguments, constraints in the program).
      prices: those of other meshes of the same chip, where there are any.
    """
    if prices is None:
        prices = LocalPrices(build_skeleton(nodes, fusions, buffers), mesh.slice.chip)
    return MeshPricer(prices, mesh, fixed or {}).price()


def note_cuts(prices: LocalPrices, mesh: LogicalMesh, fixed: Fixed) -> None:
    """Notes in how many parts a mesh cuts nodes, so that they are priced with those of others."""
    MeshPricer(prices, mesh, fixed)


def node_strategies(nodes: NodeGraph, axis_sizes: Sequence[int], fixed: Fixed) -> list[IntArray]:
    """The strategies of every node."""
    kinds, kind_of = node_kinds(nodes)
    strategies = _Strategies(nodes, tuple(axis_sizes), fixed)
    return [strategies(node, kinds[kind]) for node, kind in enumerate(kind_of)]


class _Strategies:
    """The strategies of nodes; nodes of one kind share them."""

    def __init__(self, nodes: NodeGraph, axis_sizes: tuple[int, ...], fixed: Fixed) -> None:
        self._graph = nodes.graph
        self._axis_sizes = axis_sizes
        self._fixed = fixed
        self._known: dict[tuple[Kind, Allowed], IntArray] = {}

    def __call__(self, node: int, kind: Kind) -> IntArray:
        given = self._fixed.get(node, ())
        if (kind, given) not in self._known:
            self._known[kind, given] = self._find(kind, given)
        return self._known[kind, given]

    def _find(self, kind: Kind, given: Allowed) -> IntArray:
        rows = assignments(
            kind.sizes, kind.shardable, kind.exact, kind.split_dims, self._axis_sizes, given
        )
        right = np.ones(len(rows), dtype=bool)
        for op, factors in kind.convolutions:
            right &= sound(self._graph.ops[op], factors, rows, self._axis_sizes)
        return rows if right.all() else rows[right]


class MeshPricer:
    """Prices a skeleton on a mesh; what is alike is priced once."""

    def __init__(self, prices: LocalPrices, mesh: LogicalMesh, fixed: Fixed) -> None:
        skeleton = prices.skeleton
        self._prices = prices
        self._skeleton = skeleton
        self._nodes = skeleton.nodes
        self._graph = skeleton.nodes.graph
        self._mesh = mesh
        self._axis_sizes = tuple(mesh.shape.values())
        strategies = _Strategies(self._nodes, self._axis_sizes, fixed)
        self._rows = [
            strategies(node, skeleton.kinds[kind]) for node, kind in enumerate(skeleton.kind_of)
        ]
        cuts: dict[tuple[int, int], IntArray] = {}
        self._cuts = []
        for rows, kind in zip(self._rows, skeleton.kind_of, strict=True):
            if (kind, id(rows)) not in cuts:
                cuts[kind, id(rows)] = prices.cuts(kind, rows, self._axis_sizes)
            self._cuts.append(cuts[kind, id(rows)])
        self._local: dict[tuple[object, ...], IntArray] = {}
        self._codes: dict[tuple[int, DimFactors], IntArray] = {}
        self._costs = ReshardCosts(mesh)
        self._masks: dict[tuple[int, frozenset[int]], IntArray] = {}
        self._sums = _Sums(self._rows)
        self._tables: dict[tuple[int, int, int, bool], _Priced] = {}

    def price(self) -> ShardingProblem:
        """The sharding problem on the mesh."""
        compute, exposed = self._node_seconds()
        transfers = [*self._transfers(exposed), *self._casts()]
        least = sum(float(seconds.min()) for seconds in compute if len(seconds))
        return ShardingProblem(
            mesh=self._mesh,
            node_graph=self._nodes,
            strategies=tuple(self._rows),
            copies=self._skeleton.copies,
            compute=tuple(compute),
            exposed=tuple(exposed),
            transfers=tuple(transfers),
            memory=tuple(self._memory()),
            loop_of=self._skeleton.loop_of,
            feeding=feeding(self._nodes, self.shapes, self._mesh.slice.chip, least),
        )

    # -- compute -------------------------------------------------------------------------------

    def _node_seconds(self) -> tuple[list[FloatArray], list[FloatArray]]:
        """Seconds of kernels, and of what nodes communicate by themselves, by node."""
        sums = self._sums
        compute = [sums.zero(node) for node in range(len(self._rows))]
        exposed = list(compute)
        known: dict[tuple[int, int, float], FloatArray] = {}
        for run in self._skeleton.kernel_runs:
            key = (id(self._rows[run.node]), run.what, run.trips)
            if key not in known:
                known[key] = run.trips * self._kernel(run.node, run.what)
            compute[run.node] = sums.add(compute[run.node], known[key])
        known.clear()
        for run in self._skeleton.exchange_runs:
            key = (id(self._rows[run.node]), run.what, run.trips)
            if key not in known:
                known[key] = run.trips * self._exchange(run.node, run.what)
            exposed[run.node] = sums.add(exposed[run.node], known[key])
        for op, array, step in manual_collectives(self._graph, self._mesh):
            at = self._nodes.node_of_op[op.id]
            _, seconds = compiled_step(step, array.nbytes, self._mesh)
            exposed[at] = exposed[at] + op.trips * seconds
        return compute, exposed

    def _kernel(self, node: int, what: int) -> FloatArray:
        seconds = self._prices.kernel_seconds(what, self._skeleton.kind_of[node])
        return seconds[self._cuts[node]]

    def _casts(self) -> Iterator[Transfer]:
        """What products take longer for operands that they cast, where those are not moved first.

        Where a value is moved once for several readers, a copy that is not moved costs each reader
        the least that any of its strategies takes with the copy's sharding.
        """
        copies = {copy.value: copy for copy in self._skeleton.copies}
        known: dict[tuple[object, ...], FloatArray] = {}
        for run in self._skeleton.cast_runs:
            operand = run.operand
            producer = self._nodes.producers[operand.value]
            copy = copies.get(operand.value)
            target = copy.node if copy else run.node
            key = (
                run.what, producer.dims, operand.dims, run.trips, copy is None,
                *(id(self._rows[node]) for node in (producer.node, target, run.node)),
            )  # fmt: skip
            if key not in known:
                at = self._code(run.node, operand.dims)
                seconds = self._prices.cast_seconds(run.what, self._skeleton.kind_of[run.node])
                seconds = seconds[self._cuts[run.node]]
                if copy:
                    asked = self._code(target, tuple((d,) for d in range(len(operand.dims))))
                    at, seconds = asked, _least(seconds, at, asked)
                unmoved = self._code(producer.node, producer.dims)[:, None] == at[None, :]
                known[key] = run.trips * np.where(unmoved, seconds[None, :], 0.0)
            table = known[key]
            nothing = known.setdefault(("none", table.shape), np.zeros(table.shape))
            yield Transfer(producer.node, target, None, nothing, run.loop, table)

    def _exchange(self, node: int, what: int) -> FloatArray:
        op = self._graph.ops[self._skeleton.exchanges[what]]
        local = _LocalDims(self, node)
        return halo_seconds(op, self._graph, self._rows[node], local, self._mesh)

    @property
    def nodes(self) -> NodeGraph:
        """The program's nodes."""
        return self._nodes

    def shapes(self, node: int, shape: tuple[int, ...], dims: DimFactors) -> IntArray:
        """Local shapes of a value under the strategies of a node."""
        key = (id(self._rows[node]), shape, dims)
        if key not in self._local:
            self._local[key] = local_dims(self._rows[node], shape, dims, self._axis_sizes)
        return self._local[key]

    # -- communication -------------------------------------------------------------------------

    def _transfers(self, exposed: list[FloatArray]) -> Iterator[Transfer]:
        """What runs between nodes; what runs within one is added to its exposed seconds."""
        self._costs.ask(self._changes(), (r.nbytes for r in self._skeleton.reshards))
        for link in self._skeleton.links:
            within = link.a == link.b
            key = (link.what, id(self._rows[link.a]), id(self._rows[link.b]), within)
            if key not in self._tables:
                reshard = self._skeleton.reshards[link.what]
                self._tables[key] = self._reshard(reshard, link.a, link.b)
            priced = self._tables[key]
            if within:
                exposed[link.a] = self._sums.add(exposed[link.a], priced.exposed)
            elif priced.costs:
                loop = -1 if priced.gathers is None else self._skeleton.reshards[link.what].loop
                yield Transfer(link.a, link.b, priced.gathers, priced.exposed, loop)

    def _changes(self) -> Iterator[tuple[tuple[int, ...], IntArray, IntArray]]:
        """Every change of sharding that is priced: a shape, and codes before and after."""
        seen = set()
        for link in self._skeleton.links:
            reshard = self._skeleton.reshards[link.what]
            rows = id(self._rows[link.a]), id(self._rows[link.b])
            key = (reshard.shape, reshard.before, reshard.after, rows)
            if key not in seen:
                seen.add(key)
                before = self._code(link.a, reshard.before)
                yield reshard.shape, before, self._code(link.b, reshard.after)

    def _reshard(self, reshard: Reshard, a: int, b: int) -> _Priced:
        gathers, exposed = self._table(reshard, a, b)
        trips = self._trips(reshard, b)
        if a == b:
            # Within one node both sides are the same strategy.
            return _Priced(None, trips * np.diagonal(gathers + exposed), True)
        hides = reshard.hides and bool(gathers.any())
        if not hides:
            exposed = exposed + gathers
        ahead = trips * gathers if hides else None
        return _Priced(ahead, trips * exposed, hides or bool(exposed.any()))

    def _trips(self, reshard: Reshard, b: int) -> FloatArray:
        """How often a reshard runs, by strategy of its target."""
        wanted = self._code(b, reshard.after)
        # A node that reads a value in two ways may need one sharding for both.
        again = np.zeros(len(wanted), dtype=bool)
        for other in reshard.earlier:
            again |= self._code(b, other) == wanted
        trips: FloatArray = reshard.trips * ~again
        return trips

    def _code(self, node: int, dims: DimFactors) -> IntArray:
        key = (id(self._rows[node]), dims)
        if key not in self._codes:
            self._codes[key] = codes(self._rows[node], dims)
        return self._codes[key]

    def _table(self, reshard: Reshard, a: int, b: int) -> tuple[FloatArray, FloatArray]:
        shape, nbytes = reshard.shape, reshard.nbytes
        before, after = self._code(a, reshard.before), self._code(b, reshard.after)
        gathers, others = self._costs.seconds(shape, nbytes, before, after)
        if reshard.partial:
            masks = self._partial_masks(a, reshard.partial)
            extra = self._costs.partial_seconds(shape, nbytes, masks, before, after)
            others += extra / reshard.added_up
        return gathers, others

    def _partial_masks(self, node: int, partial: frozenset[int]) -> IntArray:
        key = (id(self._rows[node]), partial)
        if key not in self._masks:
            self._masks[key] = partial_masks(self._rows[node], partial)
        return self._masks[key]

    # -- memory --------------------------------------------------------------------------------

    def _memory(self) -> list[MemoryTerm]:
        known: dict[tuple[int, int], IntArray] = {}
        terms = []
        for hold in self._skeleton.holds:
            key = (id(self._cuts[hold.node]), hold.what)
            if key not in known:
                known[key] = self._usage(hold.what, hold.node)
            if known[key].any():
                terms.append(MemoryTerm(hold.node, hold.start, hold.end, known[key]))
        return terms

    def _usage(self, what: int, node: int) -> IntArray:
        nbytes = self._prices.held_bytes(what, self._skeleton.kind_of[node])
        usage: IntArray = nbytes[self._cuts[node]]
        return usage - usage.min() if self._skeleton.held[what].above_least else usage


def _least(seconds: FloatArray, codes: IntArray, asked: IntArray) -> FloatArray:
    """The least seconds of those with each code that is asked for; 0 where there are none."""
    least = {
        code: float(seconds[codes == code].min()) for code in np.intersect1d(codes, asked).tolist()
    }
    return np.array([least.get(code, 0.0) for code in asked.tolist()])


@dataclass(frozen=True)
class _Priced:
    """A reshard's seconds, by strategy of its node or nodes; whether it ever costs anything."""

    gathers: FloatArray | None
    exposed: FloatArray
    costs: bool


class _LocalDims:
    """Local shapes of operands and results of operations like those of a node."""

    def __init__(self, pricer: MeshPricer, node: int) -> None:
        self._pricer = pricer
        self._node = node

    def __call__(self, op_id: int, position: int) -> IntArray:
        value, dims = op_dims(self._pricer.nodes, op_id, position)
        shape = self._pricer.nodes.graph.values[value].shape
        return self._pricer.shapes(self._node, shape, dims)


class _Sums:
    """Sums of shared arrays, shared again where the same ones are added."""

    def __init__(self, rows: Sequence[IntArray]) -> None:
        self._rows = rows
        self._zeros: dict[int, FloatArray] = {}
        self._sums: dict[tuple[int, int], tuple[FloatArray, FloatArray, FloatArray]] = {}

    def zero(self, node: int) -> FloatArray:
        """Zeros for every strategy of a node."""
        rows = self._rows[node]
        if id(rows) not in self._zeros:
            self._zeros[id(rows)] = np.zeros(len(rows))
        return self._zeros[id(rows)]

    def add(self, a: FloatArray, b: FloatArray) -> FloatArray:
        """a + b; the operands are kept, so that what an id stands for stays."""
        key = (id(a), id(b))
        if key not in self._sums:
            self._sums[key] = (a, b, a + b)
        return self._sums[key][2]
