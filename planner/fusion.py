"""Which tensors reach HBM: a model of XLA's fusion.

A chain of elementwise operations reads its inputs once and writes its outputs once. What a
single later fusion reads is computed inside it; what several read is recomputed from its source
where it has only one, and written otherwise. Reductions and matrix multiplications end a fusion,
and a matrix multiplication takes the elementwise work that follows it along. That work can follow
one matrix multiplication only: of several whose results it combines, the last is that one.

A cast to a narrower type is written narrow by the kernel that makes what it casts, rather than
wide and cast by every reader. What is gathered from must be in memory: it is written for the gather
alone, while other readers compute it themselves. A scatter of one element a row into zeros (the
gradient of a label's logit) is a comparison with the index, computed by whatever reads it. All
three were seen in scheduled programs of libtpu 0.0.42.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.planner.given import CONSTRAINT
from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.nodes import BARRIER, GROUP, NodeGraph, is_trivial
from shardwright.planner.offload import host_values
from shardwright.planner.small_products import is_outer, is_row_sum
from shardwright.planner.softmaxes import written_exponentials

_UPDATE_SLICE = "stablehlo.dynamic_update_slice"
IN_PLACE = (_UPDATE_SLICE, "stablehlo.scatter")
"""Operations that write into their first operand's buffer where nothing else needs it."""

VIEWS = ("stablehlo.dynamic_slice", "stablehlo.slice", "stablehlo.reshape", CONSTRAINT)
"""Operations that fuse into whatever reads them, or that are nothing once partitioned."""

_MATRIX = ("stablehlo.dot_general", "stablehlo.convolution")
_REDUCE = "stablehlo.reduce"
_CONVERT = "stablehlo.convert"
_BROADCAST = "stablehlo.broadcast_in_dim"
_GATHER = "stablehlo.gather"
_SCATTER = "stablehlo.scatter"
_TRANSPOSE = "stablehlo.transpose"
_EXPENSIVE = frozenset(
    f"stablehlo.{name}"
    for name in ("exponential", "log", "logistic", "power", "tanh", "sine", "cosine", "sqrt")
) | {"chlo.erf"}
_SAME_BUFFER = ("stablehlo.reshape", CONSTRAINT)
_OPAQUE = "custom_call:"
"""Nothing fuses into a custom call: it reads its operands from HBM."""


@dataclass(frozen=True)
class Read:
    """A fusion reads a tensor from HBM, as operand `operand` of operation `op`."""

    op: int
    operand: int


@dataclass(frozen=True)
class Fusion:
    """Operations that run as one kernel.

    Attributes:
      ops: the operations, in program order.
      reads: tensors that it reads from HBM, each once.
      writes: values that it writes to HBM.
      time: the program point at which it runs: that of its last operation; of a matrix
        multiplication and what follows it, as soon as all that both read has been made.
      from_registers: values among its reads that it takes from the registers of the kernel that
        makes them, as one more result of it.
      by_rows: for that, the kernel has to keep whole rows, as it reduces them more than once.
      beside: a product in whose kernel it runs, so that its traffic can hide behind the matrix
        units; -1 where none is.
      computed_in: how many products compute it each for themselves, so that it costs what they read
        more; 0 where it runs once. It has memory nevertheless: some compilations write it.
      expensive: it computes exponentials or their like, which some generations write instead.
      quotient: what it computes is exponentials in memory over their sums.
      with_others: it is one more result of a kernel before that writes another slice.
      in_reach: what it reads and writes that lives within one pass: made by a kernel of the same
        loop, and neither carried on nor a result. It lies in VMEM where it is small.
    """

    ops: tuple[int, ...]
    reads: tuple[Read, ...]
    writes: tuple[int, ...]
    time: int
    from_registers: frozenset[int] = frozenset()
    by_rows: bool = False
    beside: int = -1
    computed_in: int = 0
    expensive: bool = False
    quotient: bool = False
    with_others: bool = False
    in_reach: frozenset[int] = frozenset()


@dataclass(frozen=True)
class FusionPlan:
    """All kernels of a program and which values have buffers.

    Attributes:
      materialized: value ids that reach HBM.
      fusion_of_op: operation id -> index into fusions.
      made_of: value id without a buffer -> the values that it is a view of or computed from.
    """

    fusions: tuple[Fusion, ...] = field(repr=False)
    materialized: frozenset[int] = field(repr=False)
    fusion_of_op: dict[int, int] = field(repr=False)
    made_of: dict[int, tuple[int, ...]] = field(repr=False)


def plan_fusions(nodes: NodeGraph) -> FusionPlan:
    """Groups the operations of a program into kernels."""
    return _Planner(nodes).plan()


def buffers_read(made_of: Mapping[int, tuple[int, ...]], value: int) -> list[int]:
    """The values with buffers that are read for a value, which may be computed from them, once."""
    seen, pending, found = {value}, [value], []
    while pending:
        one = pending.pop()
        if one not in made_of:
            found.append(one)
        # What is computed of a value in many ways (in a random generator, say) is followed once.
        new = [v for v in made_of.get(one, ()) if v not in seen]
        seen.update(new)
        pending += new
    return found


class _Planner:
    def __init__(self, nodes: NodeGraph) -> None:
        self._nodes = nodes
        self._graph: OpGraph = nodes.graph
        self._readers = self._graph.uses()
        self._leader: dict[int, int] = {}
        self._runs_in: dict[int, frozenset[int]] = {}
        self._materialized: set[int] = set()
        self._transparent: dict[int, tuple[Read, ...]] = {}
        self._followed_by: dict[int, int] = {}
        self._roots: set[int] = set()
        self._exponentials = written_exponentials(self._graph)
        self._origins: dict[int, int] = {}
        self._resolved: dict[tuple[int, int], tuple[Read, ...]] = {}
        kept = set(self._graph.results)
        for loop in self._graph.loops:
            kept.update(v for carry in loop.carries for v in (carry.init, carry.yielded))
        for join in self._graph.joins:
            kept.update(join.yields)
        for op in self._graph.ops:
            if op.name.startswith(_OPAQUE):
                kept.update(map(self._behind_views, op.operands))
        self._kept = kept
        self._on_host = host_values(self._graph)
        self._loop_ends = {loop.first_op - 1: loop.last_op for loop in self._graph.loops}

    def plan(self) -> FusionPlan:
        for op in reversed(self._graph.ops):
            if self._nodes.node_of_op[op.id] >= 0:
                self._place(op)
        members: dict[int, list[int]] = {}
        for op in self._graph.ops:
            if op.id in self._leader:
                members.setdefault(self._leader[op.id], []).append(op.id)
        fusions = [self._fusion(ops) for ops in members.values()]
        of_op = {op: i for i, fusion in enumerate(fusions) for op in fusion.ops}
        made_of = self._made_of()
        for product, root in self._followed_by.items():
            pair = (of_op[product], of_op[root])
            reads = [read for i in pair for read in fusions[i].reads]
            time = max([product, *(self._ready(read, made_of) for read in reads)])
            for i in pair:
                fusions[i] = replace(fusions[i], time=time)
        materialized = frozenset(self._materialized)
        hosts: dict[int, int] = {}
        for number in range(len(fusions)):
            fusions[number] = self._joined(number, fusions, of_op, hosts)
        fusions = self._stacked_together(self._with_products(fusions, of_op))
        return FusionPlan(tuple(fusions), materialized, of_op, made_of)

    def _stacked_together(self, fusions: Sequence[Fusion]) -> list[Fusion]:
        """Kernels told which of them write slices that are computed from what others read too.

        What a loop's body stacks for the backward pass is written by one kernel, in scheduled
        programs of v4 and v5e.
        """
        seen: set[tuple[int, int]] = set()
        found = []
        for fusion in fusions:
            op = self._graph.ops[fusion.ops[-1]]
            if op.name == _UPDATE_SLICE and len(fusion.ops) == 1:
                own = [read for read in fusion.reads if read != Read(op.id, 0)]
                sources = {
                    (op.loop, self._origin(self._graph.ops[read.op].operands[read.operand]))
                    for read in own
                }
                if own and sources <= seen:
                    reads = tuple(read for read in fusion.reads if read not in own)
                    fusion = replace(fusion, reads=reads, with_others=True)
                seen |= sources
            found.append(fusion)
        return found

    def _with_products(self, fusions: list[Fusion], of_op: dict[int, int]) -> list[Fusion]:
        """Kernels told in which products they run; each product takes one."""
        taken = set()
        roots = {root: product for product, root in self._followed_by.items()}
        found = []
        for fusion in fusions:
            begins = self._graph.ops[fusion.ops[0]]
            product = next((roots[op] for op in fusion.ops if op in roots), -1)
            if fusion.from_registers:
                producer = self._graph.values[next(iter(fusion.from_registers))].producer
                host = self._graph.ops[fusions[of_op[producer]].ops[0]]
                product = host.id if host.name in _MATRIX else product
            elif product < 0 and begins.name not in _MATRIX:
                readers = self._product_readers(fusion)
                product = min(readers, default=-1)
                quotient = self._reads_exponentials(fusion)
                if readers and not (quotient and len(self._large_reads(fusion)) > 1):
                    expensive = self._expensive(fusion)
                    fusion = replace(
                        fusion, computed_in=len(readers), expensive=expensive, quotient=quotient
                    )
            if product >= 0 and product not in taken:
                taken.add(product)
                fusion = replace(fusion, beside=product)
            found.append(fusion)
        return found

    def _product_readers(self, fusion: Fusion) -> set[int]:
        """The products that read what an elementwise kernel writes, where nothing else does."""
        ops = self._graph.ops
        last = ops[fusion.ops[-1]]
        if not self._fusible(last) or any(w in self._kept for w in fusion.writes):
            return set()
        pending, found = list(fusion.writes), set()
        while pending:
            for reader in self._readers.get(pending.pop(), ()):
                if reader in fusion.ops:
                    continue
                op = ops[reader] if reader >= 0 else None
                if op is None or op.loop != last.loop:
                    return set()
                if op.name in _MATRIX:
                    found.add(op.id)
                elif op.name in (*VIEWS, _TRANSPOSE, _BROADCAST) and op.id not in self._leader:
                    pending += op.results
                else:
                    return set()
        return found

    def _large_reads(self, fusion: Fusion) -> list[int]:
        """What a kernel reads that is about as large as what it writes."""
        values = self._graph.values
        read = [self._graph.ops[r.op].operands[r.operand] for r in fusion.reads]
        written = max((_elements(values[w].shape) for w in fusion.writes), default=0)
        return [v for v in read if _elements(values[v].shape) * 8 > written]

    def _reads_exponentials(self, fusion: Fusion) -> bool:
        values = self._graph.values
        return any(values[v].producer in self._exponentials for v in self._large_reads(fusion))

    def _expensive(self, fusion: Fusion) -> bool:
        """Whether a kernel computes what not every compiler computes twice."""
        ops, values = self._graph.ops, self._graph.values
        pending, seen = list(fusion.ops), set(fusion.ops)
        while pending:
            op = ops[pending.pop()]
            if op.name in _EXPENSIVE:
                return True
            for operand in op.operands:
                producer = values[operand].producer
                if operand in self._transparent and producer not in seen:
                    seen.add(producer)
                    pending.append(producer)
        return False

    def _joined(
        self, number: int, fusions: Sequence[Fusion], of_op: dict[int, int], hosts: dict[int, int]
    ) -> Fusion:
        """A kernel, made part of the one before that writes what it reads, where it can be."""
        graph, fusion = self._graph, fusions[number]
        first, last = (graph.ops[fusion.ops[end]] for end in (0, -1))
        if first.name in _MATRIX or not (last.name == _REDUCE or self._fusible(last)):
            return fusion
        values = [graph.ops[read.op].operands[read.operand] for read in fusion.reads]
        made = [v for v in values if graph.values[v].producer in of_op]
        if not made:
            return fusion
        value = max(made, key=lambda v: graph.values[v].producer)
        host = of_op[graph.values[value].producer]
        begins = graph.ops[fusions[host].ops[0]]
        product = begins.name in _MATRIX or begins.id in self._roots
        if begins.loop != last.loop or not (product or last.name == _REDUCE):
            return fusion
        by_rows = False
        # Asked one by one, for most kernels need one that rules it out, and some need hundreds.
        for other in self._needed_after(fusion, begins.id, host, of_op):
            if hosts.get(other) != host or last.name != _REDUCE:
                return fusion
            by_rows = True
        hosts[number] = host
        return replace(fusion, from_registers=frozenset({value}), by_rows=by_rows)

    def _needed_after(
        self, fusion: Fusion, begins: int, host: int, of_op: dict[int, int]
    ) -> Iterator[int]:
        """Other kernels after a host begins whose results a kernel needs, the host left out."""
        values, ops = self._graph.values, self._graph.ops
        pending = [v for op in fusion.ops for v in ops[op].operands]
        inside, seen = set(fusion.ops), set(pending)
        while pending:
            producer = values[pending.pop()].producer
            if producer < begins or of_op.get(producer) == host:
                continue
            again = all(v in self._transparent for v in ops[producer].results)
            if producer in of_op and producer not in inside and not again:
                yield of_op[producer]
                continue
            more = [v for v in ops[producer].operands if v not in seen]
            seen.update(more)
            pending += more

    def _ready(self, read: Read, made_of: dict[int, tuple[int, ...]]) -> int:
        """The program point at which a tensor that is read has been made."""
        value = self._graph.ops[read.op].operands[read.operand]
        made = (self._graph.values[v].producer for v in buffers_read(made_of, value))
        return max((self._loop_ends.get(op, op) for op in made), default=-1)

    def _made_of(self) -> dict[int, tuple[int, ...]]:
        ops = self._graph.ops
        found = {
            value: tuple(ops[read.op].operands[read.operand] for read in reads)
            for value, reads in self._transparent.items()
        }
        for op in ops:
            if op.name in VIEWS:
                found[op.results[0]] = op.operands[:1]
            elif op.name == BARRIER:
                found.update(zip(op.results, ((v,) for v in op.operands), strict=True))
        return {value: of for value, of in found.items() if value not in self._materialized}

    def _behind_views(self, value: int) -> int:
        """The value whose buffer a value is where it only has another shape."""
        producer = self._graph.values[value].producer
        if producer < 0 or self._graph.ops[producer].name not in _SAME_BUFFER:
            return value
        return self._behind_views(self._graph.ops[producer].operands[0])

    def _fusible(self, op: Op) -> bool:
        node = self._nodes.node_of_op[op.id]
        return node >= 0 and self._nodes.nodes[node].kind == GROUP and op.name != _REDUCE

    def _may_follow(self, root: Op, op: Op) -> bool:
        """Whether a kernel, told by its last operation, can be the work that follows `op`."""
        return op.name in _MATRIX and root.id in self._leader and root.id not in self._roots

    def _place(self, op: Op) -> None:
        """Decides in which kernel an operation runs; its readers are placed already."""
        results = [r for r in op.results if not self._graph.values[r].free]
        if not results:
            return
        readers = {r for result in results for r in self._readers.get(result, ())}
        runs_in = frozenset().union(*(self._runs_in.get(r, {r}) for r in readers))
        kept = any(result in self._kept for result in results)
        one = self._graph.ops[next(iter(runs_in))] if len(runs_in) == 1 else None
        followed = one is not None and self._fusible(one) and one.loop == op.loop
        own = frozenset((op.id,))
        if op.name in VIEWS and not kept:
            self._runs_in[op.id] = own
            return
        if (is_comparison(self._graph, op) or is_outer(op)) and not kept:
            self._transparent[results[0]] = ()
            self._runs_in[op.id] = runs_in
            return
        if op.id in self._exponentials and len(runs_in) > 1:
            self._write(results)
        elif (
            one is not None
            and self._may_follow(one, op)
            and not kept
            and (followed or (is_row_sum(one) and one.loop == op.loop))
        ):
            self._transparent[results[0]] = ()
            self._followed_by[op.id] = one.id
            self._roots.add(one.id)
        elif self._fusible(op):
            node = self._nodes.node_of_op
            if followed and one is not None and node[one.id] == node[op.id]:
                self._leader[op.id] = self._leader.get(one.id, one.id)
                self._runs_in[op.id] = runs_in
                if kept:
                    self._write(results)
                return
            sources = self._sources(op)
            origins = {self._origin(op.operands[read.operand]) for read in sources}
            ends_there = one is not None and one.name in (*_MATRIX, _REDUCE)
            ends_there = ends_there and one is not None and one.loop == op.loop
            cheap = ends_there or (len(origins) <= 1 and not self._narrows(op))
            if not kept and cheap:
                self._transparent[results[0]] = sources
                if not any(self._gathers(r, results) for r in readers):
                    self._runs_in[op.id] = runs_in
                    return
                runs_in |= own
            self._write(results)
            if results[0] in self._transparent:
                self._leader[op.id] = op.id
                self._runs_in[op.id] = runs_in
                return
        elif readers or kept:
            self._write(results)
        self._leader[op.id] = op.id
        self._runs_in[op.id] = own

    def _narrows(self, op: Op) -> bool:
        """Whether a cast is the only reader of something that is computed wider."""
        values = self._graph.values
        if op.name != _CONVERT or values[op.results[0]].nbytes >= values[op.operands[0]].nbytes:
            return False
        producer = values[op.operands[0]].producer
        if producer < 0 or self._readers.get(op.operands[0], ()) != [op.id]:
            return False
        made = self._graph.ops[producer]
        wide = made.name in _MATRIX or self._fusible(made)
        return made.loop == op.loop and wide and not is_outer(made)

    def _gathers(self, reader: int, values: Sequence[int]) -> bool:
        """Whether an operation gathers from one of some values."""
        op = self._graph.ops[reader]
        return op.name == _GATHER and op.operands[0] in values

    def _write(self, results: list[int]) -> None:
        self._materialized.update(
            r for r in results if not is_trivial(self._graph.values[r]) and r not in self._on_host
        )

    def _sources(self, op: Op) -> tuple[Read, ...]:
        """The large tensors that an operation reads."""
        values = self._graph.values
        elements = max((_elements(values[r].shape) for r in op.results), default=0)
        seen: dict[int, Read] = {}
        for k, operand in enumerate(op.operands):
            value = values[operand]
            large = not value.free and _elements(value.shape) * 8 > elements
            if large and not self._spread(value.producer):
                seen.setdefault(operand, Read(op.id, k))
        return tuple(seen.values())

    def _origin(self, value: int) -> int:
        """The one tensor that a value can be computed from by elementwise operations."""
        if value not in self._origins:
            self._origins[value] = value
            producer = self._graph.values[value].producer
            if producer >= 0:
                op = self._graph.ops[producer]
                if op.name in VIEWS or (self._fusible(op) and not self._narrows(op)):
                    found = {self._origin(op.operands[r.operand]) for r in self._sources(op)}
                    if len(found) == 1:
                        self._origins[value] = found.pop()
        return self._origins[value]

    def _spread(self, producer: int) -> bool:
        """Whether an operation only repeats something small, or compares with something small."""
        if producer < 0:
            return False
        op = self._graph.ops[producer]
        if op.name == _BROADCAST:
            made, read = (self._graph.values[v].shape for v in (op.results[0], op.operands[0]))
            return _elements(read) * 8 <= _elements(made)
        return is_comparison(self._graph, op) or is_outer(op)

    def _fusion(self, ops: list[int]) -> Fusion:
        inside = set(ops)
        reads: dict[int, Read] = {}
        for op_id in ops:
            op = self._graph.ops[op_id]
            for k, operand in enumerate(op.operands):
                if self._graph.values[operand].producer in inside:
                    continue
                for read in self._resolve(Read(op_id, k)):
                    value = self._graph.ops[read.op].operands[read.operand]
                    if value not in self._on_host:
                        reads.setdefault(value, read)
        writes = tuple(
            r for i in ops for r in self._graph.ops[i].results if r in self._materialized
        )
        touched = {*writes, *reads}
        in_reach = frozenset(v for v in touched if self._in_reach(v, self._graph.ops[ops[0]].loop))
        return Fusion(tuple(ops), tuple(reads.values()), writes, max(ops), in_reach=in_reach)

    def _in_reach(self, value: int, loop: int) -> bool:
        """Whether a kernel of one loop makes a value for kernels of the same pass."""
        producer = self._graph.values[value].producer
        made = producer >= 0 and self._graph.ops[producer].loop == loop
        return made and value in self._materialized and value not in self._kept

    def _resolve(self, read: Read) -> tuple[Read, ...]:
        """What is read from HBM for an operand, looking through what is computed on the fly.

        Only within a node: between nodes a tensor may be resharded, so it is read as it is.
        """
        key = (read.op, read.operand)
        if key not in self._resolved:
            self._resolved[key] = self._look_through(read)
        return self._resolved[key]

    def _look_through(self, read: Read) -> tuple[Read, ...]:
        value = self._graph.ops[read.op].operands[read.operand]
        if self._graph.values[value].free or is_trivial(self._graph.values[value]):
            return ()
        gathered = value in self._materialized and self._gathers(read.op, (value,))
        if value not in self._transparent or gathered:
            return (read,)
        node = self._nodes.node_of_op
        if self._transparent[value] and node[self._graph.values[value].producer] != node[read.op]:
            return (read,)
        found: dict[tuple[int, int], Read] = {}
        for source in self._transparent[value]:
            for inner in self._resolve(source):
                found[inner.op, inner.operand] = inner
        return tuple(found.values())


def is_comparison(graph: OpGraph, op: Op) -> bool:
    """Whether an operation scatters one element into every row of zeros.

    All dimensions of the result but one are dimensions of the updates too.
    """
    if op.name != _SCATTER or op.rule is None or len(op.results) != 1:
        return False
    if not graph.values[op.operands[0]].free:
        return False
    made = [f for dim in op.rule.results[0] for f in dim if op.rule.sizes[f] > 1]
    updated = {f for dim in op.rule.operands[2] for f in dim if op.rule.sizes[f] > 1}
    return updated <= set(made) and len([f for f in made if f not in updated]) == 1


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
