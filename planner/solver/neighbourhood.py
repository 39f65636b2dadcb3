"""Neighbourhoods that a MIP solver searches exactly: some strategies kept, others left out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solver.arrays import Arrays, to_arrays
from shardwright.planner.solver.exact import solve_exact
from shardwright.planner.solver.network import IntArray, Network, NoFeasibleChoiceError
from shardwright.planner.solver.problem import FloatArray
from shardwright.planner.solver.reductions import reduce


def promising(
    arrays: Arrays, bounds: FloatArray, current: IntArray, entries: int
) -> NDArray[np.bool_]:
    """The strategies of lowest bound, as many as leave about `entries` pairs, and the current ones.

    Args:
      bounds: for each strategy a lower bound on what contains it, from `Dual.settle`.
    """
    chosen = arrays.first[:-1] + current
    levels = np.sort(bounds)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _pairs(arrays, _at_most(bounds, levels[middle], chosen)) <= entries:
            low = middle
        else:
            high = middle - 1
    return _at_most(bounds, levels[low], chosen)


def _at_most(bounds: FloatArray, level: float, chosen: IntArray) -> NDArray[np.bool_]:
    keep: NDArray[np.bool_] = bounds <= level
    keep[chosen] = True
    return keep


def _pairs(arrays: Arrays, keep: NDArray[np.bool_]) -> int:
    kept = np.add.reduceat(keep.astype(np.int64), arrays.first[:-1])
    return int((kept[arrays.edge_a] * kept[arrays.edge_b]).sum())


def around(
    arrays: Arrays, current: IntArray, entries: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """All strategies of the nodes around a random one, up to `entries` pairs; else the current."""
    keep = np.zeros(len(arrays.unary), dtype=np.bool_)
    keep[arrays.first[:-1] + current] = True
    queue = [int(rng.integers(len(arrays.nodes)))]
    seen = set(queue)
    pairs = 0
    while queue and pairs < entries:
        node = queue.pop(0)
        keep[arrays.first[node] : arrays.first[node + 1]] = True
        near = arrays.incident[arrays.incident_first[node] : arrays.incident_first[node + 1]]
        others = arrays.edge_a[near] + arrays.edge_b[near] - node
        for edge, other in zip(near, others.tolist(), strict=True):
            if keep[arrays.first[other] : arrays.first[other + 1]].all():
                pairs += int(arrays.edge_first[edge + 1] - arrays.edge_first[edge])
        fresh = [other for other in others.tolist() if other not in seen]
        seen.update(fresh)
        queue += [fresh[i] for i in rng.permutation(len(fresh))]
    return keep


def search_within(
    network: Network,
    arrays: Arrays,
    keep: NDArray[np.bool_],
    current: IntArray,
    *,
    time_limit_s: float,
    seed: int,
) -> IntArray | None:
    """The best choices among the strategies kept, or None where none were found in time.

    Args:
      network: what `arrays` was laid out from; it is left as it is.
    """
    part = network.copy()
    for place, node in enumerate(arrays.nodes):
        kept = keep[arrays.first[place] : arrays.first[place + 1]]
        part.unary[node] = np.where(kept, part.costs(node), np.inf)
    full = np.zeros(len(network.unary), dtype=np.int64)
    full[arrays.nodes] = current
    try:
        reduce(part)
    except NoFeasibleChoiceError:
        return None
    best = np.zeros(len(network.unary), dtype=np.int64)
    if part.alive():
        rest = to_arrays(part)
        start = np.array(part.project(full.tolist()))[rest.nodes]
        hint = start if (start >= 0).all() else None
        result = solve_exact(rest, time_limit_s=time_limit_s, hint=hint, seed=seed)
        if result.choice is None:
            return None
        best[rest.nodes] = result.choice
    return np.array(part.expand(best.tolist()))[arrays.nodes]
