"""Predicts the speed-ups that GPipe published for AmoebaNet-D (18, 256), whose stages differ.

    python benchmarks/gpipe_amoebanet.py

Source of what was measured: Huang et al., GPipe (2019), table 2. Images of 224 x 224, batches of
128 and TPU v2 with 8 GB a core are those of its section 3; "batch size was adjusted to fit memory
if necessary" (table 2).

`sw.pipeline` takes layers that are alike. Here stages are consecutive cells, divided so that the
variance of the stages' FLOPs is least (section 2.2). Forward, and recomputation with backward, of
every cell and microbatch are priced by `sw.evaluate` on one core, and so is the optimizer's update
of its weights. The schedule of GPipe is then simulated: all microbatches forward, then all backward
in reverse order; a stage may compute a microbatch again while it waits for its gradient (section
2.3). Nothing is fitted. The batch is the largest of 128, 64, ... with which every stage fits: its
cells' peaks for a microbatch, optimizer state, and what enters it for the other microbatches.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from math import ceil, prod
from typing import Any, Literal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from gpipe import AMOEBANET, row
from jax.sharding import PartitionSpec

import shardwright as sw
from shardwright.hardware_profiles.chip import load_chip
from shardwright.models import amoebanet, build
from shardwright.models.options import AmoebaNetOptions
from shardwright.models.training import cross_entropy, init_statistics

CORES = 8
TOPOLOGY = "v2:2x2"
CHIP = load_chip("v2")
BATCH = 128
_OPTIMIZER = optax.rmsprop(0.015, momentum=0.9)
"""Its state, with the weights, is the 12 bytes a parameter of table 1."""

Part = amoebanet.Cell | Literal["stem", "head"]
"""What a pipeline may be cut between; the head has the loss."""


@dataclass(frozen=True)
class Cost:
    """What a part of the model takes on one core.

    Attributes:
      forward: seconds of a microbatch.
      backward: seconds of it with recomputation.
      update: seconds of the optimizer, once a step.
      peak: bytes at the peak of a microbatch, without optimizer state.
      state: bytes of optimizer state.
      entering: bytes that enter it, of a microbatch.
    """

    forward: float
    backward: float
    update: float
    peak: float
    state: float
    entering: float


def part_macs(options: AmoebaNetOptions) -> list[int]:
    """Multiply-adds of each part for an image."""
    cells = amoebanet.cells(options)
    stem = ceil(options.image / 2) ** 2 * 27 * (options.width // 4)
    return [stem, *map(amoebanet.cell_macs, cells), cells[-1].made * options.classes]


@functools.cache
def part_costs(images: int) -> list[Cost]:
    """Of each part, for a microbatch of so many images."""
    options: Any = build("amoebanet-d", batch=images).options
    made = jax.eval_shape(functools.partial(amoebanet.init_params, options), jax.random.key(0))
    cells = amoebanet.cells(options)
    picture, last = (options.image, 3), (cells[-1].size, cells[-1].made)
    entering: list[tuple[Part, Any, list[tuple[int, int]]]] = [
        ("stem", made["stem"], [picture]),
        *(
            # Cells that differ in their names alone cost the same.
            (replace(c, name="cell"), made[c.name], list(zip(c.sizes, c.channels, strict=True)))
            for c in cells
        ),
        ("head", made["head"], [last]),
    ]
    known: dict[Part, Cost] = {}
    for part, weights, maps in entering:
        given = tuple(
            jax.ShapeDtypeStruct((images, size, size, channels), jnp.bfloat16)
            for size, channels in maps
        )
        if part not in known:
            known[part] = _priced(options, part, weights, given)
    return [known[part] for part, _, _ in entering]


def _priced(options: AmoebaNetOptions, part: Part, weights: Any, given: Any) -> Cost:
    labels = jax.ShapeDtypeStruct(given[0].shape[:1], jnp.int32)

    def forward(weights: Any, given: Any, labels: jax.Array) -> Any:
        if part == "head":
            return cross_entropy(amoebanet.apply_head(weights, given[0]), labels)
        old = init_statistics(weights)
        if part == "stem":
            return amoebanet.apply_stem(options, weights, old, given[0])[0]
        return amoebanet.apply_cell(options, part, weights, old, given)[0]

    def backward(weights: Any, given: Any, labels: jax.Array, grads: Any) -> Any:
        if part == "stem":
            return jax.vjp(lambda w: forward(w, given, labels), weights)[1](grads)
        return jax.vjp(lambda w, x: forward(w, x, labels), weights, given)[1](grads)

    def update(weights: Any, state: Any, grads: Any) -> Any:
        updates, state = _OPTIMIZER.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    made = jax.eval_shape(forward, weights, given, labels)
    state = jax.eval_shape(_OPTIMIZER.init, weights)
    there = _on_one_core(forward, weights, given, labels)
    back = _on_one_core(backward, weights, given, labels, made)
    return Cost(
        forward=there.step_time_s,
        backward=back.step_time_s,
        update=_on_one_core(update, weights, state, weights).step_time_s,
        peak=max(there.peak_memory_bytes, back.peak_memory_bytes),
        state=_bytes(state),
        entering=_bytes(given),
    )


def _on_one_core(fn: Callable[..., Any], *args: Any) -> Any:
    return sw.evaluate(
        fn,
        *args,
        topology=TOPOLOGY,
        mesh={"alike": CORES},
        in_specs=(PartitionSpec(),) * len(args),
    )


def _bytes(tree: Any) -> int:
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def stage_costs(stages: int, images: int) -> list[Cost]:
    """Of every stage, with microbatches of so many images."""
    options: Any = build("amoebanet-d").options
    costs = part_costs(images)
    return [_added(costs[a:b]) for a, b in divided(part_macs(options), stages)]


def _added(costs: Sequence[Cost]) -> Cost:
    """Of a stage; what enters it is what enters its first part."""
    total = [sum(column) for column in zip(*map(astuple, costs), strict=True)]
    return replace(Cost(*total), entering=costs[0].entering)


def divided(costs: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """Where each stage begins and ends, so that the variance of their costs is least."""

    def spread(cuts: Sequence[int]) -> float:
        ends = zip((0, *cuts), (*cuts, len(costs)), strict=True)
        return sum(sum(costs[a:b]) ** 2 for a, b in ends)

    best = min(combinations(range(1, len(costs)), stages - 1), key=spread)
    return list(zip((0, *best), (*best, len(costs)), strict=True))


def makespan(costs: Sequence[Cost], microbatches: int, sends: Sequence[float]) -> float:
    """Seconds of GPipe's schedule.

    Args:
      sends: seconds to hand a microbatch to each stage but the first, or its gradient back.
    """
    stages = range(len(costs))
    free = [0.0] * len(costs)
    for _ in range(microbatches):
        arrives = 0.0
        for k in stages:
            free[k] = max(free[k], arrives) + costs[k].forward
            arrives = free[k] + (sends[k] if k < len(sends) else 0.0)
    for _ in range(microbatches):
        arrives = free[-1]
        for k in reversed(stages):
            computed_again = free[k] + costs[k].forward
            free[k] = max(computed_again, arrives) + costs[k].backward - costs[k].forward
            arrives = free[k] + (sends[k - 1] if k else 0.0)
    return max(time + cost.update for time, cost in zip(free, costs, strict=True))


def fits(costs: Sequence[Cost], microbatches: int) -> bool:
    """Whether every stage keeps within the memory of a core."""
    capacity = CHIP.hbm_bytes.value / CHIP.jax_devices_per_chip.value
    return all(c.peak + c.state + (microbatches - 1) * c.entering <= capacity for c in costs)


def throughput(stages: int, microbatches: int) -> tuple[int, float]:
    """The batch and the images a second."""
    batch = BATCH
    while (
        not fits(stage_costs(stages, batch // microbatches), microbatches) and batch > microbatches
    ):
        batch //= 2
    costs = stage_costs(stages, batch // microbatches)
    sends = [cost.entering / CHIP.ici_link_bandwidth.value for cost in costs[1:]]
    return batch, batch / makespan(costs, microbatches, sends)


def main() -> None:
    """Prints the predictions."""
    rates: dict[tuple[int, int], float] = {}
    print("| K | M | batch | images/s | slowest stage / all |\n" + "|---" * 5 + "|")
    for microbatches, published in AMOEBANET.items():
        for stages in published:
            batch, rate = throughput(stages, microbatches)
            rates[stages, microbatches] = rate
            times = [c.forward + c.backward for c in stage_costs(stages, batch // microbatches)]
            print(
                f"| {stages} | {microbatches} | {batch} | {rate:.1f} "
                f"| {max(times) / sum(times):.2f} |",
                flush=True,
            )
    head = "| predicted | published | error |\n" + "|---" * 4 + "|"
    for base, what in ((1, "K = 2, M = 1"), (0, "K = 2 with as many microbatches")):
        print(f"\n| AmoebaNet: throughput over that of {what} {head}")
        for microbatches, published in AMOEBANET.items():
            first = AMOEBANET[base or microbatches][2]
            for stages, measured in published.items():
                found = rates[stages, microbatches] / rates[2, base or microbatches]
                if found != 1:
                    print(row(f"K = {stages}, M = {microbatches}", found, measured / first))


if __name__ == "__main__":
    main()
