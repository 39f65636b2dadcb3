"""Compiles the families of calibration programs: what `calibrate` starts as a process of its own.

    python -m shardwright.planner.calibration_child TOPOLOGY CHIP_CONFIG FAMILIES DTYPES

Prints one JSON line for every program: the cycles that libtpu estimates for its kernels, copies to
other layouts apart.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.planner.calibration_programs import NUMPY_NAMES, CalibrationProgram, programs
from shardwright.planner.hlo import HBM, HloModule, Instruction, parse_hlo

_SCOPE = "calibration_"


@dataclass
class _Found:
    cycles: int = 0
    kernels: int = 0
    unknown: int = 0
    hbm_bytes: float = 0.0
    vmem_bytes: float = 0.0


def compile_family(device: Any, chosen: Sequence[CalibrationProgram]) -> HloModule:
    """All programs in one module, kept apart by barriers and told by the names of their scopes."""
    import jax
    from jax import lax
    from jax.sharding import SingleDeviceSharding

    sharding = SingleDeviceSharding(device)

    def together(*arguments: Any) -> list[Any]:
        results, first = [], 0
        for number, program in enumerate(chosen):
            own = arguments[first : first + len(program.arguments)]
            first += len(own)
            with jax.named_scope(f"{_SCOPE}{number}"):
                results.append(program.function(*lax.optimization_barrier(own)))
        return results

    arguments = [
        jax.ShapeDtypeStruct(shape, NUMPY_NAMES[dtype], sharding=sharding)
        for program in chosen
        for shape, dtype in program.arguments
    ]
    lowered = jax.jit(together).trace(*arguments).lower(lowering_platforms=("tpu",))
    return parse_hlo(lowered.compile().as_text())


def cycles_by_program(module: HloModule) -> dict[int, _Found]:
    """Number of a program -> what the compiler estimates for its kernels, and what they touch."""
    counts = module.run_counts()
    found: dict[int, _Found] = defaultdict(_Found)
    inside = {
        called
        for lines in module.computations.values()
        for line in lines
        if line.opcode != "while"
        for called in line.called
    }
    for name, lines in module.computations.items():
        if name in inside or not counts.get(name):
            continue
        by_name = {line.name: line for line in lines}
        for line in lines:
            kernel = line.opcode == "fusion" or '"estimated_cycles"' in line.text
            scope = _scope(line, by_name) if kernel else None
            if scope is None:
                continue
            one = found[scope]
            if line.estimated_cycles is None:
                one.unknown += 1
            elif line.opcode != "copy":
                one.cycles += round(line.estimated_cycles * counts[name])
                one.kernels += 1
                read = [by_name[o] for o in line.operands if o in by_name]
                for array in (a for touched in (line, *read) for a in touched.arrays):
                    if array.space == HBM:
                        one.hbm_bytes += array.nbytes
                    else:
                        one.vmem_bytes += array.nbytes
    return found


def _scope(line: Instruction, by_name: dict[str, Instruction]) -> int | None:
    """The program that a kernel belongs to; one without a name, by what it reads."""
    pending, seen = [line], {line.name}
    while pending:
        one = pending.pop(0)
        found = re.search(rf"{_SCOPE}(\d+)\b", one.op_name)
        if found:
            return int(found[1])
        more = [o for o in one.operands if o in by_name and o not in seen]
        seen.update(more)
        pending += [by_name[o] for o in more]
    return None


def main(topology: str, chip_config: str, families: str, dtypes: str) -> None:
    """Compiles families, one module each, and prints what was found.

    Args:
      chip_config: libtpu's name of a configuration of the chip, or "default".
      families, dtypes: names with commas between them.
    """
    from jax.experimental import topologies

    options = {} if chip_config == "default" else {"chip_config_name": chip_config}
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    for family in families.split(","):
        chosen = list(programs(family, tuple(dtypes.split(","))))
        found = cycles_by_program(compile_family(described.devices[0], chosen))
        for number, program in enumerate(chosen):
            print(json.dumps(_sample(program, found.get(number, _Found()))), flush=True)


def _sample(program: CalibrationProgram, found: _Found) -> dict[str, Any]:
    known = found.kernels > 0 and not found.unknown
    return {
        "family": program.family,
        "dtype": program.dtype,
        "sizes": program.sizes,
        "kernels": found.kernels,
        "cycles": found.cycles if known else None,
        "hbm_bytes": found.hbm_bytes,
        "vmem_bytes": found.vmem_bytes,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
