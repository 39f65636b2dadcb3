"""Shardings that people write by hand for the decoder models, as PartitionSpecs.

Each is told by which mesh axis shards which dimension of the parameters, in the way of MaxText's
logical axis rules. The moments are sharded like their parameters, the batch over "data", and the
residual stream over "data" with `residual_axes`.

Sources:
  FSDP: Rajbhandari et al., ZeRO (2020), section 5.3 (stage 3); the dimension it cuts is MaxText's
    ("embed", `src/MaxText/configs/base.yml`, logical_axis_rules).
  Tensor parallel: Shoeybi et al., Megatron-LM (2019), section 3; key and value heads that do not
    divide are replicated, as there and in MaxText.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

import shardwright as sw
from shardwright.models.registry import ReferenceModel, build

_DIMENSIONS: dict[str, tuple[str, ...]] = {
    "embedding": ("vocab", "d_model"),
    "head": ("d_model", "vocab"),
    "positions": ("position", "d_model"),
    "wq": ("d_model", "heads", "head_dim"),
    "wk": ("d_model", "kv_heads", "head_dim"),
    "wv": ("d_model", "kv_heads", "head_dim"),
    "wo": ("heads", "head_dim", "d_model"),
    "w_up": ("d_model", "d_ff"),
    "w_gate": ("d_model", "d_ff"),
    "w_down": ("d_ff", "d_model"),
    "bq": ("heads", "head_dim"),
    "bk": ("kv_heads", "head_dim"),
    "bv": ("kv_heads", "head_dim"),
    "b_up": ("d_ff",),
}
"""What the dimensions of a parameter are; those not named here are vectors that stay replicated."""

_TENSOR = dict.fromkeys(("heads", "kv_heads", "d_ff", "vocab"), "model")


@dataclass(frozen=True)
class Expert:
    """A way to shard a decoder.

    Attributes:
      axis_of: dimension of parameters -> mesh axis that shards it, where it divides.
      tensor: whether the mesh has a "model" axis.
      residual_axes: of the residual stream [batch, sequence, d_model].
    """

    name: str
    axis_of: Mapping[str, str]
    tensor: bool
    residual_axes: tuple[str | None, str | None, str | None] = ("data", None, None)

    def meshes(self, devices: int) -> Iterator[dict[str, int]]:
        """The meshes that suit it: every power of two as "model", smallest first, or data alone."""
        if not self.tensor:
            yield {"data": devices}
            return
        model = 2
        while model <= devices:
            yield {"data": devices // model, "model": model}
            model *= 2

    def state_specs(self, state: Any, mesh: Mapping[str, int]) -> Any:
        """PartitionSpecs of a decoder's train state, in its pytree."""

        def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            dimensions = _DIMENSIONS.get(names[-1], ()) if names else ()
            stacked = len(leaf.shape) - len(dimensions) if dimensions else 0
            sizes = leaf.shape[stacked:]
            axes = [
                self._axis(dimension, size, mesh)
                for dimension, size in zip(dimensions, sizes, strict=False)
            ]
            return PartitionSpec(*[None] * stacked, *axes)

        return jax.tree_util.tree_map_with_path(spec, state)

    def _axis(self, dimension: str, size: int, mesh: Mapping[str, int]) -> str | None:
        axis = self.axis_of.get(dimension)
        return axis if axis is not None and size % mesh[axis] == 0 else None


EXPERTS = (
    Expert("data parallel", {}, tensor=False),
    Expert("FSDP", {"d_model": "data"}, tensor=False),
    Expert("tensor parallel", _TENSOR, tensor=True),
    Expert("FSDP x tensor", {**_TENSOR, "d_model": "data"}, tensor=True),
    Expert(
        "FSDP x tensor, sequence parallel",
        {**_TENSOR, "d_model": "data"},
        tensor=True,
        residual_axes=("data", "model", None),
    ),
)


@dataclass(frozen=True)
class Priced:
    """An expert's sharding on one mesh with its exact evaluation."""

    expert: str
    mesh: dict[str, int]
    estimate: Any
    fits: bool


def price(
    expert: Expert,
    model_name: str,
    options: Mapping[str, Any],
    topology: str,
    devices: int,
    memory_fraction: float = 0.9,
) -> Priced | None:
    """An expert on its best mesh: the fastest that fits, or else the one that needs least memory.

    The "model" axis grows until a mesh is slower than an earlier one and needs as much memory.
    None where no mesh divides the batch.
    """
    tried: list[Priced] = []
    for mesh in expert.meshes(devices):
        model = build(model_name, **options, residual_axes=expert.residual_axes)
        batch, sequence = model.example_args[1]["tokens"].shape
        cut = mesh[expert.residual_axes[1]] if expert.residual_axes[1] else 1
        if batch % mesh["data"] or sequence % cut:
            continue
        estimate = evaluate(model, expert, topology, mesh)
        limit = estimate.memory_capacity_bytes * memory_fraction
        fits = estimate.peak_memory_bytes <= limit
        worse = any(_dominates(p.estimate, estimate) for p in tried)
        tried.append(Priced(expert.name, mesh, estimate, fits))
        if worse:
            break
    fitting = [p for p in tried if p.fits]
    if fitting:
        return min(fitting, key=lambda p: p.estimate.step_time_s)
    return min(tried, key=lambda p: p.estimate.peak_memory_bytes, default=None)


def _dominates(one: Any, other: Any) -> bool:
    slower = other.step_time_s > one.step_time_s
    return bool(slower and other.peak_memory_bytes >= one.peak_memory_bytes)


def evaluate(model: ReferenceModel, expert: Expert, topology: str, mesh: Mapping[str, int]) -> Any:
    """The exact evaluation of a model, built with the expert's residual axes, on one mesh."""
    state, _ = model.example_args
    return sw.evaluate(
        model.train_step,
        *model.example_args,
        topology=topology,
        mesh=mesh,
        in_specs=(expert.state_specs(state, mesh), PartitionSpec("data")),
        donate_argnums=model.donate_argnums,
        model_flops=model.model_flops_per_step,
    )
