"""Prices every strategy and reshard of a program on one mesh.

What is alike in the program (see `skeleton`) is priced once and shares its arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.cast_tables import CastTables, casts_of
from shardwright.planner.collectives import compiled_step
from shardwright.planner.feeding import feeding
from shardwright.planner.fusion import FusionPlan
from shardwright.planner.halo import halo_seconds
from shardwright.planner.liveness import Lifetime
from shardwright.planner.local_prices import LocalPrices, op_dims
from shardwright.planner.manual import manual_collectives
from shardwright.planner.nodes import NodeGraph
from shardwright.planner.problem import Fixed, FloatArray, ShardingProblem, Transfer
from shardwright.planner.reshard_tables import ReshardTables
from shardwright.planner.rules import DimFactors
from shardwright.planner.skeleton import Kind, Skeleton, build_skeleton, node_kinds
from shardwright.planner.solver import MemoryTerm
from shardwright.planner.strategies import (
    Allowed,
    IntArray,
    assignments,
    local_dims,
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
    strategies = Strategies(nodes, kinds, tuple(axis_sizes), fixed)
    return [strategies(node, kind) for node, kind in enumerate(kind_of)]


class Strategies:
    """The strategies of nodes; nodes of one kind share them."""

    def __init__(
        self,
        nodes: NodeGraph,
        kinds: Sequence[Kind],
        axis_sizes: tuple[int, ...],
        fixed: Fixed,
    ) -> None:
        self._graph = nodes.graph
        self._axis_sizes = axis_sizes
        self._fixed = fixed
        self._kinds = kinds
        self._known: dict[tuple[int, Allowed], IntArray] = {}

    def __call__(self, node: int, kind: int) -> IntArray:
        """The strategies of a node of a kind, by number."""
        given = self._fixed.get(node, ())
        if (kind, given) not in self._known:
            self._known[kind, given] = self._find(self._kinds[kind], given)
        return self._known[kind, given]

    def _find(self, kind: Kind, given: Allowed) -> IntArray:
        rows = assignments(
            kind.sizes, kind.shardable, kind.exact, kind.split_dims, self._axis_sizes, given
        )
        right = np.ones(len(rows), dtype=bool)
        for op, factors in kind.convolutions:
            right &= sound(self._graph.ops[op], factors, rows, self._axis_sizes)
        return rows if right.all() else rows[right]


def exchange_seconds(
    skeleton: Skeleton, what: int, rows: IntArray, mesh: LogicalMesh
) -> FloatArray:
    """Seconds that an operation exchanges borders with its neighbours, by strategy of its node."""
    nodes = skeleton.nodes
    axis_sizes = tuple(mesh.shape.values())

    def local(op_id: int, position: int) -> IntArray:
        value, dims = op_dims(nodes, op_id, position)
        return local_dims(rows, nodes.graph.values[value].shape, dims, axis_sizes)

    op = nodes.graph.ops[skeleton.exchanges[what]]
    return halo_seconds(op, nodes.graph, rows, local, mesh)


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
        strategies = Strategies(self._nodes, skeleton.kinds, self._axis_sizes, fixed)
        self._rows = [strategies(node, kind) for node, kind in enumerate(skeleton.kind_of)]
        self._cuts = [
            prices.cuts(kind, rows, self._axis_sizes)
            for rows, kind in zip(self._rows, skeleton.kind_of, strict=True)
        ]
        self._local: dict[tuple[object, ...], IntArray] = {}
        self._tables = ReshardTables(skeleton.reshards, mesh)
        self._sums = _Sums(self._rows)

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
                known[key] = run.trips * exchange_seconds(
                    self._skeleton, run.what, self._rows[run.node], self._mesh
                )
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
        """What products take longer for operands that they cast."""
        rows = self._rows
        price = CastTables(self._prices, self._tables)
        nothing: dict[tuple[int, ...], FloatArray] = {}
        for cast in casts_of(self._skeleton):
            product = cast.run.node
            of = rows[cast.a], rows[cast.b], rows[product]
            table = price(cast, *of, self._cuts[product])
            none = nothing.setdefault(table.shape, np.zeros(table.shape))
            yield Transfer(cast.a, cast.b, None, none, cast.run.loop, table)

    def shapes(self, node: int, shape: tuple[int, ...], dims: DimFactors) -> IntArray:
        """Local shapes of a value under the strategies of a node."""
        key = (id(self._rows[node]), shape, dims)
        if key not in self._local:
            self._local[key] = local_dims(self._rows[node], shape, dims, self._axis_sizes)
        return self._local[key]

    # -- communication -------------------------------------------------------------------------

    def _transfers(self, exposed: list[FloatArray]) -> Iterator[Transfer]:
        """What runs between nodes; what runs within one is added to its exposed seconds."""
        rows, links = self._rows, self._skeleton.links
        self._tables.ask((link.what, rows[link.a], rows[link.b]) for link in links)
        for link in links:
            within = link.a == link.b
            priced = self._tables.price(link.what, rows[link.a], rows[link.b], within=within)
            if within:
                exposed[link.a] = self._sums.add(exposed[link.a], priced.exposed)
            elif priced.costs:
                loop = -1 if priced.gathers is None else self._skeleton.reshards[link.what].loop
                yield Transfer(link.a, link.b, priced.gathers, priced.exposed, loop)

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
