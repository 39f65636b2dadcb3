"""Compares predicted kernel times with libtpu's schedules and estimates.

    python benchmarks/compute_fidelity.py [v5e v5p v6e]

Two tables a chip, in cycles, with nothing taken off for efficiency:

* Elementwise operations: the instruction bundles that libtpu schedules for one more operation on
  [256, 128] values, one bundle a cycle. This is the program that would run.
* Products, convolutions and reductions: the `estimated_cycles` of the scheduled kernels, layout
  copies left out. These are a compiler's heuristics. They follow the matrix unit closely; operands
  prefetched into VMEM count nothing; memory traffic counts by tiles, whatever the type's width,
  at 36 to 58% of the HBM bandwidth, where copies measured on devices reach 83 to 87%.

No TPU is needed; needs the `tpu` extra. Each chip is compiled for in a process of its own.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.cost_models import compute
from shardwright.cost_models.memory import tiled_bytes
from shardwright.hardware_profiles.chip import ChipProfile, load_chip

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
NUMPY_NAMES = {"f32": "float32", "bf16": "bfloat16", "i8": "int8"}


@dataclass(frozen=True)
class Case:
    """A program, and the units' seconds that the cost models give it."""

    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    program: Callable[..., Any]
    units: Callable[[ChipProfile], tuple[Any, Any]]

    def unit_cycles(self, chip: ChipProfile) -> dict[str, float]:
        """Cycles of each unit."""
        matrix, vector = self.units(chip)
        nbytes = sum(tiled_bytes(shape, self.dtype) for shape in (*self.shapes, self.result))
        hbm = compute.hbm_seconds(nbytes, chip, efficiency=1.0)
        units = {"mxu": matrix, "vpu": vector, "hbm": hbm}
        return {unit: float(seconds) * chip.clock_hz.value for unit, seconds in units.items()}


def matmul(batch: int, m: int, k: int, n: int, dtype: str = "bf16") -> Case:
    """Products [m, k] x [k, n]."""

    def program(x: Any, y: Any) -> Any:
        import jax.numpy as jnp

        wide = "int32" if dtype == "i8" else None
        return jnp.einsum("bmk,bkn->bmn", x, y, preferred_element_type=wide)

    def units(chip: ChipProfile) -> tuple[Any, Any]:
        return compute.matmul_seconds(batch, m, k, n, dtype, chip, efficiency=1.0), 0.0

    shapes = ((batch, m, k), (batch, k, n))
    return Case(f"matmul {batch}x{m}x{k}x{n}", dtype, shapes, (batch, m, n), program, units)


def convolution(
    batch: int, size: int, window: int, features: tuple[int, int], groups: int = 1
) -> Case:
    """A square convolution with as many pixels out as in."""
    features_in, features_out = features

    def program(x: Any, w: Any) -> Any:
        from jax import lax

        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def units(chip: ChipProfile) -> tuple[Any, Any]:
        seconds = compute.convolution_seconds(
            batch,
            (size, size),
            (window, window),
            features_in // groups,
            features_out,
            groups,
            "bf16",
            chip,
            efficiency=1.0,
        )
        return seconds[0], 0.0

    shapes = (
        (batch, size, size, features_in),
        (window, window, features_in // groups, features_out),
    )
    name = f"conv {window}x{window} {batch}x{size}x{size}x{features_in} to {features_out}"
    name += f" groups {groups}" if groups > 1 else ""
    return Case(name, "bf16", shapes, (batch, size, size, features_out), program, units)


def reduction(axis: int | None, dtype: str) -> Case:
    """A sum over one or both dimensions of [8192, 8192], fused with a product."""

    def program(x: Any, y: Any) -> Any:
        return (x * y).sum(axis)

    def units(chip: ChipProfile) -> tuple[Any, Any]:
        return 0.0, compute.vector_seconds(8192**2, dtype, chip, 2.0)

    shape = (8192, 8192)
    result = () if axis is None else (8192,)
    return Case(f"sum over {axis}", dtype, (shape, shape), result, program, units)


def cases() -> list[Case]:
    """Every program that is compared."""
    return [
        matmul(1, 4096, 4096, 4096),
        matmul(1, 4096, 4096, 4096, "i8"),
        matmul(1, 8192, 8192, 8192),
        matmul(1, 2048, 12288, 49152),
        matmul(1, 2048, 2048, 2048),
        *(matmul(1, m, 4096, 4096) for m in (8, 64, 100, 130, 192)),
        matmul(1, 4096, 4096, 192),
        matmul(1, 4096, 192, 4096),
        matmul(1, 8192, 8192, 256),
        matmul(64, 512, 512, 512),
        matmul(64, 1024, 128, 1024),
        matmul(64, 1024, 1024, 128),
        *(convolution(32, 64, 3, (c, c)) for c in (32, 64, 128, 256, 512)),
        convolution(32, 64, 3, (64, 256)),
        convolution(32, 64, 3, (256, 64)),
        convolution(256, 32, 3, (64, 64)),
        convolution(16, 28, 3, (128, 128)),
        convolution(32, 224, 7, (3, 64)),
        convolution(32, 64, 3, (256, 256), groups=256),
        *(reduction(axis, dtype) for dtype in ("f32", "bf16") for axis in (0, 1, None)),
    ]


def compiled_cycles(case: Case, device: Any) -> int:
    """Sum of `estimated_cycles` over the kernels of a compiled program, copies left out."""
    import jax
    from jax.sharding import SingleDeviceSharding

    sharding = SingleDeviceSharding(device)
    arguments = [
        jax.ShapeDtypeStruct(shape, NUMPY_NAMES[case.dtype], sharding=sharding)
        for shape in case.shapes
    ]
    lowered = jax.jit(case.program).trace(*arguments).lower(lowering_platforms=("tpu",))
    total = 0
    for line in lowered.compile().as_text().splitlines():
        estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
        if estimate and not re.search(r" copy\(", line):
            total += int(estimate[1])
    return total


@dataclass(frozen=True)
class VectorCase:
    """An elementwise step x = function(x, y): an operation, and plain ones beside it."""

    op: str
    dtype: str
    function: Callable[[Any, Any], Any]
    plain_ops: int = 0

    def predicted_cycles(self, chip: ChipProfile) -> float:
        """Cycles of one step on [256, 128], the operation and the plain ones one after another."""
        one = compute.vector_seconds(256 * 128, self.dtype, chip, compute.vector_ops(self.op))
        others = compute.vector_seconds(256 * 128, self.dtype, chip, self.plain_ops)
        return float(one + others) * chip.clock_hz.value


def vector_cases() -> list[VectorCase]:
    """Every elementwise operation that is compared."""
    from jax import lax

    functions: list[tuple[str, Callable[[Any, Any], Any], int]] = [
        ("negate", lambda x, y: -(x * y) + y, 2),
        ("compare", lambda x, y: lax.select(x > y, y, x * y), 2),
        ("exponential", lambda x, y: lax.exp(x), 0),
        ("exponential_minus_one", lambda x, y: lax.expm1(x), 0),
        ("log", lambda x, y: lax.log(x), 0),
        ("log_plus_one", lambda x, y: lax.log1p(x), 0),
        ("tanh", lambda x, y: lax.tanh(x), 0),
        ("rsqrt", lambda x, y: lax.rsqrt(x), 0),
        ("sqrt", lambda x, y: lax.sqrt(x), 0),
        ("logistic", lambda x, y: lax.logistic(x), 0),
        ("divide", lambda x, y: y / (x * y + y), 2),
        ("erf", lambda x, y: lax.erf(x * y + y), 2),
        ("power", lax.pow, 0),
    ]
    return [VectorCase(op, dtype, f, ops) for dtype in ("f32", "bf16") for op, f, ops in functions]


SHORT_CHAIN, LONG_CHAIN = 6, 12


def scheduled_bundles(case: VectorCase, device: Any, listings: Path) -> float:
    """Bundles of one step: those of a long chain less those of a short one."""
    import jax
    from jax.sharding import SingleDeviceSharding

    sharding = SingleDeviceSharding(device)
    argument = jax.ShapeDtypeStruct((256, 128), NUMPY_NAMES[case.dtype], sharding=sharding)

    def compiled(length: int) -> int:
        def program(x: Any, y: Any) -> Any:
            for _ in range(length):
                x = case.function(x, y)
            return x

        for listing in listings.iterdir():
            listing.unlink()
        traced = jax.jit(program).trace(argument, argument)
        traced.lower(lowering_platforms=("tpu",)).compile()
        header_lines = 4
        return max(
            len(listing.read_text().splitlines()) - header_lines
            for listing in listings.glob("*final_hlo-static-per-bundle-utilization.txt")
        )

    return (compiled(LONG_CHAIN) - compiled(SHORT_CHAIN)) / (LONG_CHAIN - SHORT_CHAIN)


def compile_for(chip: str, listings: Path) -> None:
    """Prints, one JSON line a case, what libtpu makes of it."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    device = topology.devices[0]
    for vector_case in vector_cases():
        print(json.dumps(scheduled_bundles(vector_case, device, listings)), flush=True)
    for case in cases():
        print(json.dumps(compiled_cycles(case, device)), flush=True)


def compare(chip_name: str) -> None:
    """Prints the tables of one chip."""
    with tempfile.TemporaryDirectory() as listings:
        environment = os.environ | {
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={listings} --xla_jf_dump_llo_text=true",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
        child = subprocess.run(
            [sys.executable, __file__, "--compile", chip_name, listings],
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    found = [json.loads(line) for line in child.stdout.splitlines()]
    chip = load_chip(chip_name)
    rows = [(c.op, c.dtype, "vpu", c.predicted_cycles(chip)) for c in vector_cases()]
    print_table(f"{chip_name}, scheduled bundles", rows, found[: len(rows)])
    kernels = []
    for case in cases():
        bound, cycles = max(case.unit_cycles(chip).items(), key=operator.itemgetter(1))
        kernels.append((case.name, case.dtype, bound, cycles))
    print_table(f"{chip_name}, estimated cycles", kernels, found[len(rows) :])


def print_table(
    title: str, rows: Sequence[tuple[str, str, str, float]], found: Sequence[float]
) -> None:
    """Prints predictions beside what was found, and mean ratios by the unit that binds."""
    print(f"\n{title:44} bound {'predicted':>12} {'libtpu':>12} {'ratio':>6}")
    logs: dict[str, list[float]] = {}
    for (name, dtype, bound, predicted), cycles in zip(rows, found, strict=True):
        ratio = predicted / cycles if cycles > 0 else math.nan
        if cycles > 0:
            logs.setdefault(bound, []).append(math.log(ratio))
        print(f"{name:38} {dtype:>5} {bound:>5} {predicted:12.0f} {cycles:12.0f} {ratio:6.2f}")
    for bound, values in logs.items():
        print(
            f"geometric mean of the ratios, {bound} bound: {math.exp(statistics.fmean(values)):.2f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_for(sys.argv[2], Path(sys.argv[3]))
    else:
        for name in sys.argv[1:] or TOPOLOGIES:
            compare(name)
            sys.stdout.flush()
