"""How long `shardwright compare` takes for a model on one slice of each of five generations.

    python benchmarks/compare_time.py

The aim is under 60 s on 2 cores. Run it on a machine with nothing else to do: what else runs is
printed as the load average.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

SLICES = "v4:4x4x4,v5e:8x8,v5p:4x4x4,v6e:8x8,tpu7x:2x4x4"
AIM_SECONDS = 60.0
COMMAND = "import sys; from shardwright.cli import main; sys.exit(main())"


def main() -> None:
    """Runs the command once and prints what it took."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    began = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-c", COMMAND, "compare", "llama3-8b", "--topologies", SLICES, "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - began
    for row in json.loads(found.stdout)["rows"]:
        step = row["step_time_s"]
        told = f"{step:.3f} s a step" if step is not None else row["status"]
        print(f"{row['topology']:<14} {told}")
    verdict = "within" if seconds <= AIM_SECONDS else "over"
    print(
        f"{seconds:.1f} s on {cores} cores, load {load:.1f} before: {verdict} {AIM_SECONDS:.0f} s"
    )


if __name__ == "__main__":
    main()
