"""Planning time and proven gap against layers, mesh axes, chips and width, stage by stage.

    python benchmarks/planning_time.py [layers] [axes] [chips] [width] [--max-layers 96]

Stages, in CPU seconds of the process (so that a busy machine does not blur them) and, for all
together, wall seconds: *graph* reads the traced module and builds its op graph, nodes, kernels and
live ranges; *problem* prices strategies and reshards on one mesh; *solve* is the integer program;
*evaluate* puts the solution through the partitioner and prices it. Large programs are solved with
repeated layers tied, then untied ("gap" is of the untied program). "MB" is the peak memory of the
process so far, from which each row has one of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

HEADER = (
    "| what | ops | mesh | graph | problem | solve | evaluate | all, wall s | gap | MB |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def measure(model: str, options: dict[str, Any], topology: str, axes: int, label: str) -> str:
    """One row: a model planned on the first mesh of a slice with so many axes."""
    from shardwright.hardware_profiles.mesh import enumerate_meshes
    from shardwright.hardware_profiles.slices import parse_slice
    from shardwright.models.registry import build
    from shardwright.planner.program import Program
    from shardwright.planner.search import evaluate_choices, prepare
    from shardwright.planner.tied import solve_weighed

    on = parse_slice(topology)
    built = build(model, **options)
    program = Program.trace(
        built.train_step, *built.example_args, donate_argnums=built.donate_argnums
    )
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
        time_limit_s=60.0,
        seed=0,
        gap=2e-3 if prepared.large else 0.0,
        cutoff=float("inf"),
        warm_starts=(),
        untie=True,
    )
    solve_s = lap()
    evaluate_choices(prepared, problem, solution)
    evaluate_s = lap()
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    shape = " x ".join(str(n) for n in mesh.shape.values())
    gap = "does not fit" if solution.status == "infeasible" else f"{100 * solution.gap:.3f} %"
    return (
        f"| {label} | {len(prepared.graph.ops)} | {shape} | {graph_s:.2f} | {problem_s:.2f} "
        f"| {solve_s:.2f} | {evaluate_s:.2f} | {time.perf_counter() - wall:.1f} | {gap} "
        f"| {megabytes:.0f} |"
    )


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
        slices = ("v5p:2x2x2", "v5p:4x4x4", "v5p:8x8x8", "v5p:16x16x16", "v5p:16x16x24")
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
    tables = ["layers", "axes", "chips", "width"]
    parser.add_argument("tables", nargs="*", default=tables, choices=[*tables, []])
    parser.add_argument("--max-layers", type=int, default=96)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for table in options.tables:
        print(f"\n### against {table}\n\n{HEADER}", flush=True)
        for row in rows(table, options.max_layers):
            with context.Pool(1) as pool:
                print(pool.apply(measure, row), flush=True)


if __name__ == "__main__":
    main()
