"""Planning time and proven gap against layers, mesh axes, chips and width, stage by stage.

    python benchmarks/planning_time.py [layers] [axes] [chips] [width] [search] [--max-layers 96]

Stages, in CPU seconds of the process (so that a busy machine does not blur them) and, for all
together, wall seconds too: *populate* is Shardy's pass that gives every operation its rule, *graph*
reads the traced module and builds its op graph, nodes, kernels and live ranges; *problem* prices
strategies and reshards on one mesh; *solve* is the integer program; *evaluate* puts the solution
through the partitioner and prices it; *annotate*, told apart from these, writes the constraints on
the whole program. Large programs are solved with repeated layers tied, then untied ("gap" is of the
untied program). "MB" is the peak memory of the process so far, from which each row has one of its
own. Reshards are read from disk where an earlier run asked for them, unless `--cold`.

*search* plans over all meshes of up to three axes, from the traced module to the plan: with what
Shardy answers about reshards asked for the first time, and kept from the first time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

HEADER = (
    "| what | ops | mesh | populate | graph | problem | solve | evaluate | annotate | all, CPU s "
    "| wall s | gap | MB |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
SEARCH_HEADER = (
    "| what | meshes | planned | ruled out | not tried | mesh of the plan | step, s | gap | CPU s "
    "| wall s | MB |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def measure(model: str, options: dict[str, Any], topology: str, axes: int, label: str) -> str:
    """One row: a model planned on the first mesh of a slice with so many axes."""
    from shardwright.hardware_profiles.mesh import enumerate_meshes
    from shardwright.hardware_profiles.slices import parse_slice
    from shardwright.models.registry import build
    from shardwright.planner import mlir
    from shardwright.planner.annotate import annotate
    from shardwright.planner.graph_reader import number_operations
    from shardwright.planner.mesh_solution import evaluate_choices
    from shardwright.planner.prepared import prepare
    from shardwright.planner.program import Program
    from shardwright.planner.tied import solve_weighed

    on = parse_slice(topology)
    built = build(model, **options)
    program = Program.trace(
        built.train_step, *built.example_args, donate_argnums=built.donate_argnums
    )
    with program.module() as module:
        began = time.process_time()
        mlir.run_passes(module, mlir.POPULATE_RULES)
        populate_s = time.process_time() - began
    wall, clock = time.perf_counter(), [time.process_time()]

    def lap() -> float:
        clock.append(time.process_time())
        return clock[-1] - clock[-2]

    prepared = prepare(program)
    graph_s = lap()
    mesh = next(m for m in enumerate_meshes(on, axes) if len(m.axes) == min(axes, len(m.axes)))
    mesh = next((m for m in enumerate_meshes(on, axes) if len(m.axes) == axes), mesh)
    problem = prepared.problem(mesh)
    problem_s = lap()
    solution = solve_weighed(
        problem,
        dict.fromkeys(problem.loops, 1e-3),
        0.9 * on.chip.device_hbm_bytes,
        time_limit_s=600.0,  # enough on a busy machine too
        seed=0,
        gap=2e-3 if prepared.large else 0.0,
        cutoff=float("inf"),
        warm_starts=(),
        untie=True,
    )
    solve_s = lap()
    found = evaluate_choices(prepared, problem, solution)
    evaluate_s = lap()
    took, cpu = time.perf_counter() - wall, clock[-1] - clock[0]
    with program.module() as module:
        number_operations(module)
        began = time.process_time()
        annotate(module, mesh.shape, found.constraints, found.in_shardings, found.out_shardings)
        annotate_s = time.process_time() - began
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    shape = " x ".join(str(n) for n in mesh.shape.values())
    gap = "does not fit" if solution.status == "infeasible" else f"{100 * solution.gap:.3f} %"
    return (
        f"| {label} | {len(prepared.graph.ops)} | {shape} | {populate_s:.2f} "
        f"| {graph_s - populate_s:.2f} | {problem_s:.2f} | {solve_s:.2f} | {evaluate_s:.2f} "
        f"| {annotate_s:.2f} | {cpu:.1f} | {took:.1f} | {gap} | {megabytes:.0f} |"
    )


def search(model: str, options: dict[str, Any], topology: str, seconds: float, label: str) -> str:
    """One row: a model planned over all meshes of a slice."""
    import shardwright as sw
    from shardwright.models.registry import build
    from shardwright.planner.program import Program

    built = build(model, **options)
    program = Program.trace(built.step, *built.example_args, donate_argnums=built.donate_argnums)
    wall, cpu = time.perf_counter(), time.process_time()
    plan = sw.plan(program, topology=topology, time_limit_s=seconds)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    kinds = [mesh.status.split(":")[0] for mesh in plan.data.meshes_considered]
    counts = [kinds.count(kind) for kind in ("planned", "ruled out", "not tried")]
    shape = " x ".join(str(n) for n in plan.mesh_axes.values())
    gap = "none" if plan.solver.gap is None else f"{100 * plan.solver.gap:.3f} %"
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return (
        f"| {label} | {len(kinds)} | {' | '.join(map(str, counts))} | {shape} "
        f"| {plan.estimate.step_time_s:.4f} | {gap} | {cpu:.1f} | {wall:.1f} | {megabytes:.0f} |"
    )


def search_rows(max_layers: int) -> list[tuple[str, dict[str, Any], str, float, str]]:
    """Arguments of `search` for its table."""
    scanned = {"batch": 2048, "sequence": 2048}
    unrolled = scanned | {"scan_layers": False, "layers": max_layers}
    name = f"gpt3-175b unrolled, {max_layers} layers"
    return [
        ("gpt3-175b", scanned, "v5p:8x8x16", 600.0, "gpt3-175b scanned on v5p:8x8x16"),
        ("gpt3-175b", unrolled, "v5p:8x8x16", 12.0, f"{name}, 12 s, on v5p:8x8x16"),
        ("llama3-8b", {"batch": 256}, "v5e:16x16", 600.0, "llama3-8b on v5e:16x16"),
    ]


def rows(what: str, max_layers: int) -> list[tuple[str, dict[str, Any], str, int, str]]:
    """Arguments of `measure` for the rows of one table."""
    unrolled: dict[str, Any] = {"scan_layers": False, "batch": 2048, "sequence": 2048}
    if what == "layers":
        return [
            (
                "gpt3-175b",
                unrolled | {"layers": n},
                "v5p:8x8x16",
                2,
                f"gpt3-175b unrolled, {n} layers",
            )
            for n in (2, 8, 24, 48, 96)
            if n <= max_layers
        ]
    scanned = {"batch": 2048, "sequence": 2048}
    if what == "axes":
        return [
            ("gpt3-175b", scanned, "v5p:8x8x16", n, f"gpt3-175b scanned, {n} axes")
            for n in (1, 2, 3)
        ]
    if what == "chips":
        slices = ("tpu7x:2x2x2", "tpu7x:4x4x4", "tpu7x:8x8x8", "tpu7x:16x16x16", "tpu7x:16x16x32")
        return [
            ("llama3-8b", {"batch": 8192, "sequence": 2048}, name, 2, f"llama3-8b on {name}")
            for name in slices
        ]
    return [
        (
            "gpt3-175b",
            scanned | {"d_model": 64 * n, "heads": n, "d_ff": 256 * n},
            "v5p:8x8x16",
            2,
            f"width {64 * n}",
        )
        for n in (16, 64, 192)
    ]


def main() -> None:
    """Prints the tables asked for; every row in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables = ["layers", "axes", "chips", "width", "search"]
    parser.add_argument("tables", nargs="*", default=tables, choices=[*tables, []])
    parser.add_argument("--max-layers", type=int, default=96)
    parser.add_argument("--cold", action="store_true", help="with nothing kept of earlier runs")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        if options.cold or "search" in options.tables:
            os.environ["SHARDWRIGHT_CACHE"] = folder
        _print_tables(options, context)


def _print_tables(options: argparse.Namespace, context: Any) -> None:
    for table in options.tables:
        if table == "search":
            print(f"\n### search over meshes\n\n{SEARCH_HEADER}", flush=True)
            for *arguments, label in search_rows(options.max_layers):
                for when in ("first time", "again"):
                    with context.Pool(1) as pool:
                        row = (*arguments, f"{label}, {when}")
                        print(pool.apply(search, row), flush=True)
            continue
        print(f"\n### against {table}\n\n{HEADER}", flush=True)
        for row in rows(table, options.max_layers):
            with context.Pool(1) as pool:
                print(pool.apply(measure, row), flush=True)


if __name__ == "__main__":
    main()
