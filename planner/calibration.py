"""Calibrates a chip: compiles small programs with libtpu and fits the compute model to them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from shardwright.cost_models.calibrating import Sample, corrected, fit, predicted_cycles
from shardwright.errors import InputError, ShardwrightError
from shardwright.hardware_profiles.calibration import Calibration
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.planner.calibration_programs import FAMILIES
from shardwright.planner.compiling import check_libtpu

_SHAPES = {2: "2x2", 3: "2x2x1"}
_CHIP_CONFIGS = {"v4": "megacore"}
"""Configurations in which a chip is one device, where that is not libtpu's default."""


@dataclass(frozen=True)
class FamilyFit:
    """How well the model agrees with the samples of a family.

    Attributes:
      estimated: samples that the compiler has an estimate for.
      median_error, worst_error: distance of predicted over estimated cycles from 1; None where
        nothing is predicted.
    """

    family: str
    samples: int
    estimated: int
    median_error: float | None
    worst_error: float | None


@dataclass(frozen=True)
class Calibrated:
    """What was compiled for a chip, and the terms that follow."""

    chip: str
    clock_hz: float
    terms: Calibration
    families: tuple[FamilyFit, ...]
    samples: tuple[Sample, ...]

    def to_json(self) -> str:
        """The data file: terms, agreement by family, and every sample on a line of its own."""
        head = {
            "chip": self.chip,
            "clock_hz": self.clock_hz,
            "terms": self.terms.model_dump(mode="json"),
            "families": [asdict(family) for family in self.families],
        }
        lines = ",\n  ".join(json.dumps(asdict(sample)) for sample in self.samples)
        return json.dumps(head, indent=1)[:-2] + f',\n "samples": [\n  {lines}\n ]\n}}\n'


def calibrate(
    chip: ChipProfile,
    families: Sequence[str] = FAMILIES,
    on_sample: Callable[[Sample], None] | None = None,
    time_limit_s: float = 3600.0,
) -> Calibrated:
    """Compiles the families of programs for a chip and fits its terms; minutes, and no TPU.

    Raises:
      InputError: libtpu is not installed or does not know the chip.
      ShardwrightError: the compiler failed.
    """
    check_libtpu("calibrate")
    samples = []
    for sample in _compiled(chip, families, time_limit_s):
        samples.append(sample)
        if on_sample is not None:
            on_sample(sample)
    return calibrated(chip, samples, f"libtpu {metadata.version('libtpu')}")


def calibrated(chip: ChipProfile, samples: Sequence[Sample], compiler: str) -> Calibrated:
    """The terms that samples of a chip give, and how well they agree with them."""
    terms = fit(samples, chip, compiler)
    told = chip.model_copy(update={"calibration": terms})
    names = dict.fromkeys(sample.family for sample in samples)
    fits = tuple(_agreement(name, [s for s in samples if s.family == name], told) for name in names)
    clock = chip.clock_hz.value
    return Calibrated(chip.name, clock, corrected(terms, chip), fits, tuple(samples))


def _agreement(family: str, samples: Sequence[Sample], chip: ChipProfile) -> FamilyFit:
    errors = []
    for sample in samples:
        told = predicted_cycles(sample, chip) if sample.cycles else None
        if told is not None and sample.cycles:
            errors.append(abs(told / sample.cycles - 1))
    estimated = sum(sample.cycles is not None for sample in samples)
    return FamilyFit(
        family,
        len(samples),
        estimated,
        statistics.median(errors) if errors else None,
        max(errors, default=None),
    )


def _compiled(chip: ChipProfile, families: Sequence[str], time_limit_s: float) -> Iterator[Sample]:
    dtypes = ["bf16", "f32", *(["i8"] if "i8" in chip.peak_flops else [])]
    command = [
        sys.executable,
        "-m",
        "shardwright.planner.calibration_child",
        f"{chip.generation}:{_SHAPES[chip.torus_dimensions.value]}",
        _CHIP_CONFIGS.get(chip.generation, "default"),
        ",".join(families),
        ",".join(dtypes),
    ]
    environment = os.environ | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        for line in child.stdout:
            yield Sample(**json.loads(line))
        said = child.stderr.read().strip().splitlines()
        code = child.wait(time_limit_s)
    if code:
        raise ShardwrightError(
            f"the TPU compiler ended with {code}: {said[-1][:500] if said else 'nothing said'}",
            where=f"calibrate {chip.name}",
            do="Calibrate fewer families (--family) to find the one that it cannot compile",
        )


def check_families(names: Sequence[str]) -> tuple[str, ...]:
    """Families by name.

    Raises:
      InputError: there is no such family.
    """
    for name in names:
        if name not in FAMILIES:
            raise InputError(
                f"there is no family {name!r}",
                where="calibrate",
                do=f"Use some of {', '.join(FAMILIES)}",
            )
    return tuple(names) or FAMILIES
