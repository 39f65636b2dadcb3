"""`python -m shardwright.planner.solver INSTANCE`: solve a published instance."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from shardwright.errors import InputError
from shardwright.planner.solver.console import library_output_dropped
from shardwright.planner.solver.instance_format import read_instance, write_solution
from shardwright.planner.solver.solve import solve


def main(arguments: list[str] | None = None) -> int:
    """Solve one instance and print one JSON line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m shardwright.planner.solver", description=__doc__
    )
    parser.add_argument("instance", type=Path, help=".json or .json.gz in the published format")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, help="seconds, start-up and reading included (60)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=float, default=0.0, help="relative gap at which to stop")
    parser.add_argument("--workers", type=int, default=2, help="threads (default 2)")
    parser.add_argument("-o", "--output", type=Path, help="file for the chosen strategies")
    options = parser.parse_args(arguments)
    try:
        if not options.time_limit > 0 or options.workers < 1 or not options.gap >= 0:
            raise InputError(
                "a time limit, gap or number of workers out of range",
                do="give a positive time limit, a gap of at least 0 and at least 1 worker",
            )
        started = time.perf_counter()
        # For start-up, which is over, and for writing the answer.
        reserve = min(1.0, 0.02 * options.time_limit)
        problem = read_instance(options.instance)
        with library_output_dropped():
            solution = solve(
                problem,
                time_limit_s=options.time_limit - (time.perf_counter() - started) - reserve,
                seed=options.seed,
                gap=options.gap,
                workers=options.workers,
            )
        if options.output is not None:
            write_solution(solution.choices, options.output)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    line = {
        "status": solution.status,
        "cost": solution.cost,
        "bound": solution.bound,
        "gap": solution.gap,
        "seconds": round(solution.seconds, 3),
        "peak": solution.peak,
        "limit": solution.limit,
    }
    if solution.status == "infeasible":
        line |= {
            "least_peak": solution.least_peak,
            "least_peak_proven": solution.least_peak_proven,
        }
    # JSON has no infinity: what is not finite is null.
    print(json.dumps({key: _finite(value) for key, value in line.items()}))
    return 0


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
