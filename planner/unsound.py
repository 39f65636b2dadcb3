"""Strategies that the compiler accepts but computes wrongly; they are never planned.

XLA's partitioner adds up the partial results of a convolution over all devices where the window
slides over a sharded dimension. That counts a result once for each device along a mesh axis that
cuts none of the sums: an axis that is idle, or that shards the kernel's output features. Seen
with jaxlib 0.10.2 on CPU (wrong numbers) and libtpu 0.0.42.1 (the same all-reduce); where every
axis cuts the input, 162 random convolutions and gradients came out right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.graph import Op
from shardwright.planner.strategies import IntArray


def sound(
    op: Op, factors: Sequence[int], rows: IntArray, axis_sizes: Sequence[int]
) -> NDArray[np.bool_]:
    """Which strategies of an operation's node the compiler computes rightly.

    Args:
      factors: the node's factor of each factor of the operation's rule, or -1.
      rows: strategies, shape (strategies, axes).
      axis_sizes: sizes of the mesh axes.

    Returns:
      Shape (strategies,).
    """
    if op.name != "stablehlo.convolution" or op.rule is None:
        return np.ones(len(rows), dtype=bool)
    inputs = op.rule.operands[0]
    spatial = {f for dim in op.detail["input_spatial"] for f in inputs[dim]}
    of_input = {f for dim in inputs for f in dim}
    slides = np.isin(rows, [factors[f] for f in spatial if factors[f] >= 0])
    cuts = np.isin(rows, [factors[f] for f in of_input if factors[f] >= 0])
    real = np.asarray(axis_sizes) > 1
    return np.asarray(~(slides & real).any(axis=1) | (cuts | ~real).all(axis=1))
