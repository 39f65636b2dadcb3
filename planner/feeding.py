"""What it takes to feed a step: arguments that no earlier step left on the devices.

Such an argument (a batch of tokens, its labels) is copied from the host to every device that holds
it, cut as it is sharded. An input pipeline hides the copies behind the step before, so they count
for little: enough to tell apart plans that take equally long, not enough to change a better one.
Without it a batch that every reader cuts for free might as well stay whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np

from shardwright.cost_models.memory import dtype_bytes
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.planner.nodes import NodeGraph
from shardwright.planner.rules import DimFactors
from shardwright.planner.solver.problem import FloatArray
from shardwright.planner.strategies import IntArray

_MOST = 1e-4
"""Of the least compute: what feeding counts where everything that is fed stays whole."""


@dataclass(frozen=True)
class Feeding:
    """Seconds that feeding counts in the integer program.

    Attributes:
      seconds: node of an argument -> seconds by strategy.
      most: what they add up to at most.
    """

    seconds: dict[int, FloatArray] = field(default_factory=dict)
    most: float = 0.0


def feeding(
    nodes: NodeGraph,
    local: Callable[[int, tuple[int, ...], DimFactors], IntArray],
    chip: ChipProfile,
    least_compute_s: float,
) -> Feeding:
    """Prices the arguments whose buffers no result takes over.

    Local bytes over the PCIe bandwidth of a device, scaled down where together they would count
    more than a ten-thousandth of the least compute, so that weights which stay on the devices
    without being donated (a program that only predicts) change nothing either.

    Args:
      local: local shapes of a value, by strategies of a node; takes the node, shape and factors.
      chip: whose `pcie_bandwidth_per_chip` feeds `jax_devices_per_chip` devices.
      least_compute_s: seconds that no strategies take less than.
    """
    graph = nodes.graph
    kept = set(graph.aliases.values())
    bandwidth = chip.pcie_bandwidth_per_chip.value / chip.jax_devices_per_chip.value
    seconds: dict[int, FloatArray] = {}
    for position, (value, node) in enumerate(
        zip(graph.arguments, nodes.argument_nodes, strict=True)
    ):
        tensor = graph.values[value]
        if position in kept or prod(tensor.shape) <= 1:
            continue
        elements = local(node, tensor.shape, nodes.whole_dims(value)).prod(axis=1)
        seconds[node] = elements * dtype_bytes(tensor.dtype) / bandwidth
    most = float(sum(np.max(each) for each in seconds.values()))
    scale = min(1.0, _MOST * least_compute_s / most) if most else 0.0
    return Feeding({node: scale * each for node, each in seconds.items()}, scale * most)
