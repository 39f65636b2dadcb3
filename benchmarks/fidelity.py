"""How well predictions agree with the TPU compiler, over programs and slices.

    python benchmarks/fidelity.py [--cases NAME ...] [--plan-again] [--details]

Each program is planned for its slice, compiled by libtpu under its plan (`sw.verify`), and told in
one row: megabytes of collectives, peak memory and seconds of compute, predicted and compiled. What
the compiler did differently follows; with `--details`, every kind of collective too.

Plans and compiled programs are kept in the user's cache folder. A kept plan is priced again by the
code as it is, and is compiled again only where the annotated program is another; `--plan-again`
plans anew.

Peak memory is what the compiler says is alive together (`peak_memory_in_bytes`); "used" is
arguments + temporaries + results that alias no argument, with the gaps between buffers. Seconds of
compute are estimated cycles of all kernels at the chip's clock. The median of each column is of its
distances from 1.

No TPU is needed; needs the `tpu` extra. A compile takes from half a minute to many.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from fidelity_cases import CASES, Case

import shardwright as sw
from shardwright.errors import ShardwrightError
from shardwright.hardware_profiles.chip import load_chip
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner import verification
from shardwright.planner.cache_folder import cache_folder
from shardwright.planner.compiled_cache import compiled_for_tpu
from shardwright.planner.evaluation import evaluate_partitioned
from shardwright.planner.partitioning import partition
from shardwright.planner.plan_data import dim_axes
from shardwright.planner.plan_making import estimate_model
from shardwright.planner.prepared import prepare
from shardwright.planner.program import Program
from shardwright.planner.tracing import in_mesh
from shardwright.planner.verification_report import Verification

TIME_LIMIT_S = 15.0


def run(case: Case, *, plan_again: bool) -> Verification:
    """Plans and verifies a case; the plan and the compiled program are kept."""
    fn, args, donated = case.make()
    program = in_mesh(case.mesh, lambda: Program.trace(fn, *args, donate_argnums=donated))
    kept = cache_folder("fidelity") / f"{case.name.replace(':', '-').replace(' ', '-')}.json"
    plan = sw.Plan.load(kept) if kept.exists() and not plan_again else None
    if plan is None or plan.data.program.fingerprint != program.fingerprint:
        plan = sw.plan(
            fn,
            *args,
            topology=case.topology,
            donate_argnums=donated,
            mesh=case.mesh,
            time_limit_s=TIME_LIMIT_S,
        )
        kept.parent.mkdir(parents=True, exist_ok=True)
        plan.save(kept)
    return verified(priced_again(plan, program), program)


def verified(plan: sw.Plan, program: Program) -> Verification:
    """A plan beside what libtpu makes of it, or made of it before."""
    compiled = compiled_for_tpu(plan, program)
    if compiled.refused:
        raise ShardwrightError(compiled.refused, where=plan.data.topology, do="Plan it again")
    return verification.verification(plan, compiled.hlo, compiled.result, "tpu")


def priced_again(plan: sw.Plan, program: Program) -> sw.Plan:
    """A plan with the estimate that the code as it is gives it.

    What measurements on devices correct in the compiler's estimates stays out of it.
    """
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
    chip = load_chip(data.topology.rpartition("*")[2].partition(":")[0])
    chip = chip.model_copy(update={"calibration": chip.calibration.as_compiled()})
    mesh = LogicalMesh.from_json(data.mesh, chip)
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
    parser.add_argument("--plan-again", action="store_true")
    parser.add_argument("--details", action="store_true", help="every kind of collective")
    given = parser.parse_args()
    print(HEADER, flush=True)
    found: dict[str, Verification] = {}
    for name in given.cases:
        try:
            found[name] = run(CASES[name], plan_again=given.plan_again)
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
