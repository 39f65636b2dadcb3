"""Step 3: the sharding problem of a program on one logical mesh.

Every node of the program gets its strategies with their compute seconds; every value that runs
between nodes gets an edge whose table prices the reshard from the produced to the demanded
sharding. Where several nodes demand one value, a copy node stands between: the value is
resharded to the copy once, and each reader reshards from there if it still has to.

What is alike in the program (see `skeleton`) is priced once and shares its arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models.memory import Buffer, PeakMemory, peak_memory
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.collectives import DimAxes, compiled_step
from shardwright.planner.feeding import Feeding, feeding
from shardwright.planner.fusion import FusionPlan
from shardwright.planner.halo import halo_seconds
from shardwright.planner.liveness import Lifetime
from shardwright.planner.local_prices import LocalPrices, op_dims
from shardwright.planner.manual import manual_collectives
from shardwright.planner.nodes import NodeGraph
from shardwright.planner.reshard import ReshardCosts
from shardwright.planner.rules import DimFactors
from shardwright.planner.skeleton import (
    Copy,
    Kind,
    Reshard,
    build_skeleton,
    node_kinds,
)
from shardwright.planner.solver import Edge, MemoryTerm, Problem
from shardwright.planner.strategies import (
    Allowed,
    IntArray,
    assignments,
    codes,
    local_dims,
    partial_masks,
)
from shardwright.planner.unsound import sound

FloatArray = NDArray[np.float64]
Fixed = Mapping[int, Allowed]
"""Node id -> what its strategies may be, where something is given."""


@dataclass(frozen=True)
class Transfer:
    """Seconds to bring a value from one node's sharding to another's, for the whole program.

    Attributes:
      gathers: seconds of all-gathers that can run ahead of their use and hide behind compute.
      exposed: seconds of everything else.
      loop: the loop behind whose compute they hide, or -1 for the program outside loops.
      compute: seconds that kernels of the loop take longer for how the value comes.
    """

    a: int
    b: int
    gathers: FloatArray | None
    exposed: FloatArray
    loop: int = -1
    compute: FloatArray | None = None


@dataclass(frozen=True)
class ShardingProblem:
    """Strategies and costs of a program on one mesh, before they are weighed together.

    Attributes:
      alike: for every node a class of nodes that choose alike (see `repeats`), or None.
      layout_names: logical names whose nodes come last (see `named_layout`).
      feeding: what feeding arguments counts; it hides behind the step and is no part of it.
    """

    mesh: LogicalMesh
    node_graph: NodeGraph = field(repr=False)
    strategies: tuple[IntArray, ...] = field(repr=False)
    copies: tuple[Copy, ...] = field(repr=False)
    compute: tuple[FloatArray, ...] = field(repr=False)
    exposed: tuple[FloatArray, ...] = field(repr=False)
    transfers: tuple[Transfer, ...] = field(repr=False)
    memory: tuple[MemoryTerm, ...] = field(repr=False)
    loop_of: tuple[int, ...] = field(repr=False)
    alike: tuple[int, ...] | None = field(default=None, repr=False)
    layout_names: tuple[str, ...] = ()
    feeding: Feeding = field(default_factory=Feeding, repr=False)

    def weighed(self, hiding: float | Mapping[int, float], memory_limit: float) -> Problem:
        """The integer program for one weight of what hides against what it hides behind.

        In a loop, or outside of all loops, a step takes max(compute, gathers) + exposed seconds.
        For any weights in [0, 1], (1 - weight) * compute + weight * gathers + exposed is a lower
        bound of that, and for the right weights its optimum is the best step (Lagrangian duality).

        Args:
          hiding: the weight, or one for each loop (-1: outside of loops).
          memory_limit: bytes of one device that the program may use.
        """

        def weight(loop: int) -> float:
            return hiding[loop] if isinstance(hiding, Mapping) else hiding

        share = _Shared()
        costs = [
            share.node(compute, exposed, rows, weight(loop))
            for compute, exposed, rows, loop in zip(
                self.compute, self.exposed, self.strategies, self.loop_of, strict=True
            )
        ]
        for node, seconds in self.feeding.seconds.items():
            costs[node] = costs[node] + seconds
        edges = [Edge(t.a, t.b, share.edge(t, weight(t.loop))) for t in self.transfers]
        names = [node.label for node in self.node_graph.nodes]
        names += [f"copy of value {copy.value}" for copy in self.copies]
        names += [f"mesh axes of {name}" for name in self.layout_names]
        return Problem(
            costs=tuple(costs),
            edges=tuple(edges),
            memory=self.memory,
            memory_limit=memory_limit,
            names=tuple(names),
        )

    def exposing(self, share: float) -> ShardingProblem:
        """The same problem where a part of every gather that can hide is exposed after all.

        What a schedule hides depends on where a gather stands; the integer program does not know.
        """
        return replace(
            self,
            transfers=tuple(
                t
                if t.gathers is None
                else replace(
                    t, gathers=(1.0 - share) * t.gathers, exposed=t.exposed + share * t.gathers
                )
                for t in self.transfers
            ),
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
        compute, gathers, exposed = self.seconds_by_loop(choices)
        return sum(compute.values()), sum(gathers.values()), exposed

    def seconds_by_loop(
        self, choices: Sequence[int]
    ) -> tuple[dict[int, float], dict[int, float], float]:
        """Compute and gather seconds by loop (-1: outside of loops), and all exposed seconds."""
        compute: dict[int, float] = {}
        gathers: dict[int, float] = {}
        exposed = 0.0
        for choice, c, e, loop in zip(
            choices, self.compute, self.exposed, self.loop_of, strict=True
        ):
            compute[loop] = compute.get(loop, 0.0) + float(c[choice])
            exposed += float(e[choice])
        for t in self.transfers:
            at = (choices[t.a], choices[t.b])
            exposed += float(t.exposed[at])
            if t.gathers is not None:
                gathers[t.loop] = gathers.get(t.loop, 0.0) + float(t.gathers[at])
            if t.compute is not None:
                compute[t.loop] = compute.get(t.loop, 0.0) + float(t.compute[at])
        return compute, gathers, exposed

    def step_bound(self, bound: float) -> float:
        """What no step takes less than, where nothing costs less than `bound` as `weighed`."""
        return bound - self.feeding.most

    def step_seconds(self, choices: Sequence[int]) -> float:
        """Seconds of a step: gathers hide behind the compute of their loop as far as it lasts."""
        compute, gathers, exposed = self.seconds_by_loop(choices)
        loops = compute.keys() | gathers.keys()
        return exposed + sum(max(compute.get(x, 0.0), gathers.get(x, 0.0)) for x in loops)

    @property
    def loops(self) -> tuple[int, ...]:
        """The loops in which something runs; -1 is the program outside of loops."""
        return tuple(sorted({*self.loop_of, *(t.loop for t in self.transfers)}))


class _Shared:
    """Weighed arrays, made once for all nodes and edges that share what they are made of."""

    def __init__(self) -> None:
        self._made: dict[tuple[int | float, ...], FloatArray] = {}

    def node(
        self, compute: FloatArray, exposed: FloatArray, rows: IntArray, weight: float
    ) -> FloatArray:
        key = (id(compute), id(exposed), id(rows), weight)
        if key not in self._made:
            simplest = _SIMPLER * (rows + 1).sum(axis=1)
            self._made[key] = (1.0 - weight) * compute + exposed + simplest
        return self._made[key]

    def edge(self, transfer: Transfer, weight: float) -> FloatArray:
        gathers, compute = transfer.gathers, transfer.compute
        if gathers is None and compute is None:
            return transfer.exposed
        key = (id(gathers), id(compute), id(transfer.exposed), weight)
        if key not in self._made:
            seconds = transfer.exposed
            if gathers is not None:
                seconds = seconds + weight * gathers
            if compute is not None:
                seconds = seconds + (1.0 - weight) * compute
            self._made[key] = seconds
        return self._made[key]


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
    return _Pricer(prices, mesh, fixed or {}).price()


def note_cuts(prices: LocalPrices, mesh: LogicalMesh, fixed: Fixed) -> None:
    """Notes in how many parts a mesh cuts nodes, so that they are priced with those of others."""
    _Pricer(prices, mesh, fixed)


def node_strategies(nodes: NodeGraph, axis_sizes: Sequence[int], fixed: Fixed) -> list[IntArray]:
    """The strategies of every node."""
    kinds, kind_of = node_kinds(nodes)
    strategies = _Strategies(nodes, tuple(axis_sizes), fixed)
    return [strategies(node, kinds[kind]) for node, kind in enumerate(kind_of)]


_SIMPLER = 1e-10
"""Seconds for each factor number in a strategy: among equals the one that shards least, and
leading dimensions, is taken."""


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


class _Pricer:
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

    def price(self) -> ShardingProblem:
        self._costs = ReshardCosts(self._mesh)
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
        sums = _Sums(self._rows)
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

    def _transfers(self, exposed: list[FloatArray]) -> list[Transfer]:
        """What runs between nodes; what runs within one is added to its exposed seconds."""
        self._costs.ask(self._changes(), (reshard.nbytes for reshard in self._skeleton.reshards))
        found = []
        sums = _Sums(self._rows)
        tables: dict[tuple[int, int, int, bool], _Priced] = {}
        for link in self._skeleton.links:
            within = link.a == link.b
            key = (link.what, id(self._rows[link.a]), id(self._rows[link.b]), within)
            if key not in tables:
                tables[key] = self._price(self._skeleton.reshards[link.what], link.a, link.b)
            priced = tables[key]
            if within:
                exposed[link.a] = sums.add(exposed[link.a], priced.exposed)
            elif priced.costs:
                loop = -1 if priced.gathers is None else self._skeleton.reshards[link.what].loop
                found.append(Transfer(link.a, link.b, priced.gathers, priced.exposed, loop))
        return found

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

    def _price(self, reshard: Reshard, a: int, b: int) -> _Priced:
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
            masks = partial_masks(self._rows[a], reshard.partial)
            extra = self._costs.partial_seconds(shape, nbytes, masks, before, after)
            others += extra / reshard.added_up
        return gathers, others

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

    def __init__(self, pricer: _Pricer, node: int) -> None:
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
