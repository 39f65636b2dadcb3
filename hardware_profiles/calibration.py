"""What a chip's kernels reach of its peaks: terms fitted to what the TPU compiler estimates.

`shardwright calibrate` writes them. The bundled profiles take theirs from `calibrated/CHIP.json`,
where the compiled samples are too; a profile of one's own may hold them under "calibration".
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(gt=0, le=1)]
Cycles = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(gt=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Correction(_Frozen):
    """A measured speed as a factor of the one that the compiler's estimates give; 1 where none is.

    Attributes:
      factor: below 1 where the compiler is too hopeful.
      source: what was measured, and where it is published.
    """

    factor: Factor = 1.0
    source: str = "Nothing measured is published; the compiler's estimate stands."


class Calibration(_Frozen):
    """Terms of the compute model.

    Cycles are of one TensorCore. A register is 8 x 128 values.

    Attributes:
      compiler: whose estimates they are fitted to.
      hbm_efficiency: part of the HBM bandwidth that elementwise kernels reach.
      matmul_efficiency: part of the peak FLOP/s that large products reach.
      weight_cycles_per_row: cycles, for each row of a matrix unit, of changing its weights.
      register_cycles: for each register of values of a narrow type that a kernel goes through, or
        of a reduction's operand, the cycles that do not run beside the traffic with HBM.
      overlap: part of the shorter one's time in which matrix unit and HBM work side by side.
      vmem_weight: what a byte that was fetched ahead into VMEM counts in an elementwise kernel, as
        part of one in HBM.
      kernel_cycles: what a kernel takes besides, to fill and drain its pipeline.
      gather_cycles_per_row: of 128 neighbouring elements gathered.
      scatter_cycles_per_row: of 128 neighbouring elements scattered.
      matmul_correction, hbm_correction: what measurements change.
    """

    compiler: str
    hbm_efficiency: Fraction
    matmul_efficiency: Fraction
    weight_cycles_per_row: Cycles
    register_cycles: dict[Literal["bf16", "i8", "reduction"], Cycles]
    overlap: Annotated[float, Field(ge=0, le=1)]
    vmem_weight: Annotated[float, Field(ge=0, le=1)]
    kernel_cycles: Cycles
    gather_cycles_per_row: Cycles
    scatter_cycles_per_row: Cycles
    matmul_correction: Correction = Correction()
    hbm_correction: Correction = Correction()

    def as_compiled(self) -> Calibration:
        """The same without what measurements correct, to be compared with the compiler."""
        none = {"matmul_correction": Correction(), "hbm_correction": Correction()}
        return self.model_copy(update=none)


UNCALIBRATED = Calibration(
    compiler="none",
    hbm_efficiency=0.85,
    matmul_efficiency=0.95,
    weight_cycles_per_row=0.3,
    register_cycles={},
    overlap=1.0,
    vmem_weight=1.0,
    kernel_cycles=0.0,
    gather_cycles_per_row=2.0,
    scatter_cycles_per_row=2.0,
)
"""For a chip without terms of its own: units that overlap fully.

Source: rounded from those of the bundled chips, without what differs among them. Changing weights:
  `estimated_cycles` of libtpu 0.0.42.1 for bf16 [n, 4096] x [4096, 4096], n of 8 to 192, are 35 to
  43 a tile more than streaming takes on v5e (128 rows), 65 to 103 on v6e (256 rows).
"""


@cache
def bundled_calibration(name: str) -> dict[str, Any] | None:
    """The terms of a bundled chip as JSON has them, or None where there are none."""
    file = resources.files(__package__).joinpath("calibrated", f"{name}.json")
    if not file.is_file():
        return None
    terms: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["terms"]
    return terms
