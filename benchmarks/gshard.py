"""GShard's mixtures of experts: memory a device as experts grow with devices, ours and annotated.

    python benchmarks/gshard.py [--models NAME ...] [--time-limit SECONDS]

The models have 128, 512 and 2048 experts (37B, 150B and 600B parameters) on as many cores of v3,
with as many tokens a core; the claim of the paper is that memory a core stays constant. Ours is
`sw.plan`, its mesh searched. *Experts alone* is what propagation makes of a program in which the
weights of experts are cut over all cores, and the batch, and nothing else is said; *GShard's
annotations* are those of the paper, on what experts take and make too. Both by `sw.evaluate`.

Source: Lepikhin et al., GShard (2020), sections 3.2, 4.2 and 4.4.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import PartitionSpec

import shardwright as sw
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.models.registry import build
from shardwright.planner.plan_schema import EstimateModel

SLICES = {"gshard-37b": "v3:8x8", "gshard-150b": "v3:16x16", "gshard-600b": "v3:32x32"}
TOKENS_A_CORE = 2048
"""4 million tokens a step on 2048 cores. Source: section 4.2."""
GROUP = 1024
AXES: dict[str, Any] = {
    "residual_axes": ("d", None, None),
    "expert_axes": ("d", None, None, None),
    "token_axes": (None, "d", None, None),
}
HEADER = (
    "| model | slice | sharding | step ms | compute | exposed | peak GB | all-to-all GB "
    "| all-gather GB | mesh |\n" + "|---" * 10 + "|"
)


def options(topology: str) -> dict[str, Any]:
    """Tokens that grow with the slice."""
    return {"batch": TOKENS_A_CORE * parse_slice(topology).devices // GROUP, "sequence": GROUP}


def annotated(name: str, topology: str, axes: dict[str, Any]) -> EstimateModel:
    """The price of experts and batch over all cores, with constraints on activations."""
    model = build(name, **options(topology), **axes)
    flat, tree = jax.tree_util.tree_flatten_with_path(model.example_args)
    specs = [_spec(jax.tree_util.keystr(path)) for path, _ in flat]
    return sw.evaluate(
        model.train_step,
        *model.example_args,
        topology=topology,
        mesh={"d": parse_slice(topology).devices},
        in_specs=tree.unflatten(specs),
        donate_argnums=model.donate_argnums,
    )


def _spec(path: str) -> PartitionSpec:
    if path.startswith("[1]"):
        return PartitionSpec("d")
    return PartitionSpec(None, "d") if "['routed']" in path else PartitionSpec()


def row(name: str, topology: str, sharding: str, found: EstimateModel, mesh: dict[str, int]) -> str:
    """A row of the table."""
    moved = {
        kind: sum(c.nbytes * c.count for c in found.collectives if c.kind == kind)
        for kind in ("all_to_all", "all_gather")
    }
    fits = "" if found.peak_memory_bytes <= 0.9 * found.memory_capacity_bytes else ", does not fit"
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    return (
        f"| {name} | {topology} | {sharding} | {found.step_time_s * 1e3:.1f} "
        f"| {found.compute_time_s * 1e3:.1f} | {found.exposed_collective_time_s * 1e3:.1f} "
        f"| {found.peak_memory_bytes / 1e9:.2f}{fits} | {moved['all_to_all'] / 1e9:.2f} "
        f"| {moved['all_gather'] / 1e9:.2f} | {axes} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SLICES, default=list(SLICES))
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a plan")
    given = parser.parse_args()
    print(HEADER, flush=True)
    for name in given.models:
        topology = SLICES[name]
        mesh = {"d": parse_slice(topology).devices}
        for sharding, axes in (("experts alone", {}), ("GShard's annotations", AXES)):
            found = annotated(name, topology, axes)
            print(row(name, topology, sharding, found, mesh), flush=True)
        model = build(name, **options(topology))
        plan = sw.plan(
            model.train_step,
            *model.example_args,
            topology=topology,
            donate_argnums=model.donate_argnums,
            time_limit_s=given.time_limit,
        )
        print(row(name, topology, "**plan**", plan.estimate, plan.mesh_axes), flush=True)


if __name__ == "__main__":
    main()
