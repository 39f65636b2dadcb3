"""What of the sharding problem no mesh changes: which nodes choose alike, what runs between them.

A mesh then only prices the different kinds of nodes, kernels, reshards and buffers; a program of
ninety equal layers has no more of them than one of three.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from shardwright.planner.fusion import Fusion, FusionPlan
from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.liveness import Lifetime
from shardwright.planner.mlir import PREFETCHABLE
from shardwright.planner.narrowing import Narrowing
from shardwright.planner.nodes import GROUP, OPERATION, NodeGraph, Port, Use, is_trivial
from shardwright.planner.operand_casts import CastRun, find_casts
from shardwright.planner.partial_sums import sums_of_products
from shardwright.planner.rules import DimFactors

_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True)
class Copy:
    """A value resharded once for several readers; its node comes after the program's nodes."""

    node: int
    value: int
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Kind:
    """What the strategies of a node follow from.

    Attributes:
      sizes, shardable, exact: as of a `Node`.
      split_dims: dimensions made of several factors, major to minor.
      convolutions: an operation like each convolution in it, with its rule's factors as factors
        of the node.
    """

    sizes: tuple[int, ...]
    shardable: frozenset[int]
    exact: bool
    split_dims: frozenset[tuple[int, ...]]
    convolutions: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Reshard:
    """A change of sharding between two nodes, or within one, as far as no mesh changes it.

    Attributes:
      shape, nbytes: of the whole tensor.
      before, after: the factors of the two nodes on each dimension.
      partial: factors of the first node that leave the tensor as partial sums.
      added_up: in how many products the sum is that it is reduced as a part of.
      trips: runs in one execution.
      earlier: other ways in which the second node reads the tensor; where one needs the same
        sharding, nothing more is to be done.
      hides: its all-gathers can run ahead of their use and hide behind compute.
      loop: the loop behind whose compute they hide, or -1.
    """

    shape: tuple[int, ...]
    nbytes: float
    before: DimFactors
    after: DimFactors
    partial: frozenset[int]
    added_up: int
    trips: float
    earlier: tuple[DimFactors, ...]
    hides: bool
    loop: int


@dataclass(frozen=True)
class Held:
    """The local bytes of a tensor, as far as no mesh changes them.

    Attributes:
      above_least: count only what is above the least that any strategy holds.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: DimFactors
    above_least: bool


@dataclass(frozen=True)
class Link:
    """A reshard from node `a` to node `b`; `what` numbers the skeleton's reshards."""

    a: int
    b: int
    what: int


@dataclass(frozen=True)
class Hold:
    """Memory of a node in the program points [start, end); `what` numbers the skeleton's `held`."""

    node: int
    start: int
    end: int
    what: int


@dataclass(frozen=True)
class Run:
    """A kernel or neighbour exchange of a node; `what` numbers the skeleton's examples."""

    node: int
    what: int
    trips: float


@dataclass(frozen=True)
class Skeleton:
    """A sharding problem without its mesh.

    Attributes:
      nodes: the program's nodes.
      kinds: the different kinds of nodes.
      kind_of: kind of every node, copies after the program's.
      loop_of: for every node the loop in which its operations run, or -1.
      copies: values that are resharded once for several readers.
      kernels: a kernel of each kind, in `kernel_runs` by number; alike ones take equally long.
      casts: a product of each kind that may cast an operand, and that operand's position.
      exchanges: an operation of each kind that exchanges with neighbours, and its runs.
      reshards: the different changes of sharding, in `links` by number.
      held: the different buffers, in `holds` by number.
    """

    nodes: NodeGraph = field(repr=False)
    kinds: tuple[Kind, ...] = field(repr=False)
    kind_of: tuple[int, ...] = field(repr=False)
    loop_of: tuple[int, ...] = field(repr=False)
    copies: tuple[Copy, ...] = field(repr=False)
    kernels: tuple[Fusion, ...] = field(repr=False)
    kernel_runs: tuple[Run, ...] = field(repr=False)
    casts: tuple[tuple[Fusion, int], ...] = field(repr=False)
    cast_runs: tuple[CastRun, ...] = field(repr=False)
    exchanges: tuple[int, ...] = field(repr=False)
    exchange_runs: tuple[Run, ...] = field(repr=False)
    reshards: tuple[Reshard, ...] = field(repr=False)
    links: tuple[Link, ...] = field(repr=False)
    held: tuple[Held, ...] = field(repr=False)
    holds: tuple[Hold, ...] = field(repr=False)


def build_skeleton(nodes: NodeGraph, fusions: FusionPlan, buffers: Sequence[Lifetime]) -> Skeleton:
    """Collects what no mesh changes of a program's sharding problem."""
    return _Builder(nodes, fusions).build(buffers)


def node_kinds(nodes: NodeGraph) -> tuple[list[Kind], list[int]]:
    """The different kinds of a program's nodes, and the kind of each node."""
    split: dict[int, set[tuple[int, ...]]] = {}
    ports = [*nodes.producers.values(), *(u.port for uses in nodes.uses.values() for u in uses)]
    for port in ports:
        for dim in port.dims:
            if len(dim) > 1:
                split.setdefault(port.node, set()).add(dim)
    numbers: _Numbers[object] = _Numbers()
    kinds: list[Kind] = []
    kind_of = []
    signatures = _OpSignatures(nodes)
    for node in nodes.nodes:
        slides = [
            (op, factors)
            for op, factors in node.ops.items()
            if nodes.graph.ops[op].name == "stablehlo.convolution"
        ]
        dims = frozenset(split.get(node.id, ()))
        alike = tuple((signatures(op), factors) for op, factors in slides)
        number = numbers((node.sizes, node.shardable, node.exact, dims, alike))
        if number == len(kinds):
            kinds.append(Kind(node.sizes, node.shardable, node.exact, dims, tuple(slides)))
        kind_of.append(number)
    return kinds, kind_of


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


class _Numbers(dict[_K, int]):
    """Numbers different things in the order in which they come."""

    def __call__(self, key: _K) -> int:
        return self.setdefault(key, len(self))


class _OpSignatures:
    """A number for each operation; those with equal numbers cost the same in equal nodes."""

    def __init__(self, nodes: NodeGraph) -> None:
        self._nodes = nodes
        self._graph = nodes.graph
        self._free = [value.free for value in self._graph.values]
        self._numbers: _Numbers[tuple[object, ...]] = _Numbers()
        self._known: dict[int, int] = {}

    def __call__(self, op_id: int) -> int:
        if op_id not in self._known:
            self._known[op_id] = self._numbers(self._signature(self._graph.ops[op_id]))
        return self._known[op_id]

    def _signature(self, op: Op) -> tuple[object, ...]:
        node, free = self._nodes.node_of_op[op.id], self._free
        return (
            op.form,
            op.manual,
            tuple([free[v] for v in op.operands]),
            tuple([free[v] for v in op.results]),
            self._nodes.nodes[node].ops.get(op.id) if node >= 0 else None,
        )


class _Builder:
    def __init__(self, nodes: NodeGraph, fusions: FusionPlan) -> None:
        self._nodes = nodes
        self._graph = nodes.graph
        self._fusions = fusions
        self._kinds, self._kind_of = node_kinds(nodes)
        self._copies: list[Copy] = []
        self._copy_kinds: _Numbers[Kind] = _Numbers()
        self._links: list[Link] = []
        self._reshards: _Numbers[Reshard] = _Numbers()
        self._held: _Numbers[Held] = _Numbers()
        self._loop_of = [-1] * len(nodes.nodes)
        self._signature = _OpSignatures(nodes)
        self._prefetch = prefetchable_values(self._graph)
        self._arguments = frozenset(self._graph.arguments)
        self._narrowing = Narrowing(self._graph)
        self._sums = sums_of_products(self._graph)
        self._carry_trips = {
            carry.argument: self._graph.value_trips(carry.argument)
            for loop in self._graph.loops
            for carry in loop.carries
        }
        self._carry_loop = {
            carry.argument: loop.id for loop in self._graph.loops for carry in loop.carries
        }

    def build(self, buffers: Sequence[Lifetime]) -> Skeleton:
        for node in self._nodes.nodes:
            for op in node.ops:
                self._loop_of[node.id] = self._graph.ops[op].loop
                break
        kernels, kernel_runs = self._find_kernels()
        casts, cast_runs = find_casts(self._nodes, self._fusions, [run.what for run in kernel_runs])
        exchanges, exchange_runs = self._find_exchanges()
        for value, producer in self._nodes.producers.items():
            self._connect(value, producer)
        holds = self._find_holds(buffers)
        return Skeleton(
            nodes=self._nodes,
            kinds=(*self._kinds, *self._copy_kinds),
            kind_of=tuple(self._kind_of),
            loop_of=tuple(self._loop_of),
            copies=tuple(self._copies),
            kernels=tuple(kernels),
            kernel_runs=tuple(kernel_runs),
            casts=tuple(casts),
            cast_runs=tuple(cast_runs),
            exchanges=tuple(exchanges),
            exchange_runs=tuple(exchange_runs),
            reshards=tuple(self._reshards),
            links=tuple(self._links),
            held=tuple(self._held),
            holds=tuple(holds),
        )

    # -- compute -------------------------------------------------------------------------------

    def _find_kernels(self) -> tuple[list[Fusion], list[Run]]:
        numbers: _Numbers[tuple[object, ...]] = _Numbers()
        kernels: list[Fusion] = []
        runs = []
        for fusion in self._fusions.fusions:
            first = self._graph.ops[fusion.ops[0]]
            node = self._nodes.node_of_op[first.id]
            number = numbers((self._kind_of[node], *self._kernel_signature(fusion)))
            if number == len(kernels):
                kernels.append(fusion)
            runs.append(Run(node, number, first.trips))
        return kernels, runs

    def _kernel_signature(self, fusion: Fusion) -> tuple[object, ...]:
        values = self._graph.values
        writes = []
        for value in fusion.writes:
            producer = self._graph.ops[values[value].producer]
            writes.append((self._signature(producer.id), producer.results.index(value)))
        return (
            tuple(map(self._signature, fusion.ops)),
            tuple((self._signature(read.op), read.operand) for read in fusion.reads),
            tuple(writes),
        )

    def _find_exchanges(self) -> tuple[list[int], list[Run]]:
        numbers: _Numbers[tuple[object, ...]] = _Numbers()
        examples: list[int] = []
        runs = []
        for node in self._nodes.nodes:
            if node.kind != OPERATION:
                continue
            for op_id in node.ops:
                op = self._graph.ops[op_id]
                if op.rule is None or not op.rule.permutation:
                    continue
                number = numbers((self._kind_of[node.id], self._signature(op_id)))
                if number == len(examples):
                    examples.append(op_id)
                runs.append(Run(node.id, number, op.trips))
        return examples, runs

    # -- communication -------------------------------------------------------------------------

    def _connect(self, value: int, producer: Port) -> None:
        uses = self._distinct_uses(value)
        if is_trivial(self._graph.values[value]) or not uses:
            self._finish_partial(value, producer)
            return
        others = {use.port.node for use in uses} - {producer.node}
        # Partial sums are added up once, whoever reads them.
        if len(others) < 2 and not (producer.partial and len(uses) > 1):
            self._links_to(value, producer, uses)
            return
        copy = self._add_copy(value, tuple(uses))
        port = Port(copy, value, tuple((d,) for d in range(len(self._graph.values[value].shape))))
        # A branch may read it less often, but it is made where the value is.
        self._link(value, producer, port, self._trips(value), (), self._loop_of_value(value))
        self._links_to(value, port, uses)

    def _links_to(self, value: int, source: Port, uses: Sequence[Use]) -> None:
        demanded: dict[int, list[DimFactors]] = {}
        for use in uses:
            earlier = demanded.setdefault(use.port.node, [])
            loop = self._graph.ops[use.time].loop if use.time < len(self._graph.ops) else -1
            self._link(value, source, use.port, use.trips, tuple(earlier), loop)
            earlier.append(use.port.dims)

    def _distinct_uses(self, value: int) -> list[Use]:
        found: dict[tuple[int, DimFactors], Use] = {}
        for use in self._nodes.uses.get(value, ()):
            found.setdefault((use.port.node, use.port.dims), use)
        return list(found.values())

    def _add_copy(self, value: int, uses: tuple[Use, ...]) -> int:
        shape = self._graph.values[value].shape
        large = frozenset(d for d, size in enumerate(shape) if size > 1)
        node = len(self._kind_of)
        kind = self._copy_kinds(Kind(shape, large, False, frozenset()))
        self._kind_of.append(len(self._kinds) + kind)
        self._loop_of.append(-1)
        self._copies.append(Copy(node, value, uses))
        return node

    def _link(
        self,
        value: int,
        source: Port,
        target: Port,
        trips: float,
        earlier: tuple[DimFactors, ...],
        loop: int,
    ) -> None:
        tensor = self._graph.values[value]
        added_up = self._sums.get(value, (value, 1))[1] if source.partial else 1
        ahead = value in self._prefetch
        # Outside of loops, a program that has loops computes little: nothing runs beside a gather
        # of what a loop or the head reads.
        hides = ahead and (loop >= 0 or not self._graph.loops)
        dtype = self._narrowing.gathered_dtype(value) if ahead else None
        reshard = Reshard(
            tensor.shape,
            replace(tensor, dtype=dtype or tensor.dtype).nbytes,
            source.dims,
            target.dims,
            source.partial,
            added_up,
            trips,
            earlier,
            hides,
            loop if hides else -1,
        )
        self._links.append(Link(source.node, target.node, self._reshards(reshard)))

    def _finish_partial(self, value: int, producer: Port) -> None:
        """What nobody reads sharded, but is left as partial sums, is added up where it is made."""
        if producer.partial:
            self._link(value, producer, producer, self._trips(value), (), -1)

    def _trips(self, value: int) -> float:
        producer = self._graph.values[value].producer
        if producer >= 0:
            return self._graph.ops[producer].trips
        return self._carry_trips.get(value, 1.0)

    def _loop_of_value(self, value: int) -> int:
        producer = self._graph.values[value].producer
        if producer >= 0:
            return self._graph.ops[producer].loop
        return self._carry_loop.get(value, -1)

    # -- memory --------------------------------------------------------------------------------

    def _find_holds(self, buffers: Sequence[Lifetime]) -> list[Hold]:
        holds = []
        for buffer in buffers:
            port = self._nodes.producers.get(buffer.value)
            if port is not None:
                what = self._hold(buffer.value, port.dims, above_least=False, dtype=buffer.dtype)
                holds.append(Hold(port.node, buffer.start, buffer.end, what))
        # Stacks that are cast before the loop are counted as what they are cast to.
        cast = {buffer.value for buffer in buffers if buffer.dtype is not None}
        carries = [carry for loop in self._graph.loops for carry in loop.carries]
        cast_inits = {carry.init for carry in carries if carry.argument in cast}
        shared = set()
        for copy in self._copies:
            shared.add(copy.value)
            if copy.value in cast_inits:
                continue
            holds += self._copy_holds(copy)
        for loop in self._graph.loops:
            for carry in loop.carries:
                port = self._nodes.producers.get(carry.argument)
                if carry.invariant and port is not None and carry.init not in cast_inits:
                    # It shares the buffer of its initial value unless it is gathered before.
                    what = self._hold(carry.argument, port.dims, above_least=True)
                    holds.append(Hold(port.node, loop.first_op - 1, loop.last_op, what))
        for value, uses in self._nodes.uses.items():
            if value in shared:
                continue
            for use in uses:
                if self._nodes.nodes[use.port.node].kind == OPERATION:
                    what = self._hold(value, use.port.dims, above_least=True)
                    holds.append(Hold(use.port.node, use.time, use.time + 1, what))
        return holds

    def _copy_holds(self, copy: Copy) -> list[Hold]:
        """Bytes beyond what the value takes anyway: only a gathered copy has its own buffer.

        What runs ahead and costs no time to gather may be gathered again by an operation that reads
        the copy: there it is held as the operation reads it, and as the copy in between.
        """
        dims = tuple((d,) for d in range(len(self._graph.values[copy.value].shape)))
        what = self._hold(copy.value, dims, above_least=True)
        uses = [u for u in copy.uses if not self._as_given(copy.value, u)] or list(copy.uses)
        first, last = min(u.time for u in uses), max(u.time for u in uses)
        if copy.value not in self._prefetch:
            return [Hold(copy.node, first, last + 1, what)]
        reads = [u for u in uses if self._nodes.nodes[u.port.node].kind == OPERATION]
        edges = sorted({first, last + 1, *(t for u in reads for t in (u.time, u.time + 1))})
        read_at = {u.time for u in reads}
        return [
            *(
                Hold(copy.node, start, end, what)
                for start, end in pairwise(edges)
                if start not in read_at
            ),
            *(
                Hold(
                    u.port.node,
                    u.time,
                    u.time + 1,
                    self._hold(copy.value, u.port.dims, above_least=True),
                )
                for u in reads
            ),
        ]

    def _as_given(self, value: int, use: Use) -> bool:
        """Whether elementwise work reads an argument: as it is sharded, not gathered."""
        elementwise = self._nodes.nodes[use.port.node].kind == GROUP
        return elementwise and value in self._arguments

    def _hold(
        self, value: int, dims: DimFactors, *, above_least: bool, dtype: str | None = None
    ) -> int:
        tensor = self._graph.values[value]
        return self._held(Held(tensor.shape, dtype or tensor.dtype, dims, above_least))
