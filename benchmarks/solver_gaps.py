"""The gap that is proven for every reference model on a slice of every generation.

    python benchmarks/solver_gaps.py [--models llama3-8b mlp] [--generations v5e] [--seconds 60]

For each model, its layers scanned where it can, the integer program of the first mesh with two axes
is solved to a gap of 0 (1e-9, the rounding of the solvers). The slice is the smallest of about 64,
256 chips and the largest on which something fits. "Infeasible" is proven where it says so: no
sharding fits the memory of the largest slice. Seconds are CPU seconds of the solver.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

SLICES = {
    "v2": ("8x8", "16x16"),
    "v3": ("8x8", "16x16", "32x32"),
    "v4": ("4x4x4", "8x8x8", "16x16x16"),
    "v5e": ("8x8", "16x16"),
    "v5p": ("4x4x4", "8x8x8", "16x16x24"),
    "v6e": ("8x8", "16x16"),
    "tpu7x": ("4x4x4", "8x8x8", "16x16x16"),
}


def rows(name: str, generations: list[str], seconds: float) -> list[str]:
    """A row for each generation."""
    from shardwright.models.registry import build
    from shardwright.planner.prepared import prepare
    from shardwright.planner.program import Program

    built = build(name)
    program = Program.trace(built.step, *built.example_args, donate_argnums=built.donate_argnums)
    prepared = prepare(program)
    return [_row(name, prepared, generation, seconds) for generation in generations]


def _row(name: str, prepared: Any, generation: str, seconds: float) -> str:
    from shardwright.hardware_profiles.mesh import enumerate_meshes
    from shardwright.hardware_profiles.slices import parse_slice
    from shardwright.planner.tied import solve_weighed

    for shape in SLICES[generation]:
        on = parse_slice(f"{generation}:{shape}")
        mesh = next(m for m in enumerate_meshes(on, 2) if len(m.axes) == 2)
        problem = prepared.problem(mesh)
        began = time.process_time()
        solution = solve_weighed(
            problem,
            dict.fromkeys(problem.loops, 1e-3),
            0.9 * on.chip.device_hbm_bytes,
            time_limit_s=seconds,
            seed=0,
            gap=0.0,
            cutoff=math.inf,
            warm_starts=(),
            untie=True,
        )
        took = time.process_time() - began
        if solution.status != "infeasible":
            break
    proven = solution.status == "infeasible" and solution.bound == math.inf
    gap = f"{100 * solution.gap:.2g} %" if math.isfinite(solution.gap) else ""
    status = "infeasible, proven" if proven else solution.status
    shape = " x ".join(str(n) for n in mesh.shape.values())
    return (
        f"| {name} | {on.name} | {shape} | {len(problem.strategies)} | {status} | {gap} "
        f"| {took:.1f} |"
    )


def main() -> None:
    """Prints the table."""
    from shardwright.models.registry import model_names

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=model_names())
    parser.add_argument("--generations", nargs="+", default=list(SLICES), choices=list(SLICES))
    parser.add_argument("--seconds", type=float, default=60.0, help="wall seconds of a solve")
    options = parser.parse_args()
    columns = "model", "slice", "mesh", "nodes", "status", "gap proven", "CPU s"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in options.models:
        for row in rows(name, options.generations, options.seconds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
