"""Whether the estimate says of programs near a chip's memory what the TPU compiler says.

    python benchmarks/feasibility.py [--cases NAME ...] [--dry]

Each program of `feasibility_cases.py` is planned as if memory were plenty, in two sizes: one whose
plan is estimated to take about 5 % less than the memory that the compiler hands out, and one whose
plan takes about 5 % more. Both are compiled by libtpu for the slice, which makes a program or says
that it has no room. `--dry` estimates only.

Compiled programs are kept in the user's cache folder. No TPU is needed; needs the `tpu` extra.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from feasibility_cases import CASES, Case

import shardwright as sw
from shardwright.hardware_profiles.chip import ChipProfile, load_chip
from shardwright.planner.compiled_cache import Compiled, compiled_for_tpu
from shardwright.planner.program import Program

HANDED_OUT = {
    "v2": 7.48, "v3": 15.48, "v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75,
}  # fmt: skip
"""GiB of HBM of a device that libtpu 0.0.42.1 gives to programs, as it says where they lack."""
TARGETS = (0.95, 1.05)
"""Parts of that memory that plans are to take."""
NEAR = 0.04
"""A size whose plan is as near as this to its target is taken."""
PLENTY = 16
TIME_LIMIT_S = 4.0
MOST_TRIES = 4
GIB = 2**30


def _roomy(name: str) -> ChipProfile:
    chip = load_chip(name)
    hbm = chip.hbm_bytes.model_copy(update={"value": PLENTY * chip.hbm_bytes.value})
    return chip.model_copy(update={"hbm_bytes": hbm})


def planned(case: Case, size: int) -> tuple[sw.Plan, Program]:
    """A plan that memory did not bind."""
    fn, args, donated = case.make(size)
    program = Program.trace(fn, *args, donate_argnums=donated)
    chip = _roomy(case.topology.partition(":")[0])
    plan = sw.plan(program, topology=case.topology, chip=chip, time_limit_s=TIME_LIMIT_S)
    return plan, program


def around_the_limit(case: Case) -> Iterator[tuple[int, sw.Plan, Program]]:
    """A size whose plan is estimated to fit closely, and one whose plan closely is not."""
    limit = HANDED_OUT[case.topology.partition(":")[0]] * GIB
    size = case.begin
    for target in TARGETS:
        for _ in range(MOST_TRIES):
            plan, program = planned(case, size)
            part = plan.estimate.peak_memory_bytes / limit
            if abs(part - target) < NEAR:
                break
            size = max(1, round(size * target / part / case.step)) * case.step
        yield size, plan, program
        size = round(size * TARGETS[-1] / part / case.step) * case.step


def _needs(made: Compiled) -> str:
    """GiB that a compiled program reserves, or what the compiler said instead."""
    if made.refused:
        return made.refused
    memory = made.result["memory"]
    return f"{memory['peak'] / GIB:.2f} GiB alive together"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--dry", action="store_true", help="estimate only")
    given = parser.parse_args()
    print(
        "| program | mesh | size | estimated GiB | of the limit | estimate | compiler | it says |"
    )
    print("|---" * 8 + "|", flush=True)
    agreed: list[bool] = []
    for case in CASES:
        if case.name not in given.cases:
            continue
        limit = HANDED_OUT[case.topology.partition(":")[0]] * GIB
        for size, plan, program in around_the_limit(case):
            peak = plan.estimate.peak_memory_bytes
            mesh = " x ".join(f"{axis} {count}" for axis, count in plan.mesh_axes.items())
            told = f"| {case.name} on {case.topology} | {mesh} | {size} | {peak / GIB:.2f} "
            told += f"| {peak / limit:.3f} | {'fits' if peak <= limit else 'no room'} "
            if given.dry:
                print(f"{told}| | |", flush=True)
                continue
            made = compiled_for_tpu(plan, program)
            agrees = (peak <= limit) == (not made.refused)
            agreed.append(agrees)
            verdict = "no room" if made.refused else "fits"
            if not agrees:
                verdict = f"*{verdict}*"
            print(f"{told}| {verdict} | {_needs(made)} |", flush=True)
    if agreed:
        print(f"\n{sum(agreed)} of {len(agreed)} verdicts agree")


if __name__ == "__main__":
    main()
