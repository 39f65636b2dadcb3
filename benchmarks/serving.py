"""Serving steps as planned, beside what the TPU compiler makes of them.

    python benchmarks/serving.py [--topology v5e:2x4] [--layers 4] [--batch 64] [--context 8192]

Llama 3 8B with fewer layers: decoding with weights in bf16 and in int8, with the cache in int8 too,
and prefill. Each is planned and compiled by libtpu for the slice, which need not be here. Told for
each: step time, memory and bytes of collectives, predicted and compiled. A minute each; needs the
`tpu` extra.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "decode, bf16": {"step": "decode"},
    "decode, int8": {"step": "decode", "weights": "int8"},
    "decode, int8 with its cache": {"step": "decode", "weights": "int8", "cache_dtype": "int8"},
    "prefill, bf16": {"step": "prefill", "batch": 8, "prompt": 1024},
}
TIME_LIMIT_S = 10.0


def compare(case: dict[str, Any], given: argparse.Namespace) -> list[str]:
    """One row of the table: step, memory and collectives, each predicted and compiled."""
    import shardwright as sw
    from shardwright.models import build

    sizes = {"layers": given.layers, "batch": given.batch, "context": given.context}
    model = build("llama3-8b", **sizes | case)
    plan = sw.plan(
        model.step, *model.example_args, topology=given.topology,
        donate_argnums=model.donate_argnums, time_limit_s=TIME_LIMIT_S,
    )  # fmt: skip
    found = sw.verify(plan, model.step, *model.example_args, compiler="tpu")
    if not found.fits:
        return [found.problem or "does not fit"]
    memory, times = found.memory, found.time
    pairs = [
        (times.predicted_step * 1e3, (times.compiled_step or 0.0) * 1e3, "ms"),
        (memory.predicted_peak / 1e9, (memory.compiled_peak or memory.compiled_used) / 1e9, "GB"),
        (found.predicted_bytes / 1e6, found.compiled_bytes / 1e6, "MB"),
    ]
    return [f"{ours:.3g} / {theirs:.3g} {unit}" for ours, theirs, unit in pairs]


def main() -> None:
    """Prints the table."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    given = parser.parse_args()
    print(f"llama3-8b with {given.layers} layers on {given.topology}, predicted / compiled\n")
    print("| step | time | memory | collectives |\n|---|---|---|---|", flush=True)
    for name, case in CASES.items():
        print(f"| {name} | {' | '.join(compare(case, given))} |", flush=True)


if __name__ == "__main__":
    main()
