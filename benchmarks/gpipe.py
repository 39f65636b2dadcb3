"""Predicts the speed-ups that GPipe published for its Transformer, and prints them beside those.

    python benchmarks/gpipe.py

Source of what was measured: Huang et al., GPipe (2019), table 2: training throughput on K
accelerators with M microbatches, as a multiple of that with K = 2, M = 1.

The 48-layer Transformer is built as published (d_model 2048, d_ff 8192, 32 heads, sequences of
1024, vocabulary 32000; norms, activation and optimizer are ours: pre-layer norm, GELU, AdamW) and
priced by `sw.evaluate` on K cores of TPU v3, the stages and the vocabulary sharded over them.

"Batch size was adjusted to fit memory if necessary": what batches were, the paper does not tell. A
rule takes the place: the batch is 32, that of section 3, where a microbatch then has no more
sequences than there are stages, and else smaller, so that it has as many. A stage keeps the
activations of a microbatch in 48 / K layers, so K sequences take as much memory on every K.
Ratios within M = 32, where the batch is always 32, need no rule; they come first.

AmoebaNet, whose stages differ, is in `gpipe_amoebanet.py`.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import PartitionSpec
from system_rows import GPIPE_TRANSFORMER

import shardwright as sw
from shardwright.models import build

CORES = 8
BATCH = 32
TOPOLOGY = "v3:2x2"
WITHIN = 0.15
PUBLISHED: dict[int, dict[int, float]] = {
    1: {2: 1.0, 4: 1.07, 8: 1.3},
    4: {2: 1.7, 4: 3.2, 8: 4.8},
    32: {2: 1.8, 4: 3.4, 8: 6.3},
}
"""Of the Transformer: microbatches -> accelerators -> throughput."""
AMOEBANET: dict[int, dict[int, float]] = {
    1: {2: 1.0, 4: 1.13, 8: 1.38},
    4: {2: 1.07, 4: 1.26, 8: 1.72},
    32: {2: 1.21, 4: 1.84, 8: 3.48},
}
"""Likewise of AmoebaNet-D (18, 256)."""


def estimate(stages: int, microbatches: int, batch: int) -> Any:
    """The Transformer's step on as many cores as there are stages.

    The smallest slice has eight cores; those that are left over do the same as the others.
    """
    model = build(
        "llama3-8b",
        **GPIPE_TRANSFORMER,
        stage_axis="stage",
        stages=stages,
        microbatches=microbatches,
        batch=batch,
    )
    return sw.evaluate(
        model.step,
        *model.example_args,
        topology=TOPOLOGY,
        mesh={"stage": stages, "alike": CORES // stages},
        in_specs=(_specs(model.example_args[0]), PartitionSpec()),
        donate_argnums=model.donate_argnums,
    )


def _specs(state: Any) -> Any:
    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = {key.key for key in path if isinstance(key, jax.tree_util.DictKey)}
        if "layers" in names and leaf.ndim:
            return PartitionSpec("stage")
        return PartitionSpec(None, "stage") if names & {"embedding", "head"} else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, state)


def bubble(stages: int, microbatches: int) -> float:
    """The part of a pipeline's steps in which a stage has nothing to do."""
    return (stages - 1) / (microbatches + stages - 1)


def row(what: str, predicted: float, published: float) -> str:
    """A prediction beside what was measured."""
    error = predicted / published - 1
    far = "" if abs(error) <= WITHIN else " FAR"
    return f"| {what} | {predicted:.2f} | {published:.2f} | {error:+.1%}{far} |"


def main() -> None:
    """Prints the predictions."""
    print(
        "| K | M | batch | step s | compute | exposed | bubble | sequences/s |\n" + "|---" * 8 + "|"
    )
    rates: dict[tuple[int, int], float] = {}
    for microbatches, published in PUBLISHED.items():
        for stages in published:
            batch = microbatches * min(stages, BATCH // microbatches)
            made = estimate(stages, microbatches, batch)
            rates[stages, microbatches] = batch / made.step_time_s
            print(
                f"| {stages} | {microbatches} | {batch} | {made.step_time_s:.3f} "
                f"| {made.compute_time_s:.3f} | {made.exposed_collective_time_s:.3f} "
                f"| {bubble(stages, microbatches):.0%} | {rates[stages, microbatches]:.2f} |",
                flush=True,
            )
    head = "| predicted | published | error |\n" + "|---" * 4 + "|"
    print(f"\n| Transformer: throughput over that of K = 2 with as many microbatches {head}")
    for microbatches, published in PUBLISHED.items():
        for stages in (4, 8):
            found = rates[stages, microbatches] / rates[2, microbatches]
            print(row(f"K = {stages}, M = {microbatches}", found, published[stages] / published[2]))
    print(f"\n| Transformer: throughput over that of K = 2, M = 1 {head}")
    for microbatches, published in PUBLISHED.items():
        for stages, measured in published.items():
            found = rates[stages, microbatches] / rates[2, 1]
            print(row(f"K = {stages}, M = {microbatches}", found, measured))


if __name__ == "__main__":
    main()
