"""Which nodes of a program are alike: repeated layers, found by their structure.

Nodes are told apart by what they are, then again and again by what their neighbours are (colour
refinement). After a few rounds the nodes of one layer differ from each other, while those of all
layers far enough from the ends are still alike; more rounds would only tell layers by how far they
are from the ends.

Source: Weisfeiler and Leman, A reduction of a graph to a canonical form (1968).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from shardwright.planner.skeleton import Skeleton
from shardwright.planner.strategies import Allowed

ROUNDS = 4
_K = TypeVar("_K", bound=Hashable)


def alike_nodes(
    skeleton: Skeleton, fixed: Mapping[int, Allowed], rounds: int = ROUNDS
) -> tuple[int, ...]:
    """A class for every node; nodes of one class have equal strategies and alike surroundings.

    Args:
      fixed: strategies that are given; nodes with different ones are not alike.
      rounds: how far around a node is looked.
    """
    count = len(skeleton.kind_of)
    own: list[list[tuple[int, int, float]]] = [[] for _ in range(count)]
    for run in skeleton.kernel_runs:
        own[run.node].append((0, run.what, run.trips))
    for run in skeleton.exchange_runs:
        own[run.node].append((1, run.what, run.trips))
    for hold in skeleton.holds:
        own[hold.node].append((2, hold.what, 0.0))
    near: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    for link in skeleton.links:
        near[link.a].append((link.what, 0, link.b))
        near[link.b].append((link.what, 1, link.a))
    classes = _numbered(
        [
            (
                skeleton.kind_of[node],
                skeleton.loop_of[node],
                fixed.get(node),
                tuple(sorted(own[node])),
            )
            for node in range(count)
        ]
    )
    for _ in range(rounds):
        classes = _numbered(
            [
                (
                    classes[node],
                    tuple(sorted((what, end, classes[b]) for what, end, b in near[node])),
                )
                for node in range(count)
            ]
        )
    return tuple(classes)


def _numbered(keys: list[_K]) -> list[int]:
    """Numbers from 0 for different keys, in the order in which they come."""
    numbers: dict[_K, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
