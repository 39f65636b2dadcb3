"""Fits the terms of the compute model to what a compiler estimates for small programs.

Each family determines terms of its own, in this order: elementwise kernels the traffic with HBM and
what narrow types add; products the matrix unit; gathers and scatters their moves. Convolutions and
attention determine nothing: they are predicted from the terms, and tell how good those are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from shardwright.cost_models import compute
from shardwright.hardware_profiles.calibration import UNCALIBRATED, Calibration, Correction
from shardwright.hardware_profiles.chip import ChipProfile


@dataclass(frozen=True)
class Sample:
    """A compiled program.

    Attributes:
      family, dtype, sizes: as in `planner.calibration_programs`.
      kernels: kernels that it was compiled to.
      cycles: the compiler's estimate for them together; None where it has none.
      hbm_bytes: bytes of HBM that they read and write; what was fetched ahead is in `vmem_bytes`.
    """

    family: str
    dtype: str
    sizes: dict[str, int]
    kernels: int
    cycles: int | None
    hbm_bytes: float
    vmem_bytes: float


_ROW_CYCLES = {"v5e": 2.4, "v5p": 1.9, "v6e": 1.2, "tpu7x": 1.2}
"""Cycles to move 128 neighbouring elements of a gathered row.

Source: `estimated_cycles` of libtpu 0.0.42.1 for gathers of 8192 rows of 768 and of 4096 that it
  did not make with kernels of its own, of which it says nothing:
  0.9 to 1.4 on v6e, taken for TPU7x.
"""


def fit(samples: Sequence[Sample], chip: ChipProfile, compiler: str) -> Calibration:
    """The terms that samples of a chip determine; what they do not is as of `UNCALIBRATED`."""
    known = [sample for sample in samples if sample.cycles]
    moves = _ROW_CYCLES.get(chip.generation, UNCALIBRATED.gather_cycles_per_row)
    rows = {"gather_cycles_per_row": moves, "scatter_cycles_per_row": moves}
    terms = UNCALIBRATED.model_copy(update={"compiler": compiler, **rows})
    for step in (_stream, _registers, _products, _moves):
        terms = terms.model_copy(update=step(known, _with(chip, terms)))
    return terms


@dataclass(frozen=True)
class Measurement:
    """A published run of a kernel on a device.

    Attributes:
      size: of a bf16 product of two square matrices; 0 for a copy.
      rate: FLOP/s of the product on one device, or bytes/s that the copy moves on one device.
    """

    size: int
    rate: float
    source: str


_RECIPES = "AI-Hypercomputer/tpu-recipes at c8cfe2f, microbenchmarks"
MEASURED = {
    "v6e": (
        Measurement(8192, 827.474e12, f"{_RECIPES}: bf16 8192^3 at 827.5 TFLOP/s"),
        Measurement(0, 1.3596e12, f"{_RECIPES}: copies at 1359.6 GB/s"),
    ),
    "tpu7x": (
        Measurement(32768, 956.382e12, f"{_RECIPES}: bf16 32768^3 at 956.4 TFLOP/s a device"),
        Measurement(0, 6396.828e9 / 2, f"{_RECIPES}: copies of 1 GiB at 6396.8 GB/s a chip"),
    ),
}
"""Measurements on devices by generation."""


def corrected(terms: Calibration, chip: ChipProfile) -> Calibration:
    """Terms with what measurements on devices of the generation change."""
    for measured in MEASURED.get(chip.generation, ()):
        if measured.size:
            factor = measured.rate / chip.device_peak_flops("bf16") / terms.matmul_efficiency
            update = {"matmul_correction": Correction(factor=factor, source=measured.source)}
        else:
            factor = measured.rate / chip.device_hbm_bandwidth / terms.hbm_efficiency
            update = {"hbm_correction": Correction(factor=factor, source=measured.source)}
        terms = terms.model_copy(update=update)
    return terms


def predicted_cycles(sample: Sample, chip: ChipProfile) -> float | None:
    """What the compute model says for a sample, in cycles; None for families beyond it."""
    seconds = _PREDICTED.get(sample.family)
    if seconds is None:
        return None
    return float(np.max(seconds(sample, chip))) * chip.clock_hz.value


def _with(chip: ChipProfile, terms: Calibration) -> ChipProfile:
    return chip.model_copy(update={"calibration": terms})


def _of(samples: Iterable[Sample], *families: str) -> list[Sample]:
    return [sample for sample in samples if sample.family in families]


# -- terms -----------------------------------------------------------------------------------------


def _stream(samples: Sequence[Sample], chip: ChipProfile) -> dict[str, Any]:
    """Bandwidth and fixed cycles, from elementwise kernels of f32 without long arithmetic.

    What the compiler fetched ahead into VMEM counts with a weight of its own, for some generations
    that of HBM, for others little.
    """
    chosen = [
        s for s in _of(samples, "elementwise") if s.dtype == "f32" and not s.sizes["transcendental"]
    ]
    if len(chosen) < 3:
        return {}
    cycles = np.array([float(s.cycles or 0) for s in chosen])
    columns = [[s.hbm_bytes, s.vmem_bytes, 1.0] for s in chosen]
    (hbm, vmem, fixed), _ = nnls(np.array(columns) / cycles[:, None], np.ones(len(chosen)))
    peak = chip.device_hbm_bandwidth / chip.clock_hz.value
    return {
        "hbm_efficiency": min(1.0, 1 / (hbm * peak)),
        "vmem_weight": min(1.0, vmem / hbm),
        "kernel_cycles": float(fixed),
    }


def _stream_bytes(sample: Sample, chip: ChipProfile) -> float:
    return sample.hbm_bytes + chip.calibration.vmem_weight * sample.vmem_bytes


def _registers(samples: Sequence[Sample], chip: ChipProfile) -> dict[str, Any]:
    """What narrow types and reductions add to the traffic."""
    groups = {
        "bf16": [s for s in _of(samples, "elementwise") if s.dtype == "bf16"],
        "i8": [s for s in _of(samples, "elementwise") if s.dtype == "i8"],
        "reduction": [s for s in _of(samples, "reduction") if s.dtype == "f32"],
    }
    cores = chip.device_tensorcores
    found = {}
    for name, chosen in groups.items():
        left = []
        for s in chosen:
            if s.sizes.get("transcendental"):
                continue
            stream = float(compute.hbm_seconds(_stream_bytes(s, chip), chip)) * chip.clock_hz.value
            beside = float(s.cycles or 0) - stream - chip.calibration.kernel_cycles
            left.append(beside * cores * 1024 / s.sizes["elements"])
        if left:
            found[name] = max(0.0, statistics.median(left))
    return {"register_cycles": found}


def _products(samples: Sequence[Sample], chip: ChipProfile) -> dict[str, Any]:
    """Efficiency and overlap, by least squares of the logarithms of ratios."""
    chosen = _of(samples, "matmul", "batched_matmul")
    if len(chosen) < 3:
        return {}
    observed = np.log([float(s.cycles or 1) for s in chosen])

    def terms(x: Any) -> dict[str, Any]:
        return {"matmul_efficiency": float(x[0]), "overlap": float(x[1])}

    def residuals(x: Any) -> Any:
        tried = _with(chip, chip.calibration.model_copy(update=terms(x)))
        told = [predicted_cycles(s, tried) or 1.0 for s in chosen]
        return np.log(told) - observed

    found = least_squares(
        residuals, x0=(0.95, 0.9), bounds=((0.5, 0.0), (1.0, 1.0)), loss="soft_l1"
    )
    return terms(found.x)


def _moves(samples: Sequence[Sample], chip: ChipProfile) -> dict[str, Any]:
    """Cycles for each row of 128 elements, where kernels that have an estimate move them."""
    found = {}
    for family in ("gather", "scatter"):
        cycles = [
            float(s.cycles or 0)
            * chip.device_tensorcores
            / (s.sizes["rows"] * s.sizes["width"] / 128)
            for s in _of(samples, family)
            if s.hbm_bytes + s.vmem_bytes >= s.sizes["rows"] * s.sizes["width"]
        ]
        if cycles:
            found[f"{family}_cycles_per_row"] = statistics.median(cycles)
    return found


# -- predictions -----------------------------------------------------------------------------------


def _stream_seconds(sample: Sample, chip: ChipProfile, *, reduces: bool) -> Any:
    elements = sample.sizes["elements"]
    seconds = compute.hbm_seconds(_stream_bytes(sample, chip), chip)
    seconds = seconds + compute.register_seconds(elements, sample.dtype, chip, reduces=reduces)
    return seconds + compute.kernel_overhead_seconds(chip)


def _matmul_seconds(sample: Sample, chip: ChipProfile) -> Any:
    batch, m, k, n = (sample.sizes[name] for name in ("batch", "m", "k", "n"))
    mxu = compute.matmul_seconds(batch, m, k, n, sample.dtype, chip)
    return _with_traffic(mxu, batch * m * n, sample, chip)


def _with_traffic(mxu: Any, results: float, sample: Sample, chip: ChipProfile) -> Any:
    result_dtype = "i32" if sample.dtype == "i8" else sample.dtype
    hbm = compute.hbm_seconds(sample.hbm_bytes, chip)
    hbm = hbm + compute.register_seconds(results, result_dtype, chip)
    overlap = chip.calibration.overlap
    total = compute.roofline_seconds(mxu, 0.0, hbm, overlap)
    return total + compute.kernel_overhead_seconds(chip)


def _convolution_seconds(sample: Sample, chip: ChipProfile) -> Any:
    sizes = sample.sizes
    mxu = compute.convolution_seconds(
        sizes["batch"],
        (sizes["size"],) * 2,
        (sizes["window"],) * 2,
        sizes["features_in"],
        sizes["features_out"],
        1,
        sample.dtype,
        chip,
    )
    results = sizes["batch"] * sizes["size"] ** 2 * sizes["features_out"]
    return _with_traffic(mxu, results, sample, chip)


def _attention_seconds(sample: Sample, chip: ChipProfile) -> Any:
    """Two products beside what the kernels move, scores in f32."""
    heads, length, size = (sample.sizes[name] for name in ("heads", "length", "size"))
    mxu = compute.matmul_seconds(heads, length, size, length, sample.dtype, chip)
    mxu = mxu + compute.matmul_seconds(heads, length, length, size, sample.dtype, chip)
    hbm = compute.hbm_seconds(sample.hbm_bytes, chip)
    total = compute.roofline_seconds(mxu, 0.0, hbm, chip.calibration.overlap)
    return total + sample.kernels * compute.kernel_overhead_seconds(chip)


def _move_seconds(sample: Sample, chip: ChipProfile) -> Any:
    elements = sample.sizes["rows"] * sample.sizes["width"]
    if sample.family == "gather":
        return compute.gather_seconds(elements, chip)
    return compute.scatter_seconds(elements, chip)


_PREDICTED = {
    "elementwise": lambda sample, chip: _stream_seconds(sample, chip, reduces=False),
    "reduction": lambda sample, chip: _stream_seconds(sample, chip, reduces=True),
    "matmul": _matmul_seconds,
    "batched_matmul": _matmul_seconds,
    "convolution": _convolution_seconds,
    "attention": _attention_seconds,
    "gather": _move_seconds,
    "scatter": _move_seconds,
}
