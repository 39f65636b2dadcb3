"""Seconds that one device computes for: matrix unit, vector unit, HBM.

Each function gives the seconds of one unit. Units overlap within a kernel, so a kernel takes as
long as its slowest (`roofline_seconds`). Sizes are local to the device, and may be arrays: they
broadcast, and the result is an array of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.cost_models.memory import dtype_bytes
from shardwright.cost_models.vector_ops import VectorOps, vector_ops
from shardwright.hardware_profiles.chip import ChipProfile

__all__ = [
    "convolution_seconds",
    "gather_scatter_seconds",
    "hbm_seconds",
    "kernel_matrix_seconds",
    "matmul_efficiency",
    "matmul_seconds",
    "roofline_seconds",
    "sort_seconds",
    "vector_ops",
    "vector_seconds",
]

FloatArray = NDArray[np.float64]

LANES: Final = 128
SUBLANES: Final = 8

HBM_EFFICIENCY: Final = 0.85
"""Fraction of the HBM bandwidth that large copies reach.

Source: AI-Hypercomputer/tpu-recipes at c8cfe2f, microbenchmarks: 1.3596e12 of 1.638e12 bytes/s on
  v6e (0.83), 6.42e12 of 7.38e12 on TPU7x (0.87).
"""

_MATMUL_EFFICIENCY: Final = {"v6e": 0.90, "tpu7x": 0.83}
_MATMUL_EFFICIENCY_ELSEWHERE: Final = 0.95

WEIGHT_LOAD_CYCLES_PER_ROW: Final = 0.3
"""Cycles, for each row of the matrix unit, of changing its weights that nothing hides.

Source: `estimated_cycles` of libtpu 0.0.42.1 for bf16 [n, 4096] x [4096, 4096], n of 8 to 192:
  35 to 43 cycles a tile more than streaming takes on v5e (128 rows), 65 to 103 on v6e (256 rows).
"""

GATHER_CYCLES_PER_ROW: Final = 2.0
"""Cycles in which a core moves 128 neighbouring elements of a gathered or scattered row.

Source: `estimated_cycles` of libtpu 0.0.42.1 for gathers of 8192 rows of 768 and of 4096: 2.4 on
  v5e, 1.9 on v5p, 0.9 to 1.4 on v6e.
"""

_TRANSCENDENTAL_INTERVAL: Final = {"v2": 2.0, "v3": 2.0, "v4": 2.0}
_PACKED_BF16_ALU: Final = frozenset({"tpu7x"})


def matmul_efficiency(chip: ChipProfile) -> float:
    """Fraction of peak FLOP/s that large matrix products reach.

    Source: AI-Hypercomputer/tpu-recipes at c8cfe2f, microbenchmarks: 827.5e12 of 918e12 FLOP/s for
      8192^3 on v6e (0.90); 0.82 to 0.83 for 16384^3 and 32768^3 on TPU7x. Elsewhere 0.95: libtpu
      0.0.42.1 estimates 0.97 for 4096^3 on v5e, and training runs that repeat the forward pass
      reach 0.89 in the whole step (MaxText, 32B on v5e-256: MFU 66.86%, times 8/6).
    """
    return _MATMUL_EFFICIENCY.get(chip.generation, _MATMUL_EFFICIENCY_ELSEWHERE)


def matmul_seconds(
    batch: ArrayLike,
    m: ArrayLike,
    k: ArrayLike,
    n: ArrayLike,
    dtype: str,
    chip: ChipProfile,
    *,
    efficiency: float | None = None,
) -> FloatArray:
    """Seconds of the matrix units for `batch` products [m, k] x [k, n].

    One operand stays in the unit in tiles of rows x columns, to which k and n are padded; the
    other streams through, one row a step, m padded to the rows of a vector register (8 for 4-byte
    types, 16 for bf16, 32 for one byte). Each tile costs the time of changing it besides. XLA may
    let either operand stay; the cheaper counts.

    Args:
      batch: number of independent products.
      m: rows of the left operand.
      k: contracted size.
      n: columns of the right operand.
      dtype: element type of the operands.
      chip: the device's chip.
      efficiency: fraction of peak that a large product reaches; `matmul_efficiency` by default.

    Source: Austin et al., How to Scale Your Model (2025), "How to Think About TPUs", "What is a
      TPU?" (systolic array, padding to its size) and appendix B.
    """
    batch, m, k, n = (np.asarray(size, dtype=np.float64) for size in (batch, m, k, n))
    steps = np.minimum(_steps(m, k, n, dtype, chip), _steps(n, k, m, dtype, chip))
    return batch * steps * _seconds_per_step(dtype, chip, efficiency)


def _steps(
    streamed: FloatArray, k: FloatArray, held: FloatArray, dtype: str, chip: ChipProfile
) -> FloatArray:
    """Rows streamed through single tiles, changes of the tile included."""
    rows, columns = chip.mxu_shape.value
    tiles = np.ceil(k / rows) * np.ceil(held / columns)
    packed = SUBLANES * max(1.0, 4 / dtype_bytes(dtype))
    rows_per_cycle = chip.mxu_macs_per_cell_per_cycle.value
    change = WEIGHT_LOAD_CYCLES_PER_ROW * rows * rows_per_cycle
    steps: FloatArray = tiles * (np.ceil(streamed / packed) * packed + change)
    return steps


def _seconds_per_step(dtype: str, chip: ChipProfile, efficiency: float | None) -> float:
    rows, columns = chip.mxu_shape.value
    reached = matmul_efficiency(chip) if efficiency is None else efficiency
    return 2 * rows * columns / (chip.device_peak_flops(dtype) * reached)


def kernel_matrix_seconds(
    flops: ArrayLike, dtype: str, chip: ChipProfile, *, efficiency: float | None = None
) -> FloatArray:
    """Seconds of the matrix units for a kernel of which only the FLOPs are known.

    Args:
      flops: FLOPs on the device, padding to the unit included.
      dtype: element type of the products.
      chip: the device's chip.
      efficiency: fraction of peak FLOP/s that the kernel reaches; `matmul_efficiency` by default.

    Source: Williams et al., Roofline (2009).
    """
    reached = matmul_efficiency(chip) if efficiency is None else efficiency
    peak = chip.device_peak_flops(dtype) * reached
    return np.atleast_1d(np.asarray(flops, dtype=np.float64)) / peak


def convolution_seconds(
    batch: ArrayLike,
    output_spatial: Sequence[ArrayLike],
    window: Sequence[ArrayLike],
    input_features: ArrayLike,
    output_features: ArrayLike,
    groups: ArrayLike,
    dtype: str,
    chip: ChipProfile,
    *,
    efficiency: float | None = None,
) -> FloatArray:
    """Seconds of a convolution: matrix units, or the vector unit for a depthwise one.

    A convolution is a matrix product for each position of the window: its contraction, the
    input features, and the output features are padded to the unit's rows and columns, so few
    channels cost as much as 128 (256 since v6e). Two ways to lessen that, as XLA does: where
    features times the window's width fit into the rows, the width is contracted too; where a
    batch fills the columns, the batch is held and the output features stream. Where the window has
    more positions than the result has pixels, which is so for the gradient of a kernel, all of the
    window is contracted: its "input features" are a batch, often of one image. Groups are products
    of their own. Without contraction (one input feature in a group) the vector unit multiplies.

    Args:
      batch: images.
      output_spatial: spatial sizes of the result.
      window: sizes of the kernel, the width last.
      input_features: input features of one group, as in the kernel's shape.
      output_features: output features of all groups.
      groups: feature groups.
      dtype: element type of the operands.
      chip: the device's chip.
      efficiency: as in `matmul_seconds`.

    Source: `estimated_cycles` of libtpu 0.0.42.1 on v5e: for 3x3 windows over 32x64x64 images, 64
      features take as long as 128, and 7x7x3 as long as seven positions (benchmarks/
      compute_fidelity.py).
    """
    batch, features_in, features_out, groups = (
        np.asarray(size, dtype=np.float64)
        for size in (batch, input_features, output_features, groups)
    )
    pixels = _product(output_spatial)
    positions = _product(window)
    width = np.asarray(window[-1], dtype=np.float64) if len(window) else np.float64(1)
    features_out = features_out / groups
    rows = chip.mxu_shape.value[0]
    fold = np.where((features_in * width <= rows) & (groups == 1), width, 1.0)
    contraction = features_in * fold

    by_pixel = _steps(batch * pixels, contraction, features_out, dtype, chip)
    by_batch = pixels * _steps(features_out, contraction, batch, dtype, chip)
    by_position = positions / fold * np.minimum(by_pixel, by_batch)
    # The gradient of a kernel slides a window of a whole image over few pixels.
    by_window = pixels * _steps(batch, features_in * positions, features_out, dtype, chip)
    slides = (positions > pixels) & (groups == 1)
    steps = groups * np.where(slides, np.minimum(by_position, by_window), by_position)
    matrix = steps * _seconds_per_step(dtype, chip, efficiency)

    outputs = batch * pixels * features_out * groups
    multiply_add = 2.0
    vector = vector_seconds(outputs * positions * features_in, dtype, chip, multiply_add)
    seconds: FloatArray = np.where((features_in == 1) & (groups > 1), vector, matrix)
    return seconds


def _product(sizes: Sequence[ArrayLike]) -> FloatArray:
    product: FloatArray = np.ones(1)
    for size in sizes:
        product = product * np.asarray(size, dtype=np.float64)
    return product


def vector_seconds(
    elements: ArrayLike, dtype: str, chip: ChipProfile, work: VectorOps | float = 1.0
) -> FloatArray:
    """Seconds of the vector unit for an elementwise operation or a reduction.

    Args:
      elements: number of elements; of the operand for a reduction. Padded to whole registers of
        8 x 128, in which narrow types take as much room as f32, as they are widened for
        arithmetic (but for plain bf16 operations on TPU7x).
      dtype: element type.
      chip: the device's chip.
      work: what one element costs: `vector_ops` of the operation, or a number of plain operations.

    Source: Austin et al., How to Scale Your Model (2025), "How to Think About TPUs", appendix C
      (registers, operations a cycle). One transcendental operation a cycle: the slots of an
      instruction in libtpu's listings; one in two on v4, as measured on the device in
      github.com/ayaka14732/pallas-tpu-tutorial, chapter 1, section 7, and taken for older chips.
    """
    registers = np.ceil(np.asarray(elements, dtype=np.float64) / (SUBLANES * LANES))
    packs = dtype_bytes(dtype) == 2 and chip.generation in _PACKED_BF16_ALU
    alu_operations_per_cycle = chip.vpu_alus.value * (2 if packs else 1)
    if isinstance(work, VectorOps):
        counted = work.on(chip, dtype)
        interval = _TRANSCENDENTAL_INTERVAL.get(chip.generation, 1.0)
        cycles = max(counted.alu / alu_operations_per_cycle, counted.transcendental * interval)
    else:
        cycles = work / alu_operations_per_cycle
    return registers * cycles / (chip.device_tensorcores * chip.clock_hz.value)


def sort_seconds(
    elements: ArrayLike, length: ArrayLike, dtype: str, chip: ChipProfile
) -> FloatArray:
    """Seconds of the vector unit for a sort along one dimension.

    A bitonic network of L (L + 1) / 2 stages, L the logarithm of the length, and in each a
    compare, two selects and a rotation of every element. Not checked against a compiler: libtpu
    gives no estimate for sorts.

    Args:
      elements: number of elements, of all operands sorted together.
      length: size of the sorted dimension.
      dtype: element type of the keys.
      chip: the device's chip.

    Source: Batcher, Sorting Networks and Their Applications (1968).
    """
    levels = np.ceil(np.log2(np.maximum(np.asarray(length, dtype=np.float64), 2)))
    stages: FloatArray = levels * (levels + 1) / 2
    operations_a_stage = 4.0
    return stages * vector_seconds(elements, dtype, chip, operations_a_stage)


def gather_scatter_seconds(elements: ArrayLike, dtype: str, chip: ChipProfile) -> FloatArray:
    """Seconds to issue the moves of a gather or scatter, apart from the HBM that they occupy.

    Args:
      elements: elements gathered, or of the scattered updates, in rows of at least 128 neighbours;
        gathers of single elements take longer.
      dtype: element type; only its width could matter, and libtpu's estimates do not depend on it.
      chip: the device's chip.

    Source: see `GATHER_CYCLES_PER_ROW`.
    """
    rows = np.ceil(np.asarray(elements, dtype=np.float64) / LANES)
    return rows * GATHER_CYCLES_PER_ROW / (chip.device_tensorcores * chip.clock_hz.value)


def hbm_seconds(
    nbytes: ArrayLike, chip: ChipProfile, *, efficiency: float = HBM_EFFICIENCY
) -> FloatArray:
    """Seconds to move `nbytes` between HBM and the core, `efficiency` of the bandwidth reached."""
    seconds: FloatArray = np.asarray(nbytes, dtype=np.float64) / (
        chip.device_hbm_bandwidth * efficiency
    )
    return seconds


def roofline_seconds(mxu: ArrayLike, vpu: ArrayLike, hbm: ArrayLike) -> FloatArray:
    """Seconds of a kernel whose units overlap: those of its slowest unit.

    Source: Williams et al., Roofline (2009).
    """
    seconds: FloatArray = np.maximum(np.maximum(mxu, vpu), hbm)
    return seconds
