"""What the kernels of a compiled program take, by line of the model, beside the prediction."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

from shardwright.planner.hlo import HloModule
from shardwright.planner.plan_schema import EstimateModel

_AGAIN = re.compile(r"\.remat\d*(\.|$)")
"""In the names of instructions that the compiler computes again to save memory."""
_NOTICED = 0.02
"""Lines and rematerialisation below this part of the compute are not told."""
_LIKE = 0.1
"""How near the ratio of compiled to predicted is to a product of mesh axes to look like one."""


class KernelComparison(BaseModel):
    """Seconds of the kernels of one line of the program in one step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(description='"file:line" of what a kernel ends with')
    op: str = Field(description="the operation that takes most of them, as planned")
    predicted_s: float
    compiled_s: float


def seconds_by_line(module: HloModule, clock_hz: float) -> dict[str, float]:
    """Source line -> seconds of its kernels in one step, by the compiler's estimate of cycles."""
    counts = module.run_counts()
    found: dict[str, float] = defaultdict(float)
    for name, lines in module.computations.items():
        for line in lines:
            cycles = line.estimated_cycles
            if cycles and counts.get(name):
                found[module.source(line)] += cycles * counts[name] / clock_hz
    return dict(found)


def compare_kernels(
    estimate: EstimateModel, compiled: Mapping[str, float]
) -> list[KernelComparison]:
    """The lines of a plan's estimate beside the compiled program, those that take longest first."""
    rows = [
        KernelComparison(
            source=line.source,
            op=line.op,
            predicted_s=line.seconds,
            compiled_s=compiled.get(line.source, 0.0),
        )
        for line in estimate.compute
        if line.source
    ]
    return sorted(rows, key=lambda row: -max(row.predicted_s, row.compiled_s))


def explain_kernels(
    rows: Sequence[KernelComparison], mesh: Mapping[str, int], module: HloModule, clock_hz: float
) -> Iterator[str]:
    """What the compiler computes more often than was planned, in sentences."""
    total = sum(row.compiled_s for row in rows)
    for row in rows:
        if row.compiled_s < _NOTICED * total or not row.predicted_s:
            continue
        axes = _axes_of(row.compiled_s / row.predicted_s, mesh)
        op = row.op.removeprefix("stablehlo.")
        if axes and op in ("dot_general", "convolution"):
            yield (
                f"{op} at {row.source} takes {row.compiled_s / row.predicted_s:.1f} times what "
                f"was predicted, as if it were replicated over {' x '.join(axes)}"
            )
    again, seconds = rematerialised(module, clock_hz)
    if seconds > _NOTICED * total:
        yield (
            f"the compiler rematerialises: {again} kernels run again to save memory, "
            f"{seconds * 1e3:.2f} ms"
        )


def rematerialised(module: HloModule, clock_hz: float) -> tuple[int, float]:
    """Kernels that the compiler runs again of itself to save memory, and their seconds."""
    counts = module.run_counts()
    cycles = [
        (line.estimated_cycles or 0) * counts[name]
        for name, lines in module.computations.items()
        if counts.get(name)
        for line in lines
        if line.estimated_cycles and _AGAIN.search(line.name)
    ]
    return len(cycles), sum(cycles) / clock_hz


def _axes_of(ratio: float, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest mesh axes whose sizes have a product near a ratio; none where there are none."""
    names = [name for name, size in mesh.items() if size > 1]
    for count in range(1, len(names) + 1):
        for some in itertools.combinations(names, count):
            if abs(ratio / math.prod(mesh[name] for name in some) - 1) <= _LIKE:
                return some
    return ()
