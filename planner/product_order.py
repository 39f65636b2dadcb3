"""Products of the backward pass that the compiler takes the other way around.

Of the two that read the gradient of an activation, the one that reads a gathered weight for the
last time comes first where the other, the weight's gradient, has something gathered for itself: the
two are not in memory together. Seen in a multilayer perceptron scheduled by libtpu 0.0.42.1 on v5p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from shardwright.cost_models.memory import Buffer
from shardwright.planner.graph import OpGraph

_PRODUCT = "stablehlo.dot_general"


def in_order(graph: OpGraph, buffers: Sequence[Buffer], time: Callable[[int], int]) -> list[Buffer]:
    """Buffers of a program in the compiler's order of products.

    Args:
      time: the program point at which an operation runs.
    """
    found = list(buffers)
    products = [op for op in graph.ops if op.name == _PRODUCT]
    for one, other in pairwise(products):
        first, second = time(one.id), time(other.id)
        if one.loop != other.loop or not set(one.operands) & set(other.operands):
            continue
        own, held = [], []
        for place, buffer in enumerate(found):
            if buffer.kind != "collective":
                continue
            if (buffer.start, buffer.end) == (first, first + 1):
                own.append(place)
            elif buffer.start < first < second and buffer.end == second + 1:
                held.append(place)
        if own and held:
            for place in own:
                found[place] = replace(found[place], start=second, end=second + 1)
            for place in held:
                found[place] = replace(found[place], end=first + 1)
    return found
