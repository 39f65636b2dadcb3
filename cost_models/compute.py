"""Seconds that one device computes for: matrix unit, vector unit, HBM.

Each function gives the seconds of one unit. Units overlap within a kernel, so a kernel takes as
long as its slowest (`roofline_seconds`). Sizes are local to the device, and may be arrays: they
broadcast, and the result is an array of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.cost_models.memory import dtype_bytes
from shardwright.cost_models.vector_ops import VectorOps, vector_ops
from shardwright.hardware_profiles.chip import ChipProfile

__all__ = [
    "convolution_seconds",
    "gather_seconds",
    "hbm_seconds",
    "kernel_matrix_seconds",
    "kernel_overhead_seconds",
    "matmul_efficiency",
    "matmul_seconds",
    "register_seconds",
    "roofline_seconds",
    "scatter_seconds",
    "sort_seconds",
    "vector_ops",
    "vector_seconds",
]

FloatArray = NDArray[np.float64]

LANES: Final = 128
SUBLANES: Final = 8

_TRANSCENDENTAL_INTERVAL: Final = {"v2": 2.0, "v3": 2.0, "v4": 2.0}
_WRITES_EXPONENTIALS: Final = frozenset({"v5p"})
_DIVIDES_AGAIN: Final = frozenset({"v6e"})
LONGEST_ROW: Final = 8192
_NO_ROWS: Final = frozenset({"v2", "v3", "v4", "v5e"})
_FOLDS_WIDTH: Final = frozenset({"v4"})
_ROWS_A_POSITION: Final = 16
_PACKED_BF16_ALU: Final = frozenset({"tpu7x"})


def matmul_efficiency(chip: ChipProfile) -> float:
    """Fraction of peak FLOP/s that large matrix products reach: calibrated, and as measured."""
    terms = chip.calibration
    return terms.matmul_efficiency * terms.matmul_correction.factor


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
    change = chip.calibration.weight_cycles_per_row * rows * rows_per_cycle
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
    strides: Sequence[int] | None = None,
    spread: float = 1.0,
    efficiency: float | None = None,
) -> FloatArray:
    """Seconds of a convolution: matrix units, or the vector unit for a depthwise one.

    A convolution is a matrix product for each position of the window: its contraction, the
    input features, and the output features are padded to the unit's rows and columns, so few
    channels cost as much as 128 (256 since v6e). Ways to lessen that, as XLA does: as many
    positions are contracted together as fit into the rows, whole rows of the window where one
    fits (on v4 the width or none); the pixels that a stride steps over become features; where a
    batch fills the columns, the batch is held and the output features stream. Where the window has
    more positions than the result has pixels, which is so for the gradient of a kernel, all of the
    window is contracted: its "input features" are a batch, often of one image. Zeros between the
    elements of an input that is pulled apart, as in the gradient of a stride, are not multiplied.
    Groups are products of their own. Without contraction (one input feature in a group) the vector
    unit multiplies.

    Args:
      batch: images.
      output_spatial: spatial sizes of the result.
      window: sizes of the kernel, the width last.
      input_features: input features of one group, as in the kernel's shape.
      output_features: output features of all groups.
      groups: feature groups.
      dtype: element type of the operands.
      chip: the device's chip.
      strides: of the window, as many as spatial sizes; ones by default.
      spread: product of the distances of input elements, 1 where they are neighbours.
      efficiency: as in `matmul_seconds`.

    Source: `estimated_cycles` of libtpu 0.0.42.1: 3x3 windows take 5 tiles of rows where two times
      the features are a tile; 7x7 windows over 3 features 7 tiles of 128 rows and 4 of 256, with a
      stride of two 2 of 128; gradients of strides of two a quarter of their positions
      (hardware_profiles/calibrated, benchmarks/convnet.py).
    """
    batch, features_in, features_out, groups = (
        np.asarray(size, dtype=np.float64)
        for size in (batch, input_features, output_features, groups)
    )
    pixels = _product(output_spatial)
    positions = _product(window)
    features_out = features_out / groups
    forms = [(features_in, positions, window[-1] if len(window) else 1)]
    if strides is not None and max(strides, default=1) > 1:
        smaller = [np.ceil(np.divide(w, by)) for w, by in zip(window, strides, strict=True)]
        forms.append((features_in * prod(strides), _product(smaller), smaller[-1]))
    by_position: FloatArray = np.full(1, np.inf)
    for features, places, width in forms:
        fold = np.where(groups == 1, _folded(features, places, width, chip), 1.0)
        by_pixel = _steps(batch * pixels, features * fold, features_out, dtype, chip)
        by_batch = pixels * _steps(features_out, features * fold, batch, dtype, chip)
        found = np.ceil(places / fold) * np.minimum(by_pixel, by_batch)
        by_position = np.minimum(by_position, found)
    # The gradient of a kernel slides a window of a whole image over few pixels.
    by_window = pixels * _steps(batch, features_in * positions, features_out, dtype, chip)
    slides = (positions > pixels) & (groups == 1)
    steps = groups * np.where(slides, np.minimum(by_position, by_window), by_position) / spread
    matrix = steps * _seconds_per_step(dtype, chip, efficiency)

    outputs = batch * pixels * features_out * groups
    multiply_add = 2.0
    vector = vector_seconds(outputs * positions * features_in, dtype, chip, multiply_add)
    seconds: FloatArray = np.where((features_in == 1) & (groups > 1), vector, matrix)
    return seconds


def _folded(
    features: FloatArray, positions: FloatArray, width: ArrayLike, chip: ChipProfile
) -> FloatArray:
    """Positions of a window that are contracted together."""
    width = np.asarray(width, dtype=np.float64)
    rows = chip.mxu_shape.value[0]
    if chip.generation in _FOLDS_WIDTH:
        return np.where(features * width <= rows, width, 1.0)
    most = rows // _ROWS_A_POSITION
    fold = np.clip(np.floor(rows / features), 1.0, np.minimum(most, positions))
    return np.where(fold >= width, np.floor(fold / width) * width, fold)


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
    return registers * cycles / _cycles_per_second(chip)


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


def gather_seconds(elements: ArrayLike, chip: ChipProfile) -> FloatArray:
    """Seconds to issue the moves of a gather, apart from the HBM that they occupy.

    Args:
      elements: elements gathered, in rows of at least 128 neighbours; single ones take longer.
      chip: the device's chip.
    """
    return _row_seconds(elements, chip.calibration.gather_cycles_per_row, chip)


def scatter_seconds(elements: ArrayLike, chip: ChipProfile) -> FloatArray:
    """Seconds to issue the moves of a scatter; `elements` of its updates, as `gather_seconds`."""
    return _row_seconds(elements, chip.calibration.scatter_cycles_per_row, chip)


def _row_seconds(elements: ArrayLike, cycles_per_row: float, chip: ChipProfile) -> FloatArray:
    rows = np.ceil(np.asarray(elements, dtype=np.float64) / LANES)
    return rows * cycles_per_row / _cycles_per_second(chip)


def hbm_seconds(
    nbytes: ArrayLike, chip: ChipProfile, *, efficiency: float | None = None
) -> FloatArray:
    """Seconds to move `nbytes` between HBM and the core.

    Args:
      efficiency: part of the bandwidth that is reached; calibrated, and as measured, by default.
    """
    terms = chip.calibration
    if efficiency is None:
        efficiency = terms.hbm_efficiency * terms.hbm_correction.factor
    seconds: FloatArray = np.asarray(nbytes, dtype=np.float64) / (
        chip.device_hbm_bandwidth * efficiency
    )
    return seconds


def beyond_vmem(nbytes: ArrayLike, chip: ChipProfile) -> FloatArray:
    """Bytes of HBM that a product moves for arrays that live briefly: none for small ones.

    Arrays of up to a quarter of a device's VMEM count as small, where a product's operands and its
    result have room together.

    Source: scheduled programs of libtpu 0.0.42.1 on v5e and v5p: temporaries of up to half of VMEM
      are in it, and `estimated_cycles` of products with operands there are those of the matrix
      units alone.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    room = chip.vmem_bytes_per_tensorcore.value / chip.device_tensorcores / 4
    return np.where(sizes <= room, 0.0, sizes)


def beyond_cmem(nbytes: ArrayLike, chip: ChipProfile) -> FloatArray:
    """Bytes of HBM that a kernel reads of arrays that live briefly: none where CMEM holds them.

    Source: programs of attention scheduled by libtpu 0.0.42.1 for v4: kernels take 0.4 of the
      cycles with an operand of 128 MiB in CMEM, and as long as to HBM where they write there.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    room = 0.0 if chip.cmem_bytes is None else float(chip.cmem_bytes.value)
    return np.where(sizes <= room, 0.0, sizes)


def register_seconds(
    elements: ArrayLike, dtype: str, chip: ChipProfile, *, reduces: bool = False
) -> FloatArray:
    """Seconds in which a kernel packs, unpacks or reduces registers while HBM waits.

    Args:
      elements: elements that it goes through.
      dtype: the narrowest type among them.
      chip: the device's chip.
      reduces: they are a reduction's operand.

    Source: `estimated_cycles` of libtpu 0.0.42.1: kernels that read n and write one array of bf16
      take n + 1 times the traffic of one and a constant beside; f32 ones take the traffic alone.
    """
    cycles = chip.calibration.register_cycles
    width = dtype_bytes(dtype)
    each = cycles.get("i8" if width < 2 else "bf16", 0.0) if width < 4 else 0.0
    if reduces:
        each = max(each, cycles.get("reduction", 0.0))
    registers = np.ceil(np.asarray(elements, dtype=np.float64) / (SUBLANES * LANES))
    return registers * each / _cycles_per_second(chip)


def keeps_rows(length: float, chip: ChipProfile) -> bool:
    """Whether a product's kernel reduces rows of its results twice, as a softmax does.

    Source: scheduled programs of libtpu 0.0.42.1: scores of attention over 1024 keys, their
      greatest and the sum of their exponentials are one kernel on v5p and v6e, two on v4; logits
      of 16000 and more tokens are two everywhere.
    """
    return length <= LONGEST_ROW and chip.generation not in _NO_ROWS


def computes_exponentials_again(chip: ChipProfile) -> bool:
    """Whether several products each compute the exponentials that they all read.

    Source: as of `keeps_rows`: the weights of attention in its backward pass on v6e, and their
      gradient on v4, are computed inside the products; on v5p both are written.
    """
    return chip.generation not in _WRITES_EXPONENTIALS


def computes_quotients_again(chip: ChipProfile) -> bool:
    """Whether products each divide exponentials that are in memory by their sums.

    Source: programs of attention without rematerialisation scheduled by libtpu 0.0.42.1: on v6e
      they do, on v4, v5e, v5p and TPU7x a kernel writes the weights in bf16.
    """
    return chip.generation in _DIVIDES_AGAIN


def kernel_overhead_seconds(chip: ChipProfile) -> float:
    """Seconds to fill and drain a kernel's pipeline."""
    return chip.calibration.kernel_cycles / chip.clock_hz.value


def _cycles_per_second(chip: ChipProfile) -> float:
    return chip.device_tensorcores * chip.clock_hz.value


def roofline_seconds(
    mxu: ArrayLike, vpu: ArrayLike, hbm: ArrayLike, overlap: float = 1.0
) -> FloatArray:
    """Seconds of a kernel whose units overlap: those of its slowest unit, and what does not.

    Args:
      overlap: part of the shorter one's time in which matrix unit and HBM work side by side.

    Source: Williams et al., Roofline (2009), for full overlap.
    """
    mxu, hbm = np.asarray(mxu, dtype=np.float64), np.asarray(hbm, dtype=np.float64)
    together = np.maximum(mxu, hbm) + (1 - overlap) * np.minimum(mxu, hbm)
    seconds: FloatArray = np.maximum(together, np.asarray(vpu, dtype=np.float64))
    return seconds
