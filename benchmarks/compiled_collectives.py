"""Compares the collectives and the memory of plans with what the TPU compiler makes of them.

    python benchmarks/compiled_collectives.py [--cases NAME ...] [--keep FOLDER]

Each program is planned, lowered under its plan for the devices of a slice that is only described,
compiled by libtpu, and read back. For each kind of collective and size of its groups, the table
tells the megabytes of one step on one device (the larger of input and output, times runs) and the
number of runs; rows that differ by more than 5% list the largest collectives on both sides. Memory
is the estimate's peak beside arguments + temporaries + outputs - aliases of the executable.

No TPU is needed; needs the `tpu` extra. Each case runs in a process of its own, for a minute or
more. `--keep` writes the plans and the scheduled HLO to a folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIME_LIMIT_S = 20.0
AGREES = 0.05
SHOWN = 4


@dataclass(frozen=True)
class Case:
    """A program on a slice, planned on a given mesh or on the best."""

    name: str
    model: str
    topology: str
    mesh: dict[str, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)


LLAMA = {"layers": 4, "batch": 32, "sequence": 2048}
CASES = {
    case.name: case
    for case in (
        Case("llama3-8b, 4 layers", "llama3-8b", "v5e:4x4", None, LLAMA),
        Case("llama3-8b, 4 layers, 4x4", "llama3-8b", "v5e:4x4", {"data": 4, "model": 4}, LLAMA),
        Case(
            "llama3-8b, 2 layers unrolled",
            "llama3-8b",
            "v5e:4x4",
            {"data": 4, "model": 4},
            LLAMA | {"layers": 2, "scan_layers": False},
        ),
        Case("gpt2-124m", "gpt2-124m", "v5e:4x4", None, {"batch": 64}),
        Case("mlp", "mlp", "v5e:4x4"),
    )
}


@dataclass(frozen=True)
class Collective:
    """A collective of a plan or of a compiled program, alike."""

    kind: str
    group: int
    nbytes: float
    count: float
    where: str


def compile_case(case: Case, keep: Path | None) -> dict[str, Any]:
    """Plans and compiles a case in this process; what is compared, as JSON data."""
    from jax.experimental import topologies

    import shardwright as sw
    from shardwright.models.registry import build
    from shardwright.planner.compiled import read_collectives

    model = build(case.model, **case.options)
    plan = sw.plan(
        model.train_step,
        *model.example_args,
        topology=case.topology,
        donate_argnums=model.donate_argnums,
        mesh=case.mesh,
        time_limit_s=TIME_LIMIT_S,
    )
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=case.topology)
    lowered = plan.lower(model.train_step, *model.example_args, devices=slice_.devices)
    compiled = lowered.compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    if keep is not None:
        plan.save(keep / f"{case.name}.json")
        (keep / f"{case.name}.hlo").write_text(text)
    predicted = [
        Collective(
            c.kind,
            2
            if c.kind == "collective_permute"
            else math.prod(plan.mesh_axes[axis] for axis in c.axes),
            c.nbytes,
            c.count,
            f"{c.op} {c.dtype}{c.shape} at {Path(c.source).name}",
        )
        for c in plan.estimate.collectives
    ]
    found = [
        Collective(c.kind, c.group, c.nbytes, c.count, c.op_name) for c in read_collectives(text)
    ]
    return {
        "mesh": plan.mesh_axes,
        "step_s": plan.estimate.step_time_s,
        "predicted": [asdict(c) for c in predicted],
        "compiled": [asdict(c) for c in found],
        "memory": [
            plan.estimate.peak_memory_bytes,
            memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes,
            memory.peak_memory_in_bytes,
        ],
    }


Groups = dict[tuple[str, int], list[Collective]]


def by_group(collectives: list[dict[str, Any]]) -> Groups:
    """Collectives by kind and size of group, those that move most first."""
    groups: Groups = defaultdict(list)
    for collective in (Collective(**c) for c in collectives):
        if collective.group > 1:
            groups[collective.kind, collective.group].append(collective)
    for members in groups.values():
        members.sort(key=lambda c: -c.nbytes * c.count)
    return groups


def table(case: Case, result: dict[str, Any]) -> Iterator[str]:
    """The lines that tell a case."""
    mesh = " x ".join(f"{name} {size}" for name, size in result["mesh"].items())
    yield f"\n### {case.name} on {case.topology}, mesh {mesh}\n"
    yield "| collective | group | predicted MB | runs | compiled MB | runs | ratio |"
    yield "|---" * 7 + "|"
    predicted, compiled = by_group(result["predicted"]), by_group(result["compiled"])
    different = []
    for key in sorted(predicted.keys() | compiled.keys()):
        told, made = predicted.get(key, []), compiled.get(key, [])
        (told_mb, told_runs), (made_mb, made_runs) = _megabytes(told), _megabytes(made)
        ratio = told_mb / made_mb if made_mb else math.inf
        yield (
            f"| {key[0]} | {key[1]} | {told_mb:.1f} | {told_runs:.0f} | {made_mb:.1f} "
            f"| {made_runs:.0f} | {ratio:.3f} |"
        )
        if abs(ratio - 1) > AGREES:
            different.append((key, told, made))
    everything = [_megabytes([c for m in g.values() for c in m]) for g in (predicted, compiled)]
    yield (
        f"| all | | {everything[0][0]:.1f} | {everything[0][1]:.0f} | {everything[1][0]:.1f} "
        f"| {everything[1][1]:.0f} | {everything[0][0] / everything[1][0]:.3f} |"
    )
    estimate, used, peak = (nbytes / 1e9 for nbytes in result["memory"])
    yield (
        f"\nPeak memory: {estimate:.2f} GB predicted, {used:.2f} GB compiled "
        f"(`peak_memory_in_bytes` {peak:.2f} GB): {estimate / used:.3f}."
    )
    for (kind, group), told, made in different:
        yield f"\n{kind} over {group}, the largest:\n"
        for side, members in (("predicted", told), ("compiled", made)):
            for c in members[:SHOWN]:
                yield f"* {side} {c.nbytes / 1e6:.2f} MB x {c.count:.0f}: `{c.where}`"


def _megabytes(collectives: list[Collective]) -> tuple[float, float]:
    return (
        sum(c.nbytes * c.count for c in collectives) / 1e6,
        sum(c.count for c in collectives),
    )


def run(case: Case, keep: Path | None) -> dict[str, Any]:
    """Compiles a case in a process of its own: a program that the compiler dislikes can abort."""
    environment = os.environ | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    command = [sys.executable, __file__, "--child", case.name]
    if keep is not None:
        command += ["--keep", str(keep)]
    child = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(child.stdout.splitlines()[-1]))


def main() -> None:
    """Compiles and compares the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--keep", type=Path, help="folder for plans and scheduled HLO")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    if given.child:
        print(json.dumps(compile_case(CASES[given.child], given.keep)))
        return
    for name in given.cases:
        print(*table(CASES[name], run(CASES[name], given.keep)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
