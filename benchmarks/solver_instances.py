"""Solves every published instance in a folder and prints a table.

    python benchmarks/solver_instances.py FOLDER [--only G,B] [--time-limit 60]

FOLDER holds `NAME.json.gz` files in the format of google/iopddl and, optionally, a file
`best_known.json` with `best_known` and `time_limit_s` by name. Each instance runs in a process of
its own, through `python -m shardwright.planner.solver`, so that its memory can be told; seconds
are those of the whole process, start-up and reading included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COLUMNS = "status", "cost", "best known", "ratio", "bound", "gap", "seconds", "limit", "peak RSS"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--time-limit", type=float, help="seconds, instead of the folder's own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    best_path = options.folder / "best_known.json"
    best_known = json.loads(best_path.read_text()) if best_path.exists() else {}
    wanted = options.only.split(",") if options.only else None
    print(f"{'':>8} " + " ".join(f"{column:>14}" for column in COLUMNS))
    ratios = []
    for path in sorted(options.folder.glob("*.json.gz")):
        name = path.name.removesuffix(".json.gz")
        if wanted is not None and name not in wanted:
            continue
        known = best_known.get(name, {})
        limit = options.time_limit or known.get("time_limit_s", 60)
        line, seconds, megabytes = _run(path, limit, options.seed)
        best = known.get("best_known")
        ratio = best / line["cost"] if best and line["cost"] else None
        if ratio is not None:
            ratios.append(ratio if line["status"] != "infeasible" else 0.0)
        cells = [
            line["status"],
            line["cost"],
            best,
            None if ratio is None else f"{ratio:.5f}",
            line["bound"] if line["bound"] is None else round(line["bound"]),
            None if line["gap"] is None else f"{100 * line['gap']:.4f}%",
            f"{seconds:.1f}",
            limit,
            f"{megabytes:.0f} MB",
        ]
        print(f"{name:>8} " + " ".join(f"{cell!s:>14}" for cell in cells), flush=True)
    if ratios:
        print(f"mean of best known / cost: {sum(ratios) / len(ratios):.5f}")


def _run(path: Path, limit: float, seed: int) -> tuple[dict[str, Any], float, float]:
    """The command's JSON line, seconds, and its peak memory in MB."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "shardwright.planner.solver", str(path)]
    command += ["--time-limit", str(limit), "--seed", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{path}: exit code {process.returncode}")
    return json.loads(output), time.perf_counter() - started, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
