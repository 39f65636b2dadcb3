"""Levels of sharding the weight update of a data-parallel step, and what the planner chooses.

    python benchmarks/weight_update.py [--models NAME ...] [--topology SLICE] [--time-limit SECONDS]

Of each model three levels are priced by `sw.evaluate` with the batch over all devices: everything
replicated; optimizer state cut over all devices, so that gradients are reduce-scattered, updated in
parts and weights gathered; and weights cut too (FSDP). The plans are `sw.plan` of the same step:
on the same mesh of one axis, where only the levels are to choose from, tensor by tensor; on that
mesh with half of the memory that the replicated step needs; and with the mesh searched.

Source: Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training
  (2020); Rajbhandari et al., ZeRO (2020).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import PartitionSpec
from system_rows import SpecsOf, fully_sharded, optimizer_state_sharded, replicated

import shardwright as sw
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.models.registry import build
from shardwright.planner.plan_schema import EstimateModel, TensorModel

MODELS: dict[str, dict[str, Any]] = {
    "resnet-50": {"batch": 4096, "norm_groups": 128},
    "bert-large": {"batch": 2048, "vocab": 30592},
    "gpt2-124m": {"batch": 512, "vocab": 50304},
}
"""SGD with momentum and batch norm over the images of a device; LAMB; AdamW."""

LEVELS: dict[str, SpecsOf] = {
    "replicated": replicated("data"),
    "optimizer state cut": optimizer_state_sharded("data"),
    "FSDP": fully_sharded("data"),
}
MEMORY_FRACTION = 0.9

HEADER = (
    "| model | slice | level | mesh | step ms | compute | exposed | peak GB | state GB "
    "| state cut, of arrays |\n" + "|---" * 10 + "|"
)


def level(name: str, specs: SpecsOf, topology: str) -> str:
    """The row of a level."""
    options = MODELS[name]
    # Propagation keeps the batch in loops where the residual stream says so.
    transformer = name not in ("resnet-50",)
    axes = {"residual_axes": ("data", None, None)} if transformer else {}
    model = build(name, **options, **axes)
    mesh = {"data": parse_slice(topology).devices}
    flat, tree = jax.tree_util.tree_flatten_with_path(model.example_args)
    paths = [jax.tree_util.keystr(path) for path, _ in flat]
    chosen = specs(paths, [leaf.shape for _, leaf in flat], mesh)
    estimate = sw.evaluate(
        model.train_step,
        *model.example_args,
        topology=topology,
        mesh=mesh,
        in_specs=tree.unflatten([PartitionSpec(*spec) for spec in chosen]),
        donate_argnums=model.donate_argnums,
    )
    tensors = [
        TensorModel(
            path=path,
            shape=list(leaf.shape),
            dtype="f32",
            spec=[
                [] if entry is None else [entry] if isinstance(entry, str) else list(entry)
                for entry in (*spec, *[None] * (len(leaf.shape) - len(spec)))
            ],
        )
        for path, (_, leaf), spec in zip(paths, flat, chosen, strict=True)
    ]
    return _cells(mesh, estimate, tensors)


def planned(name: str, topology: str, time_limit_s: float, **asked: Any) -> tuple[str, sw.Plan]:
    """The row of a plan."""
    model = build(name, **MODELS[name])
    plan = sw.plan(
        model.train_step,
        *model.example_args,
        topology=topology,
        donate_argnums=model.donate_argnums,
        time_limit_s=time_limit_s,
        **asked,
    )
    return _cells(plan.mesh_axes, plan.estimate, plan.data.program.inputs), plan


def _cells(mesh: dict[str, int], estimate: EstimateModel, tensors: list[TensorModel]) -> str:
    state = [t for t in tensors if t.path.startswith("[0]") and t.shape]
    held = sum(_local_bytes(tensor, mesh) for tensor in state)
    cut = sum(any(tensor.spec) for tensor in state)
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    return (
        f"{axes} | {estimate.step_time_s * 1e3:.1f} | {estimate.compute_time_s * 1e3:.1f} "
        f"| {estimate.exposed_collective_time_s * 1e3:.1f} "
        f"| {estimate.peak_memory_bytes / 1e9:.2f} | {held / 1e9:.3f} | {cut} of {len(state)} |"
    )


def _local_bytes(tensor: TensorModel, mesh: dict[str, int]) -> float:
    """Bytes of a float32 array on one device."""
    size = 4.0
    for extent, entry in zip(tensor.shape, tensor.spec, strict=True):
        parts = 1
        for axis in entry:
            parts *= mesh[axis]
        size *= extent / parts
    return size


def rows(name: str, topology: str, time_limit_s: float) -> Iterator[str]:
    """The rows of a model."""
    head = f"| {name} | {topology}"
    for title, specs in LEVELS.items():
        yield f"{head} | {title} | {level(name, specs, topology)}"
    mesh = {"data": parse_slice(topology).devices}
    cells, plan = planned(name, topology, time_limit_s, mesh=mesh, memory_fraction=MEMORY_FRACTION)
    yield f"{head} | **plan**, same mesh | {cells}"
    estimate = plan.estimate
    half = estimate.peak_memory_bytes / 2 / estimate.memory_capacity_bytes
    try:
        cells, _ = planned(name, topology, time_limit_s, mesh=mesh, memory_fraction=half)
    except sw.DoesNotFitError as error:
        cells = f"{error.what} |" + " |" * 6
    yield f"{head} | **plan**, same mesh, half of that memory | {cells}"
    cells, _ = planned(name, topology, time_limit_s, memory_fraction=MEMORY_FRACTION)
    yield f"{head} | **plan**, mesh searched | {cells}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--topology", default="v3:8x8")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds a plan")
    given = parser.parse_args()
    print(HEADER, flush=True)
    for name in given.models:
        for row in rows(name, given.topology, given.time_limit):
            print(row, flush=True)


if __name__ == "__main__":
    main()
