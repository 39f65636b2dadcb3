"""This planner beside the auto-sharding that older versions of JAX had, on the same train step.

    python benchmarks/auto_sharding.py --auto-python auto/bin/python [--time-limit 300]

plans two transformer layers with Adam (`auto_step.py`) on v5e:2x4 with the meshes 8 x 1 and 2 x 4,
from the traced program to the plan, and has XLA's `AUTO` shardings do the same in an environment of
their own, where jit with `in_shardings=AUTO` compiles for that slice:

    python3.11 -m venv auto
    auto/bin/pip install jax==0.10.0 jaxlib==0.10.0 libtpu==0.0.40

Without `--auto-python` only this planner runs. Both start with the traced step; seconds of AUTO are
of compilation, of which its solver is a part that XLA does not tell apart, so that the same step
compiled with all arguments cut over the first axis is told beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from auto_step import example_args, train_step

TOPOLOGY = "v5e:2x4"
MESHES = ((8, 1), (2, 4))
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def ours(shape: tuple[int, int]) -> str:
    """Seconds of a plan, and what it says; the first plan of a process compiles kernels."""
    import shardwright as sw

    program = sw.Program.trace(train_step, *example_args(), donate_argnums=0)
    mesh = {name: size for name, size in zip("xy", shape, strict=True) if size > 1}
    told = []
    for when in ("first", "again"):
        wall, cpu = time.perf_counter(), time.process_time()
        plan = sw.plan(program, topology=TOPOLOGY, mesh=mesh)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        told.append(f"{when} {wall:.2f} s ({cpu:.2f} s CPU)")
    step = plan.estimate.step_time_s
    return f"{', '.join(told)}; step {1e3 * step:.2f} ms, {plan.solver.status}"


def auto(python: str, shape: tuple[int, int], kind: str, limit: float) -> str:
    """Seconds that a compilation takes in another environment."""
    command = [python, str(Path(__file__).resolve()), "--compile", kind, *map(str, shape)]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not finished in {time.perf_counter() - began:.0f} s"
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return f"failed: {last[0][:200]}"
    return done.stdout.strip().splitlines()[-1]


def compile_with(kind: str, shape: tuple[int, int]) -> None:
    """Compiles the step for TPU; in the environment of the older JAX."""
    import jax
    import numpy as np
    from jax._src.sharding_impls import AUTO
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    mesh = Mesh(np.array(described.devices).reshape(shape), ("x", "y"))
    state, batch = example_args()
    if kind == "auto":
        given = (AUTO(mesh), AUTO(mesh))
    else:
        whole, cut = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("x",)))
        given = (whole, cut)
    step = jax.jit(train_step, in_shardings=given, donate_argnums=0)
    lowered = step.trace(state, batch).lower(lowering_platforms=("tpu",))
    wall, cpu = time.perf_counter(), time.process_time()
    lowered.compile()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{wall:.1f} s ({cpu:.1f} s CPU)")


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--auto-python", help="of an environment with jax 0.10.0")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of a compilation")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        kind, *shape = options.compile
        compile_with(kind, (int(shape[0]), int(shape[1])))
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print("| mesh | this planner | AUTO, compiled | compiled without AUTO |\n|---|---|---|---|")
    for shape in MESHES:
        others = ["not run", "not run"]
        if options.auto_python:
            others = [
                auto(options.auto_python, shape, kind, options.time_limit)
                for kind in ("auto", "given")
            ]
        print(f"| {shape[0]} x {shape[1]} | {ours(shape)} | {' | '.join(others)} |", flush=True)
    if not options.auto_python:
        print(__doc__.split("their own, where")[1], file=sys.stderr)


if __name__ == "__main__":
    main()
