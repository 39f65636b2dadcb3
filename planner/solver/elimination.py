"""Exact minimisation without memory, by eliminating variables where the tables stay small.

Also known as dynamic programming over a tree decomposition. The order is greedy: the node whose
elimination makes the smallest table goes next.

Source: Dechter, Bucket elimination: a unifying framework for reasoning (AIJ 113, 1999), section 3.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from shardwright.planner.solver.arrays import Arrays
from shardwright.planner.solver.network import IntArray
from shardwright.planner.solver.problem import FloatArray


def elimination_order(arrays: Arrays, largest: float) -> list[int] | None:
    """An order that makes no table of more than `largest` entries, or None if none was found."""
    count = len(arrays.nodes)
    weight = np.log(np.diff(arrays.first)).tolist()
    near: list[set[int]] = [set() for _ in range(count)]
    for a, b in zip(arrays.edge_a.tolist(), arrays.edge_b.tolist(), strict=True):
        near[a].add(b)
        near[b].add(a)

    def size(node: int) -> float:
        return float(weight[node] + sum(weight[other] for other in near[node]))

    sizes = [size(node) for node in range(count)]
    queue = [(sizes[node], node) for node in range(count)]
    heapq.heapify(queue)
    gone = [False] * count
    order: list[int] = []
    while queue:
        at, node = heapq.heappop(queue)
        if gone[node] or at != sizes[node]:
            continue
        if at > math.log(largest):
            return None
        order.append(node)
        gone[node] = True
        for other in near[node]:
            near[other] |= near[node]
            near[other] -= {node, other}
        for other in near[node]:
            sizes[other] = size(other)
            heapq.heappush(queue, (sizes[other], other))
    return order


def solve_by_elimination(arrays: Arrays, order: list[int]) -> tuple[IntArray, float]:
    """The best choices and their cost, memory left aside; `order` from `elimination_order`."""
    # A factor is a table over the nodes of its scope; each waits at the node that goes first.
    place = {node: position for position, node in enumerate(order)}
    waiting: list[list[tuple[tuple[int, ...], FloatArray]]] = [[] for _ in order]
    for node in order:
        costs = arrays.unary[arrays.first[node] : arrays.first[node + 1]]
        waiting[node].append(((node,), costs))
    sizes = np.diff(arrays.first)
    for edge, (a, b) in enumerate(zip(arrays.edge_a.tolist(), arrays.edge_b.tolist(), strict=True)):
        table = arrays.table[arrays.edge_first[edge] : arrays.edge_first[edge + 1]]
        soonest = min(a, b, key=place.__getitem__)
        waiting[soonest].append(((a, b), table.reshape(sizes[a], sizes[b])))
    steps: list[tuple[int, tuple[int, ...], IntArray]] = []
    cost = 0.0
    for node in order:
        others = {other for scope, _ in waiting[node] for other in scope} - {node}
        rest = tuple(sorted(others, key=place.__getitem__))
        total = sum(
            (_aligned(table, scope, (node, *rest)) for scope, table in waiting[node]),
            start=np.zeros((sizes[node],) + (1,) * len(rest)),
        )
        steps.append((node, rest, np.argmin(total, axis=0)))
        least = total.min(axis=0)
        if rest:
            waiting[rest[0]].append((rest, least))
        else:
            cost += float(least)
    choice = np.zeros(len(order), dtype=np.int64)
    for node, rest, best in reversed(steps):
        choice[node] = best[tuple(choice[other] for other in rest)]
    return choice, cost


def _aligned(table: FloatArray, scope: tuple[int, ...], axes: tuple[int, ...]) -> FloatArray:
    """The table with its axes in the order of `axes`, of length 1 where it lacks one."""
    inside = sorted(range(len(scope)), key=lambda axis: axes.index(scope[axis]))
    lengths = {node: table.shape[axis] for axis, node in enumerate(scope)}
    return table.transpose(inside).reshape([lengths.get(node, 1) for node in axes])
