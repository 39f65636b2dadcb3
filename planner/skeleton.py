"""What of the sharding problem no mesh changes: which nodes choose alike, what runs between them.

A mesh then only prices the different kinds of nodes, kernels, reshards and buffers; a program of
ninety equal layers has no more of them than one of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwright.planner.fusion import Fusion, FusionPlan
from shardwright.planner.graph import Op
from shardwright.planner.holds import (
    Copy,
    Held,
    Hold,
    Numbers,
    copy_port,
    distinct_uses,
    find_holds,
    prefetchable_values,
)
from shardwright.planner.liveness import Lifetime
from shardwright.planner.narrowing import Narrowing
from shardwright.planner.nodes import OPERATION, NodeGraph, Port, Use, is_trivial
from shardwright.planner.operand_casts import CastRun, find_casts
from shardwright.planner.partial_sums import sums_of_products
from shardwright.planner.rules import DimFactors


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
class Link:
    """A reshard from node `a` to node `b`; `what` numbers the skeleton's reshards."""

    a: int
    b: int
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
    numbers: Numbers[object] = Numbers()
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


class _OpSignatures:
    """A number for each operation; those with equal numbers cost the same in equal nodes."""

    def __init__(self, nodes: NodeGraph) -> None:
        self._nodes = nodes
        self._graph = nodes.graph
        self._free = [value.free for value in self._graph.values]
        self._numbers: Numbers[tuple[object, ...]] = Numbers()
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
        self._copy_kinds: Numbers[Kind] = Numbers()
        self._links: list[Link] = []
        self._reshards: Numbers[Reshard] = Numbers()
        self._loop_of = [-1] * len(nodes.nodes)
        self._signature = _OpSignatures(nodes)
        self._prefetch = prefetchable_values(self._graph)
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
        held, holds = find_holds(self._nodes, self._copies, buffers, self._prefetch)
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
            held=held,
            holds=holds,
        )

    # -- compute -------------------------------------------------------------------------------

    def _find_kernels(self) -> tuple[list[Fusion], list[Run]]:
        numbers: Numbers[tuple[object, ...]] = Numbers()
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
        numbers: Numbers[tuple[object, ...]] = Numbers()
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
        uses = distinct_uses(self._nodes, value)
        if is_trivial(self._graph.values[value]) or not uses:
            self._finish_partial(value, producer)
            return
        others = {use.port.node for use in uses} - {producer.node}
        # Partial sums are added up once, whoever reads them.
        if len(others) < 2 and not (producer.partial and len(uses) > 1):
            self._links_to(value, producer, uses)
            return
        copy = self._add_copy(value, tuple(uses))
        port = copy_port(self._graph, copy, value)
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
