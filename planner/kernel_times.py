"""Seconds of the kernels of a partitioned program; kernels that are alike are priced once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields

from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.planner.fusion import Fusion
from shardwright.planner.graph import OpGraph
from shardwright.planner.op_costs import LocalDims, kernel_seconds

Shardings = Hashable
"""Shardings of several values, or none; those of alike operations are mostly the same objects."""

_BY_PLACE = ("ops", "reads", "writes", "beside")
_NOT_PRICED = ("time",)


class KernelTimes:
    """Prices kernels by their local shapes.

    Two kernels are alike where all that `kernel_seconds` looks at is: the operations in them, read
    by them and beside them, their shardings, and what made the values that they read.

    Args:
      shardings: of the operands and of the results of an operation, which `local` follows.
    """

    def __init__(
        self,
        graph: OpGraph,
        local: LocalDims,
        shardings: Callable[[int], tuple[Shardings, Shardings]],
        chip: ChipProfile,
    ) -> None:
        self._graph = graph
        self._local = local
        self._shardings_of = shardings
        self._chip = chip
        self._arguments = frozenset(graph.arguments)
        self._shardings: dict[Shardings, int] = {}
        self._known_shardings: dict[int, int] = {}
        self._told: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._seconds: dict[Hashable, float] = {}

    def __call__(self, fusion: Fusion) -> float:
        """Seconds of one run of a kernel."""
        key = self._alike(fusion)
        if key not in self._seconds:
            kernel = kernel_seconds(self._graph, fusion, self._local, self._chip)
            self._seconds[key] = float(kernel.total[0])
        return self._seconds[key]

    def _alike(self, fusion: Fusion) -> Hashable:
        ops, values = self._graph.ops, self._graph.values
        place = {op: number for number, op in enumerate(fusion.ops)}
        read = [ops[r.op].operands[r.operand] for r in fusion.reads]
        touched = (*read, *fusion.writes)
        told: list[Hashable] = [
            tuple(map(self._op, fusion.ops)),
            tuple((place.get(r.op, -1), self._op(r.op), r.operand) for r in fusion.reads),
            self._op(fusion.beside) if fusion.beside >= 0 else -1,
        ]
        for value in fusion.writes:
            producer = values[value].producer
            told.append((place[producer], ops[producer].results.index(value)))
        for name in _OTHERS:
            one = getattr(fusion, name)
            # Sets are of values, which are told by where they are read or written.
            told.append(tuple(v in one for v in touched) if isinstance(one, frozenset) else one)
        return tuple(told)

    def _op(self, op_id: int) -> int:
        """A number for an operation with its shardings and with what it reads."""
        if op_id not in self._told:
            op, values = self._graph.ops[op_id], self._graph.values
            made_by = []
            for operand in op.operands:
                producer = values[operand].producer
                if producer < 0:
                    made_by.append((-1, -1, False))
                    continue
                maker = self._graph.ops[producer]
                of_argument = bool(maker.operands) and maker.operands[0] in self._arguments
                made = self._number(self._shardings_of(producer)[1])
                made_by.append((maker.form, made, of_argument))
            reads, makes = self._shardings_of(op_id)
            key = op.form, self._number(reads), self._number(makes), tuple(made_by)
            self._told[op_id] = self._numbers.setdefault(key, len(self._numbers))
        return self._told[op_id]

    def _number(self, shardings: Shardings) -> int:
        """A number for shardings; most are known by identity."""
        number = self._known_shardings.get(id(shardings))
        if number is None:
            number = self._shardings.setdefault(shardings, len(self._shardings))
            self._known_shardings[id(shardings)] = number
        return number


_OTHERS = tuple(f.name for f in fields(Fusion) if f.name not in (*_BY_PLACE, *_NOT_PRICED))
