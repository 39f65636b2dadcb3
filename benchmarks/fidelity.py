"""How well predictions agree with the TPU compiler, over programs and slices.

    python benchmarks/fidelity.py [--cases NAME ...] [--folder FOLDER] [--plan-again] [--details]

Each program is planned for its slice, compiled by libtpu under its plan (`sw.verify`), and told in
one row: megabytes of collectives, peak memory and seconds of compute, predicted and compiled. What
the compiler did differently follows; with `--details`, every kind of collective too.

FOLDER keeps plans and compiled programs. A kept plan is priced again by the code as it is, and is
compiled again only where the annotated program is another; `--plan-again` plans anew.

Peak memory is what the compiler says is alive together (`peak_memory_in_bytes`); "used" is
arguments + temporaries + results that alias no argument, with the gaps between buffers. Seconds of
compute are estimated cycles of all kernels at the chip's clock. The median of each column is of its
distances from 1.

No TPU is needed; needs the `tpu` extra. A compile takes from half a minute to many.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from convnet import convnet

import shardwright as sw
from shardwright.models.registry import build
from shardwright.planner import verification
from shardwright.planner.annotated import annotated_stablehlo
from shardwright.planner.evaluation import evaluate_partitioned
from shardwright.planner.partitioned import partition
from shardwright.planner.plan_data import dim_axes
from shardwright.planner.planning import estimate_model
from shardwright.planner.program import Program
from shardwright.planner.search import prepare
from shardwright.planner.tracing import in_mesh
from shardwright.planner.verification_report import Verification

TIME_LIMIT_S = 15.0

Made = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A program on a slice; its mesh is searched where none is given."""

    name: str
    topology: str
    make: Callable[[], Made]
    mesh: dict[str, int] | None = None


def model(name: str, **options: Any) -> Callable[[], Made]:
    """A reference model."""

    def make() -> Made:
        built = build(name, **options)
        return built.train_step, built.example_args, built.donate_argnums

    return make


_LLAMA: dict[str, Any] = {"layers": 4, "batch": 32, "sequence": 2048}
_GROUPED: dict[str, Any] = {
    "layers": 6, "d_model": 1024, "heads": 16, "kv_heads": 4, "d_ff": 4096,
    "vocab": 32000, "sequence": 1024, "batch": 64,
}  # fmt: skip
FOUR_BY_FOUR = {"data": 4, "model": 4}

CASES = {
    case.name: case
    for case in (
        Case("gpt2-124m", "v5e:4x4", model("gpt2-124m", batch=64)),
        Case("gpt2-124m", "v4:2x2x4", model("gpt2-124m", batch=64)),
        Case("llama3-8b, 4 layers", "v5e:4x4", model("llama3-8b", **_LLAMA)),
        Case("llama3-8b, 4 layers, 4 x 4", "v5e:4x4", model("llama3-8b", **_LLAMA), FOUR_BY_FOUR),
        Case(
            "llama3-8b, 2 layers unrolled",
            "v5e:4x4",
            model("llama3-8b", **{**_LLAMA, "layers": 2, "scan_layers": False}),
            FOUR_BY_FOUR,
        ),
        Case("grouped heads", "tpu7x:2x2x2", model("llama3-8b", **_GROUPED)),
        Case(
            "grouped heads, unrolled",
            "v5e:4x4",
            model("llama3-8b", **{**_GROUPED, "layers": 2, "scan_layers": False}),
        ),
        Case("grouped heads", "v5p:2x2x4", model("llama3-8b", **{**_GROUPED, "batch": 128})),
        Case("grouped heads, remat dots", "v6e:4x4", model("llama3-8b", **_GROUPED, remat="dots")),
        Case(
            "grouped heads, no remat",
            "v5e:4x4",
            model("llama3-8b", **_GROUPED, remat="none"),
            {"data": 8, "model": 2},
        ),
        Case("mlp", "v5e:4x4", model("mlp")),
        Case("mlp, 3 layers", "v6e:4x4", model("mlp", layers=3)),
        Case("mlp, narrow", "v5p:2x2x2", model("mlp", features=2048, hidden=8192)),
        Case("convolutions", "v5e:4x4", lambda: convnet(batch=4096)),
        Case("convolutions, wide", "v5p:2x2x2", lambda: convnet(batch=1024, width=128)),
    )
    for case in [Case(f"{case.name} on {case.topology}", case.topology, case.make, case.mesh)]
}


def run(case: Case, folder: Path, *, plan_again: bool) -> Verification:
    """Plans and verifies a case, or takes both from the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    fn, args, donated = case.make()
    kept = folder / "plan.json"
    if kept.exists() and not plan_again:
        plan = sw.Plan.load(kept)
    else:
        plan = sw.plan(
            fn,
            *args,
            topology=case.topology,
            donate_argnums=donated,
            mesh=case.mesh,
            time_limit_s=TIME_LIMIT_S,
        )
        plan.save(kept)
    program = in_mesh(case.mesh, lambda: Program.trace(fn, *args, donate_argnums=donated))
    plan = priced_again(plan, program)
    compiled = _without_locations(program, plan) + json.dumps(plan.compiler_options)
    key = hashlib.sha256(compiled.encode()).hexdigest()
    if not (folder / "key").exists() or (folder / "key").read_text() != key:
        verification.verify(plan, program, keep=folder)
        (folder / "key").write_text(key)
    result = json.loads((folder / "result.json").read_text())
    hlo = (folder / "compiled.hlo").read_text()
    return verification.verification(plan, hlo, result, "tpu")


def _without_locations(program: Program, plan: sw.Plan) -> str:
    text = annotated_stablehlo(program, plan)
    return "\n".join(line.split(" loc(")[0] for line in text.splitlines() if line[:1] != "#")


def priced_again(plan: sw.Plan, program: Program) -> sw.Plan:
    """A plan with the estimate that the code as it is gives it."""
    data = plan.data
    prepared = prepare(program)
    partitioned = partition(
        program,
        prepared.graph,
        plan.mesh_axes,
        plan.constraints(),
        [dim_axes(tensor.spec) for tensor in data.program.inputs],
        [dim_axes(tensor.spec) for tensor in data.program.outputs],
    )
    mesh = plan.logical_mesh
    evaluation = evaluate_partitioned(
        prepared.graph, prepared.fusions, prepared.buffers, partitioned, mesh
    )
    estimate = estimate_model(prepared, evaluation, mesh.slice, None)
    return sw.Plan(data.model_copy(update={"estimate": estimate}))


HEADER = (
    "| program | mesh | collectives MB, predicted | compiled | ratio | peak GB, predicted "
    "| compiled | ratio | used GB | compute ms, predicted | compiled | ratio |\n"
    + "|---" * 12 + "|"
)  # fmt: skip


def ratios(found: Verification) -> tuple[float, float, float]:
    """Predicted over compiled: bytes of collectives, peak memory, compute."""
    memory, time = found.memory, found.time
    return (
        found.predicted_bytes / found.compiled_bytes,
        memory.predicted_peak / (memory.compiled_peak or memory.compiled_used),
        time.predicted_compute / (time.compiled_compute or 1.0),
    )


def row(name: str, found: Verification) -> str:
    """A case as a line of the table."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in found.mesh_axes.items())
    memory, time = found.memory, found.time
    moved, peak, compute = ratios(found)
    return (
        f"| {name} | {mesh} | {found.predicted_bytes / 1e6:.1f} | {found.compiled_bytes / 1e6:.1f} "
        f"| {moved:.3f} | {memory.predicted_peak / 1e9:.3f} "
        f"| {(memory.compiled_peak or 0) / 1e9:.3f} | {peak:.3f} "
        f"| {memory.compiled_used / 1e9:.3f} | {time.predicted_compute * 1e3:.2f} "
        f"| {(time.compiled_compute or 0) * 1e3:.2f} | {compute:.3f} |"
    )


def summary(found: list[Verification]) -> Iterator[str]:
    """Medians and worst cases."""
    names = ("collective bytes", "peak memory", "compute")
    for name, column in zip(names, zip(*map(ratios, found), strict=True), strict=True):
        distances = [abs(ratio - 1) for ratio in column]
        yield (
            f"* {name}: median distance {statistics.median(distances):.1%}, ratios "
            f"{min(column):.3f} to {max(column):.3f}"
        )
    kinds = []
    for one in found:
        by_kind: dict[str, list[float]] = {}
        for line in one.collectives:
            sums = by_kind.setdefault(line.kind, [0.0, 0.0])
            sums[0] += line.predicted_bytes
            sums[1] += line.compiled_bytes
        kinds += [abs(a - b) / max(a, b) for a, b in by_kind.values() if max(a, b) > 1e6]
    yield (
        f"* collective bytes by kind, those above 1 MB: median distance "
        f"{statistics.median(kinds):.1%}, worst {max(kinds):.1%}"
    )


def details(found: Verification) -> Iterator[str]:
    """The collectives of a case by kind and axes."""
    yield "| collective | over | predicted MB | runs | compiled MB | runs |"
    yield "|---" * 6 + "|"
    for line in found.collectives:
        yield (
            f"| {line.kind} | {' x '.join(line.axes)} | {line.predicted_bytes / 1e6:.1f} "
            f"| {line.predicted_runs:.0f} | {line.compiled_bytes / 1e6:.1f} "
            f"| {line.compiled_runs:.0f} |"
        )


def main() -> None:
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("fidelity"))
    parser.add_argument("--plan-again", action="store_true")
    parser.add_argument("--details", action="store_true", help="every kind of collective")
    given = parser.parse_args()
    print(HEADER, flush=True)
    found: dict[str, Verification] = {}
    for name in given.cases:
        folder = given.folder / "".join(c if c.isalnum() else "-" for c in name)
        try:
            found[name] = run(CASES[name], folder, plan_again=given.plan_again)
        except sw.ShardwrightError as error:
            print(f"| {name} | {error} |", flush=True)
            continue
        print(row(name, found[name]), flush=True)
    print("\n", *summary(list(found.values())), sep="\n")
    print("\nWhat the compiler did differently:\n")
    for name, one in found.items():
        for note in one.notes:
            print(f"* {name}: {note}")
    if given.details:
        for name, one in found.items():
            print(f"\n{name}:\n", *details(one), sep="\n")


if __name__ == "__main__":
    main()
