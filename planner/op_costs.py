"""Seconds that operations and kernels take on one device, from their local shapes.

The same functions price a strategy when the problem is built (many strategies at once) and a
finished plan when it is evaluated (one). Shapes come as integer arrays (strategies, rank).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models import compute
from shardwright.cost_models.memory import dtype_bytes, tiled_bytes
from shardwright.cost_models.vector_ops import vector_ops
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.planner.fusion import IN_PLACE, Fusion
from shardwright.planner.given import CONSTRAINT
from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.kernel_costs import MXU, evaluate_cost
from shardwright.planner.kernel_ops import KernelInfo, PallasCost, local_sizes
from shardwright.planner.offload import TRANSFER
from shardwright.planner.rules import Rule
from shardwright.planner.small_products import is_row_sum

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
LocalDims = Callable[[int, int], IntArray]
"""(operation, position) -> local shapes; operands count from 0, results from -1 downwards."""

_QUANTISED = ("i8", "ui8")
_MATRIX = ("stablehlo.dot_general", "stablehlo.convolution")
_REDUCE = "stablehlo.reduce"
_PARTIAL_READS = ("stablehlo.gather", "stablehlo.dynamic_slice", "stablehlo.slice")
_MOVES_DATA = frozenset(
    f"stablehlo.{name}"
    for name in (
        "bitcast_convert", "broadcast_in_dim", "concatenate", "copy", "dynamic_slice",
        "dynamic_update_slice", "optimization_barrier", "pad", "reshape", "reverse", "slice",
        "transpose",
    )
)  # fmt: skip

_NO_KERNEL = (CONSTRAINT, TRANSFER)
"""Nothing once partitioned, and copies by the DMA engines over PCIe."""


RESULT_ROWS_A_BLOCK = 1024
"""Rows of results for which one reading of an operand does, see `_cast_seconds`."""


@dataclass(frozen=True)
class KernelSeconds:
    """What each unit of the device needs for one run of a kernel, by strategy.

    Attributes:
      hbm: the traffic, and the packing and unpacking of narrow values that HBM waits for.
      overlap: part of the shorter one's time in which matrix units and HBM work side by side.
      fixed: seconds of any kernel.
    """

    mxu: FloatArray
    vpu: FloatArray
    hbm: FloatArray
    overlap: float = 1.0
    fixed: float = 0.0

    @property
    def total(self) -> FloatArray:
        """Seconds of the kernel: its slowest unit, and what does not overlap."""
        return compute.roofline_seconds(self.mxu, self.vpu, self.hbm, self.overlap) + self.fixed


def result_position(k: int) -> int:
    """How `LocalDims` counts the k-th result."""
    return -1 - k


def kernel_seconds(
    graph: OpGraph,
    fusion: Fusion,
    local: LocalDims,
    chip: ChipProfile,
    wide: Sequence[int] | None = None,
) -> KernelSeconds:
    """Seconds of one run of a kernel on each unit of one device.

    Args:
      wide: which of the `cast_operands` of a product are cast inside it; without, those that
        `local` has in the sharding in which they are cast.
    """
    mxu: FloatArray = np.zeros(1)
    vpu: FloatArray = np.zeros(1)
    if all(graph.ops[op_id].name in _NO_KERNEL for op_id in fusion.ops):
        return KernelSeconds(mxu, vpu, np.zeros(1))
    if fusion.by_rows and not _keeps_rows(graph, fusion, local, chip):
        fusion = replace(fusion, from_registers=frozenset(), beside=-1)
    written = fusion.expensive and not compute.computes_exponentials_again(chip)
    if written or (fusion.quotient and not compute.computes_quotients_again(chip)):
        fusion = replace(fusion, computed_in=0)
    for op_id in fusion.ops:
        op = graph.ops[op_id]
        mxu_part, vpu_part = _op_seconds(graph, op, local, chip)
        mxu, vpu = mxu + mxu_part, vpu + vpu_part
    if wide is None:
        wide = _unmoved_casts(graph, fusion, local)
    for position in wide:
        mxu = mxu + _cast_seconds(graph, graph.ops[fusion.ops[0]], position, local, chip)
    hbm = compute.hbm_seconds(_hbm_bytes(graph, fusion, local, chip), chip)
    fixed = compute.kernel_overhead_seconds(chip)
    if not (fusion.computed_in or fusion.with_others):
        hbm = hbm + _register_seconds(graph, fusion, local, chip)
    if fusion.beside >= 0:
        hbm = np.maximum(hbm - _idle_seconds(graph, fusion.beside, local, chip), 0.0)
    return KernelSeconds(
        mxu,
        vpu,
        hbm,
        # Kernels of people's own bring the next blocks in while they compute.
        1.0 if "kernel" in graph.ops[fusion.ops[0]].detail else chip.calibration.overlap,
        0.0 if fusion.from_registers or fusion.computed_in or fusion.with_others else fixed,
    )


def _keeps_rows(graph: OpGraph, fusion: Fusion, local: LocalDims, chip: ChipProfile) -> bool:
    """Whether the kernel before can reduce its rows once more."""
    last = graph.ops[fusion.ops[-1]]
    row = _elements(local(last.id, 0)) / _elements(local(last.id, result_position(0)))
    return compute.keeps_rows(float(row.max()), chip)


def _idle_seconds(graph: OpGraph, product: int, local: LocalDims, chip: ChipProfile) -> FloatArray:
    """Seconds in which a product computes and could move more."""
    op = graph.ops[product]
    mxu, _ = _op_seconds(graph, op, local, chip)
    total: FloatArray = np.zeros(1)
    for position in (0, 1):
        dtype = graph.values[op.operands[position]].dtype
        total = total + local_bytes(local(product, position), dtype)
    idle = mxu - compute.hbm_seconds(total, chip)
    seconds: FloatArray = np.maximum(idle, 0.0) * chip.calibration.overlap
    return seconds


def local_bytes(dims: IntArray, dtype: str) -> FloatArray:
    """Bytes of HBM that local arrays take, tile padding included, shape (strategies,)."""
    return tiled_bytes(dims, dtype)


def _hbm_bytes(graph: OpGraph, fusion: Fusion, local: LocalDims, chip: ChipProfile) -> FloatArray:
    """Bytes that a kernel reads from and writes to HBM, shape (strategies,).

    A product takes what is made and read within a pass from VMEM, and writes it there, where it is
    small. Elementwise kernels are no faster for it by the compiler's estimates, so theirs counts.
    """
    within = fusion.in_reach if graph.ops[fusion.ops[0]].name in _MATRIX else frozenset()
    total: FloatArray = np.zeros(1)
    told = _told_bytes(graph.ops[fusion.ops[0]], local)
    if told is not None:
        return told
    for read in fusion.reads:
        op = graph.ops[read.op]
        if op.operands[read.operand] in fusion.from_registers:
            continue
        if op.name in IN_PLACE and read.operand == 0:
            continue
        if op.name in _PARTIAL_READS and read.operand == 0:
            value, position = op.results[0], result_position(0)
        else:
            value, position = op.operands[read.operand], read.operand
        nbytes = local_bytes(local(op.id, position), _stored_dtype(graph, value))
        if value in fusion.in_reach:
            nbytes = compute.beyond_cmem(nbytes, chip)
        total = total + (compute.beyond_vmem(nbytes, chip) if value in within else nbytes)
    for value in fusion.writes:
        op = graph.ops[graph.values[value].producer]
        if op.name in IN_PLACE:
            update = len(op.operands) - 1 if op.name == "stablehlo.scatter" else 1
            dims, dtype = local(op.id, update), graph.values[op.operands[update]].dtype
        else:
            dims = local(op.id, result_position(op.results.index(value)))
            dtype = graph.values[value].dtype
        written = local_bytes(dims, dtype)
        if value in within:
            written = compute.beyond_vmem(written, chip)
        total = total + (written if not fusion.computed_in else -written)
    if fusion.computed_in:
        return np.maximum(total, 0.0) * fusion.computed_in
    return total


def _stored_dtype(graph: OpGraph, value: int) -> str:
    """The type in which a tensor is read from HBM: of a quantised one, that before the cast.

    The kernel that reads a cast of eight-bit weights casts them itself, as seen in decode steps
    scheduled by libtpu 0.0.42.1.
    """
    producer = graph.values[value].producer
    if producer >= 0 and graph.ops[producer].name == "stablehlo.convert":
        source = graph.values[graph.ops[producer].operands[0]].dtype
        if source in _QUANTISED:
            return source
    return graph.values[value].dtype


def cast_operands(graph: OpGraph, fusion: Fusion) -> tuple[int, ...]:
    """Operands of a product that are arguments of the program, cast to fewer bits.

    Those that are not moved to another sharding once cast are cast inside the product.
    """
    op = graph.ops[fusion.ops[0]]
    if op.name != "stablehlo.dot_general" or len(fusion.ops) > 1:
        return ()
    found = []
    for position, operand in enumerate(op.operands):
        producer = graph.values[operand].producer
        if producer < 0 or graph.ops[producer].name != "stablehlo.convert":
            continue
        cast = graph.ops[producer]
        wide, narrow = (graph.values[v].dtype for v in (cast.operands[0], cast.results[0]))
        if cast.operands[0] in graph.arguments and dtype_bytes(wide) > dtype_bytes(narrow):
            found.append(position)
    return tuple(found)


def _unmoved_casts(graph: OpGraph, fusion: Fusion, local: LocalDims) -> list[int]:
    op = graph.ops[fusion.ops[0]]
    return [
        position
        for position in cast_operands(graph, fusion)
        if np.array_equal(
            local(graph.values[op.operands[position]].producer, result_position(0)),
            local(op.id, position),
        )
    ]


def _cast_seconds(
    graph: OpGraph, product: Op, position: int, local: LocalDims, chip: ChipProfile
) -> FloatArray:
    """Seconds of reading an operand of a product that is cast inside it.

    The matrix units wait for it, and each block of results reads it again.

    Source: `estimated_cycles` of libtpu 0.0.42.1 on v5e for products with operands of f32 in HBM,
      and the blocks of their `window_config`: 1024 rows and more of results share one reading.
      An operand of 16 MiB on v6e, an eighth of VMEM, is read once; one of 32 MiB on v5e is not.
    """
    results = _elements(local(product.id, result_position(0)))
    sides = [local(product.id, side) for side in (0, 1)]
    contracted = np.sqrt(_elements(sides[0]) * _elements(sides[1]) / results)
    again = np.ceil(_elements(sides[1 - position]) / contracted / RESULT_ROWS_A_BLOCK)
    cast = graph.ops[graph.values[product.operands[position]].producer]
    wide = graph.values[cast.operands[0]].dtype
    nbytes = local_bytes(sides[position], wide)
    again = np.where(compute.beyond_vmem(2 * nbytes, chip) > 0, again, 1.0)
    seconds: FloatArray = again * compute.hbm_seconds(nbytes, chip)
    return seconds


def _register_seconds(
    graph: OpGraph, fusion: Fusion, local: LocalDims, chip: ChipProfile
) -> FloatArray:
    """Seconds of going through narrow values and operands of reductions.

    The matrix units take narrow operands as they are, so of a product the result counts alone.
    """
    first = graph.ops[fusion.ops[0]]
    most: FloatArray = np.zeros(1)
    if "kernel" in first.detail or "pallas" in first.detail:
        return most
    inside = first.name in _MATRIX or fusion.from_registers
    touched = [] if inside else _read_from_hbm(graph, fusion, local, chip)
    for value in fusion.writes:
        op = graph.ops[graph.values[value].producer]
        touched.append((op.id, result_position(op.results.index(value))))
    for op_id, position in touched:
        op = graph.ops[op_id]
        value = op.operands[position] if position >= 0 else op.results[-1 - position]
        if position == 0 and op.name in _PARTIAL_READS:
            position = result_position(0)
        if op.name in IN_PLACE:
            position = len(op.operands) - 1 if op.name == "stablehlo.scatter" else 1
        elements = _elements(local(op_id, position))
        reduces = op.name == _REDUCE and position >= 0
        seconds = compute.register_seconds(
            elements, graph.values[value].dtype, chip, reduces=reduces
        )
        most = np.maximum(most, seconds)
    return most


def _read_from_hbm(
    graph: OpGraph, fusion: Fusion, local: LocalDims, chip: ChipProfile
) -> list[tuple[int, int]]:
    """Operations and which operand of each a kernel brings in, what lies in CMEM left out."""
    found = []
    for read in fusion.reads:
        value = graph.ops[read.op].operands[read.operand]
        nbytes = local_bytes(local(read.op, read.operand), graph.values[value].dtype)
        if value not in fusion.in_reach or compute.beyond_cmem(nbytes, chip).any():
            found.append((read.op, read.operand))
    return found


def _op_seconds(
    graph: OpGraph, op: Op, local: LocalDims, chip: ChipProfile
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the matrix and of the vector units."""
    zero: FloatArray = np.zeros(1)
    if op.name in _MOVES_DATA or not op.results:
        return zero, zero
    dtype = graph.values[op.operands[0]].dtype if op.operands else "f32"
    if "kernel" in op.detail or "pallas" in op.detail:
        heaviest = max(op.operands or op.results, key=lambda v: graph.values[v].nbytes)
        dtype = graph.values[heaviest].dtype
        return _own_matrix_seconds(op, local, dtype, chip), zero
    if is_row_sum(op) and dtype == "f32":
        return zero, compute.vector_seconds(_elements(local(op.id, 0)), dtype, chip, 2.0)
    if op.name == "stablehlo.dot_general" and op.rule is not None:
        return _dot_seconds(op, op.rule, local, dtype, chip), zero
    if op.name == "stablehlo.convolution" and op.rule is not None:
        return _convolution_seconds(op, local, dtype, chip), zero
    if op.name == "stablehlo.gather":
        return zero, compute.gather_seconds(_elements(local(op.id, result_position(0))), chip)
    if op.name == "stablehlo.scatter":
        return zero, compute.scatter_seconds(_elements(local(op.id, len(op.operands) - 1)), chip)
    if op.name == "stablehlo.sort":
        dims = local(op.id, 0)
        return zero, compute.sort_seconds(_elements(dims), dims.max(axis=1), dtype, chip)
    largest = max(
        [*range(len(op.operands)), *(result_position(k) for k in range(len(op.results)))],
        key=lambda p: _size(graph, op, p),
    )
    elements = _elements(local(op.id, largest))
    weight = vector_ops(op.name.removeprefix("stablehlo.").removeprefix("chlo."))
    return zero, compute.vector_seconds(elements, dtype, chip, weight)


def _own_matrix_seconds(op: Op, local: LocalDims, dtype: str, chip: ChipProfile) -> FloatArray:
    """Seconds of the matrix units for a kernel that tells its FLOPs.

    Source: Williams et al., Roofline (2009): FLOPs over the FLOP/s that the unit reaches. A raw
      Pallas kernel without a `cost_estimate` counts as none, and the plan says so.
    """
    raw: PallasCost | None = op.detail.get("pallas")
    if raw is not None:
        return compute.kernel_matrix_seconds(raw.flops or 0.0, dtype, chip)
    info: KernelInfo = op.detail["kernel"]
    flops = evaluate_cost(info.flops, _factor_sizes(op, local) | {MXU: chip.mxu_shape.value[0]})
    return compute.kernel_matrix_seconds(flops, dtype, chip, efficiency=info.efficiency)


def _told_bytes(op: Op, local: LocalDims) -> FloatArray | None:
    """Bytes of HBM that a kernel says it moves; None where it says nothing."""
    raw: PallasCost | None = op.detail.get("pallas")
    if raw is not None and raw.hbm_bytes is not None:
        return np.full(1, raw.hbm_bytes)
    info: KernelInfo | None = op.detail.get("kernel")
    if info is None or info.hbm_bytes is None:
        return None
    return np.atleast_1d(evaluate_cost(info.hbm_bytes, _factor_sizes(op, local) | {MXU: 1}))


def _factor_sizes(op: Op, local: LocalDims) -> dict[str, IntArray]:
    return local_sizes(
        op.detail["kernel"],
        [local(op.id, position) for position in range(len(op.operands))],
        [local(op.id, result_position(k)) for k in range(len(op.results))],
    )


def _size(graph: OpGraph, op: Op, position: int) -> int:
    value = op.operands[position] if position >= 0 else op.results[-1 - position]
    return int(np.prod(graph.values[value].shape, dtype=np.int64))


def _elements(dims: IntArray) -> FloatArray:
    elements: FloatArray = dims.prod(axis=1).astype(np.float64)
    return elements


def dot_kinds(rule: Rule) -> dict[str, tuple[int, ...]]:
    """The factors of a dot by their part in it: batch, m, n or k."""
    left, right, out = (
        {f for dim in mapping for f in dim}
        for mapping in (rule.operands[0], rule.operands[1], rule.results[0])
    )
    return {
        "batch": tuple(sorted(left & right & out)),
        "m": tuple(sorted((left & out) - right)),
        "n": tuple(sorted((right & out) - left)),
        "k": tuple(sorted((left & right) - out)),
    }


def _dot_seconds(op: Op, rule: Rule, local: LocalDims, dtype: str, chip: ChipProfile) -> FloatArray:
    sizes: dict[int, IntArray] = {}
    for position in (0, 1):
        dims = local(op.id, position)
        for column, factors in enumerate(rule.operands[position]):
            for factor in factors:
                sizes[factor] = dims[:, column]
    one = np.ones(1, dtype=np.int64)

    def extent(factors: tuple[int, ...]) -> IntArray:
        product = one
        for factor in factors:
            product = product * sizes[factor]
        return product

    kinds = {kind: extent(factors) for kind, factors in dot_kinds(rule).items()}
    return compute.matmul_seconds(kinds["batch"], kinds["m"], kinds["k"], kinds["n"], dtype, chip)


def _convolution_seconds(op: Op, local: LocalDims, dtype: str, chip: ChipProfile) -> FloatArray:
    detail = op.detail
    out = local(op.id, result_position(0))
    kernel = local(op.id, 1)
    spatial = [out[:, d] for d in detail["output_spatial"]]
    window = [kernel[:, d] for d in detail["kernel_spatial"]]
    return compute.convolution_seconds(
        out[:, detail["output_batch"]],
        spatial,
        window,
        kernel[:, detail["kernel_input_feature"]],
        kernel[:, detail["kernel_output_feature"]],
        detail["feature_group_count"],
        dtype,
        chip,
        strides=detail["strides"],
        spread=detail["spread"],
    )
