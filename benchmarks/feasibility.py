"""Whether the estimate says of programs near a chip's memory what the TPU compiler says.

    python benchmarks/feasibility.py [--cases NAME ...] [--dry]

Each program is planned in growing batches as if memory were plenty. The last that is estimated to
fit into the memory that the compiler hands out, and the first that is not, are compiled by libtpu
for the real slice, which makes a program or says that it has no room. `--dry` estimates only.

The compiler rematerialises by itself where memory is short, which the estimate does not know of.
Compiled programs are kept in the user's cache folder. No TPU is needed; needs the `tpu` extra.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from convnet import convnet
from fidelity_cases import Made, model

import shardwright as sw
from shardwright.hardware_profiles.chip import ChipProfile, load_chip
from shardwright.planner.compiled_cache import compiled_for_tpu
from shardwright.planner.program import Program

HANDED_OUT = {"v5e": 15.75 * 2**30, "v6e": 31.25 * 2**30}
"""HBM bytes of a device that libtpu 0.0.42.1 gives to programs, as it says where they lack."""
PLENTY = 16
TIME_LIMIT_S = 8.0


@dataclass(frozen=True)
class Case:
    """A program that grows with its batch, on a slice."""

    name: str
    topology: str
    make: Callable[[int], Callable[[], Made]]
    batches: tuple[int, ...]


def _decoder(**changed: object) -> Callable[[int], Callable[[], Made]]:
    sizes = {
        "d_model": 2048, "heads": 16, "kv_heads": 8, "d_ff": 8192, "vocab": 32000,
        "sequence": 2048, "layers": 8,
    }  # fmt: skip
    return lambda batch: model("llama3-8b", **(sizes | changed | {"batch": batch}))


def _mlp(batch: int) -> Callable[[], Made]:
    return model("mlp", features=8192, hidden=32768, layers=6, batch=batch)


CASES = {
    case.name: case
    for case in (
        Case("mlp", "v5e:2x2", _mlp, (8192, 16384, 32768, 49152, 65536)),
        Case("decoder", "v5e:2x2", _decoder(), (32, 48, 64, 80, 96)),
        Case(
            "decoder, large vocabulary",
            "v5e:2x2",
            _decoder(vocab=128256, layers=2),
            (16, 24, 32, 40, 48),
        ),
        Case("decoder, remat dots", "v6e:2x2", _decoder(remat="dots"), (32, 48, 64, 80)),
        Case(
            "convolutions",
            "v5e:2x2",
            lambda batch: lambda: convnet(batch=batch, size=128),
            (4096, 8192, 12288, 16384, 24576),
        ),
    )
}


def _roomy(name: str) -> ChipProfile:
    chip = load_chip(name)
    hbm = chip.hbm_bytes.model_copy(update={"value": PLENTY * chip.hbm_bytes.value})
    return chip.model_copy(update={"hbm_bytes": hbm})


def planned(case: Case, batch: int) -> tuple[sw.Plan, Program]:
    """A plan that memory did not bind."""
    fn, args, donated = case.make(batch)()
    plan = sw.plan(
        fn,
        *args,
        topology=case.topology,
        chip=_roomy(case.topology.partition(":")[0]),
        donate_argnums=donated,
        time_limit_s=TIME_LIMIT_S,
    )
    return plan, Program.trace(fn, *args, donate_argnums=donated)


def around_the_limit(case: Case) -> Iterator[tuple[int, sw.Plan, Program]]:
    """The last batch that is estimated to fit, and the first that is not."""
    limit = HANDED_OUT[case.topology.partition(":")[0]]
    last: tuple[int, sw.Plan, Program] | None = None
    for batch in case.batches:
        now = (batch, *planned(case, batch))
        if now[1].estimate.peak_memory_bytes > limit:
            yield from ((last, now) if last is not None else (now,))
            return
        last = now
    if last is not None:
        yield last


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--dry", action="store_true", help="estimate only")
    given = parser.parse_args()
    print("| program | batch | estimated GiB | part of the limit | estimate | compiler | says |")
    print("|---" * 7 + "|", flush=True)
    agreed: list[bool] = []
    for case in (CASES[name] for name in given.cases):
        limit = HANDED_OUT[case.topology.partition(":")[0]]
        for batch, plan, program in around_the_limit(case):
            peak = plan.estimate.peak_memory_bytes
            told = f"| {case.name} on {case.topology} | {batch} | {peak / 2**30:.2f} "
            told += f"| {peak / limit:.3f} | {'fits' if peak <= limit else 'no room'} "
            if given.dry:
                print(f"{told}| | |", flush=True)
                continue
            refused = compiled_for_tpu(plan, program).refused
            agreed.append((peak <= limit) == (not refused))
            print(f"{told}| {'no room' if refused else 'fits'} | {refused} |", flush=True)
    if agreed:
        print(f"\n{sum(agreed)} of {len(agreed)} verdicts agree")


if __name__ == "__main__":
    main()
