"""Plans a decoder with plain and with flash attention, and asks the TPU compiler about both.

    python benchmarks/kernels.py [--topology v5e:2x4] [--sequence 4096] [--layers 2]

Each program is planned and compiled by libtpu for the slice, which need not be here. Told for each:
the predicted step time and memory, the compiler's memory, the collectives of both by kind, and how
often the compiled program calls a Pallas kernel. A minute or two; needs the `tpu` extra.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

LLAMA = {"batch": 16, "vocab": 32768}
TIME_LIMIT_S = 20.0


def check(attention: str, given: argparse.Namespace) -> dict[str, Any]:
    """Plans and compiles one program; its figures."""
    import shardwright as sw
    from shardwright.models import build

    options = LLAMA | {"layers": given.layers, "sequence": given.sequence}
    model = build("llama3-8b", **options, attention=attention)
    plan = sw.plan(
        model.train_step,
        *model.example_args,
        topology=given.topology,
        donate_argnums=model.donate_argnums,
        time_limit_s=TIME_LIMIT_S,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = sw.verify(plan, model.train_step, *model.example_args, compiler="tpu", keep=folder)
        hlo = (Path(folder) / "compiled.hlo").read_text() if found.fits else ""
    collectives: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in found.collectives:
        collectives[row.kind][0] += row.predicted_bytes
        collectives[row.kind][1] += row.compiled_bytes
    return {
        "mesh": plan.mesh_axes,
        "step": plan.estimate.step_time_s,
        "compute": plan.estimate.compute_time_s,
        "exposed": plan.estimate.exposed_collective_time_s,
        "predicted": plan.estimate.peak_memory_bytes,
        "problem": found.problem,
        "compiled": found.memory.compiled_peak,
        "used": found.memory.compiled_used,
        "collectives": collectives,
        "calls": len(re.findall(r'custom_call_target="tpu_custom_call"', hlo)),
        "specs": [(k.name, k.in_specs[0]) for k in plan.data.kernels],
        "seconds": found.compile_seconds,
    }


def report(attention: str, told: dict[str, Any]) -> None:
    """Prints the figures of one program."""
    print(f"\n### attention={attention!r}, mesh {told['mesh']}\n")
    print(
        f"step {told['step'] * 1e3:.1f} ms: compute {told['compute'] * 1e3:.1f} ms, "
        f"exposed collectives {told['exposed'] * 1e3:.1f} ms"
    )
    peak = told["compiled"]
    print(
        f"peak memory {told['predicted'] / 1e9:.2f} GB predicted, "
        + (f"{peak / 1e9:.2f} GB alive at once" if peak else "unknown alive at once")
        + f" and {told['used'] / 1e9:.2f} GB used as compiled "
        f"({told['seconds']:.0f} s to compile){told['problem'] and ': ' + told['problem']}"
    )
    print(f"Pallas kernels called in the compiled program: {told['calls']}")
    for name, spec in told["specs"]:
        print(f"* {name}: queries sharded as {spec}")
    print("\n| collective | predicted MB | compiled MB |\n|---|---|---|")
    for kind, (predicted, compiled) in sorted(told["collectives"].items()):
        print(f"| {kind} | {predicted / 1e6:.1f} | {compiled / 1e6:.1f} |")


def main() -> None:
    """Plans, compiles and compares both kinds of attention."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--attention", nargs="+", default=["dot", "flash"])
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    told = {}
    for attention in given.attention:
        told[attention] = check(attention, given)
        report(attention, told[attention])
    if {"dot", "flash"} <= told.keys():
        dot, flash = told["dot"], told["flash"]
        print(
            f"\nFlash against dot: {flash['step'] / dot['step']:.2f} of the step time, "
            f"{flash['predicted'] / dot['predicted']:.2f} of the memory as predicted, "
            f"{flash['used'] / dot['used']:.2f} as compiled."
            if dot["used"]
            else "\nThe compiler finds no room for plain attention."
        )


if __name__ == "__main__":
    main()
