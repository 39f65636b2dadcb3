"""What kernels take and buffers hold on one device, by how many parts their factors are cut in.

That is all that a mesh changes of them, and meshes cut in the same parts many times over: each way
to cut a kind of node is priced once, for all meshes together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.planner.fusion import Fusion
from shardwright.planner.holds import Held
from shardwright.planner.nodes import NodeGraph
from shardwright.planner.op_costs import kernel_seconds, local_bytes
from shardwright.planner.rules import DimFactors
from shardwright.planner.skeleton import Skeleton
from shardwright.planner.strategies import IntArray, factor_parts

FloatArray = NDArray[np.float64]


class LocalPrices:
    """Seconds of a skeleton's kernels and bytes of its buffers on one chip, as meshes ask."""

    def __init__(self, skeleton: Skeleton, chip: ChipProfile) -> None:
        self.skeleton = skeleton
        self._chip = chip
        # The first cut of a kind is none: kernels look at what is largest, which then is there.
        self._numbers = [
            {np.ones(len(kind.sizes), dtype=np.int64).tobytes(): 0} for kind in skeleton.kinds
        ]
        self._cuts = [np.ones((1, len(kind.sizes)), dtype=np.int64) for kind in skeleton.kinds]
        self._known: dict[tuple[int, int, tuple[int, ...]], tuple[IntArray, IntArray]] = {}
        self._seconds: dict[int, FloatArray] = {}
        self._cast_seconds: dict[int, FloatArray] = {}
        self._bytes: dict[tuple[int, int], IntArray] = {}

    def cuts(self, kind: int, rows: IntArray, axis_sizes: tuple[int, ...]) -> IntArray:
        """The number of the cut that each of some strategies makes; new ones are noted.

        Args:
          kind: of the node, as the skeleton numbers them.
          rows: strategies, shape (strategies, axes).
        """
        key = (kind, id(rows), axis_sizes)
        if key not in self._known:
            # The strategies are kept, so that what an id stands for stays.
            self._known[key] = rows, self._find_cuts(kind, rows, axis_sizes)
        return self._known[key][1]

    def _find_cuts(self, kind: int, rows: IntArray, axis_sizes: tuple[int, ...]) -> IntArray:
        numbers = self._numbers[kind]
        parts = factor_parts(rows, self._cuts[kind].shape[1], axis_sizes)
        keys = [row.tobytes() for row in parts]
        new = {key: row for row, key in enumerate(keys) if key not in numbers}
        if new:
            numbers.update(zip(new, range(len(numbers), len(numbers) + len(new)), strict=True))
            self._cuts[kind] = np.concatenate([self._cuts[kind], parts[list(new.values())]])
        return np.array([numbers[key] for key in keys], dtype=np.int64)

    def kernel_seconds(self, what: int, kind: int) -> FloatArray:
        """Seconds of one run of a kernel of the skeleton that casts nothing, by cut of its node."""
        kernel = self.skeleton.kernels[what]

        def price(cuts: IntArray) -> FloatArray:
            return self._kernel(kernel, cuts, ())

        return self._extended(self._seconds, what, kind, price)

    def cast_seconds(self, what: int, kind: int) -> FloatArray:
        """What a product takes longer for casting an operand inside it, by cut of its node."""
        kernel, position = self.skeleton.casts[what]

        def price(cuts: IntArray) -> FloatArray:
            return self._kernel(kernel, cuts, (position,)) - self._kernel(kernel, cuts, ())

        return self._extended(self._cast_seconds, what, kind, price)

    def _kernel(self, kernel: Fusion, cuts: IntArray, wide: tuple[int, ...]) -> FloatArray:
        nodes = self.skeleton.nodes
        local = _LocalDims(nodes, cuts)
        seconds = kernel_seconds(nodes.graph, kernel, local, self._chip, wide).total
        return np.broadcast_to(seconds, (len(cuts),))

    def _extended(
        self,
        known_seconds: dict[int, FloatArray],
        what: int,
        kind: int,
        price: Callable[[IntArray], FloatArray],
    ) -> FloatArray:
        known = known_seconds.get(what, np.zeros(0))
        cuts = self._cuts[kind]
        if len(known) < len(cuts):
            asked = np.concatenate([cuts[:1], cuts[len(known) :]])
            known = known_seconds[what] = np.concatenate([known, price(asked)[1:]])
        return known

    def held_bytes(self, what: int, kind: int) -> IntArray:
        """Bytes of a buffer of the skeleton, by cut of its node's kind."""
        known = self._bytes.get((what, kind), np.zeros(0, dtype=np.int64))
        cuts = self._cuts[kind]
        if len(known) < len(cuts):
            held: Held = self.skeleton.held[what]
            local = local_shapes(cuts[len(known) :], held.shape, held.dims)
            new = np.ceil(local_bytes(local, held.dtype)).astype(np.int64)
            known = self._bytes[what, kind] = np.concatenate([known, new])
        return known


def local_shapes(cuts: IntArray, shape: tuple[int, ...], dims: DimFactors) -> IntArray:
    """The largest local shape of a value for each cut of its factors, shape (cuts, rank)."""
    # What runs beside a kernel may be of another node, with factors that this one lacks: uncut.
    known = range(cuts.shape[1])
    parts = [cuts[:, [f for f in dim if f in known]].prod(axis=1) for dim in dims]
    sizes = np.asarray(shape, dtype=np.int64)
    whole = np.stack(parts, axis=1) if parts else np.ones((len(cuts), 0), dtype=np.int64)
    return -(-sizes // whole)


def op_dims(nodes: NodeGraph, op_id: int, position: int) -> tuple[int, DimFactors]:
    """A value that an operation reads or makes, as factors of the operation's node.

    Args:
      position: of an operand, from 0, or of a result, from -1 downwards.
    """
    op = nodes.graph.ops[op_id]
    value = op.operands[position] if position >= 0 else op.results[-1 - position]
    if op.rule is None:
        return value, ((),) * len(nodes.graph.values[value].shape)
    mapping = nodes.nodes[nodes.node_of_op[op_id]].ops[op_id]
    rule = op.rule.operands[position] if position >= 0 else op.rule.results[-1 - position]
    return value, tuple(tuple(mapping[f] for f in dim if mapping[f] >= 0) for dim in rule)


class _LocalDims:
    """Local shapes of operands and results of operations, for some cuts of their node."""

    def __init__(self, nodes: NodeGraph, cuts: IntArray) -> None:
        self._nodes = nodes
        self._cuts = cuts
        self._known: dict[tuple[tuple[int, ...], DimFactors], IntArray] = {}

    def __call__(self, op_id: int, position: int) -> IntArray:
        value, dims = op_dims(self._nodes, op_id, position)
        key = (self._nodes.graph.values[value].shape, dims)
        if key not in self._known:
            self._known[key] = local_shapes(self._cuts, *key)
        return self._known[key]
