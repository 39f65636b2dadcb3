"""A quick bound and solution of a whole network, before it is reduced.

Message passing on the network as it is costs a fraction of reducing it and often comes within a
few thousandths of the optimum. What it proves too expensive goes at once, which leaves little to
reduce.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from shardwright.planner.solver.arrays import Arrays, to_arrays
from shardwright.planner.solver.dual import Dual
from shardwright.planner.solver.fixing import fix_by_bound
from shardwright.planner.solver.incumbent import Incumbent, relative_gap
from shardwright.planner.solver.kernels import forest_search
from shardwright.planner.solver.network import IntArray, Network
from shardwright.planner.solver.problem import Problem
from shardwright.planner.solver.reductions import forbid_unsupported

LEAST_ENTRIES = 20_000
"""Smaller networks are solved before a quick bound would tell anything."""
_MOST_ENTRIES = 50_000_000
_ITERATIONS = 20
_ATTEMPTS = 8
_MOVES = 40
_HOPELESS_GAP = 0.2


def costs_alone(problem: Problem, cutoff: float) -> float:
    """A bound at no price on memory; once it reaches the cutoff it is not improved.

    Of a mesh that is too slow however much memory there is, this is all that has to be known.

    Raises:
      NoFeasibleChoiceError: what is forbidden excludes every choice.
    """
    network = Network(replace(problem, memory=(), memory_limit=None))
    if network.entries() > _MOST_ENTRIES:
        return -math.inf
    forbid_unsupported(network, network.alive())
    dual = Dual(to_arrays(network, share=True), enough=cutoff - network.constant)
    return dual.begun + network.constant


def screen(
    network: Network,
    incumbent: Incumbent,
    *,
    gap: float,
    cutoff: float,
    seed: int,
    deadline: float = math.inf,
) -> float:
    """Bounds and improves, and forbids what only costlier choices than the incumbent contain.

    Args:
      network: without strategies forbidden by themselves; what is forbidden is to be reduced away.
      gap: relative gap that is enough.
      cutoff: a bound that is enough.
      deadline: on the clock of `time.perf_counter`; something feasible is looked for until then.

    Returns:
      A lower bound on the cost of what the network allowed before; -inf where nothing was done.
    """
    if network.entries() > _MOST_ENTRIES:
        return -math.inf
    arrays = to_arrays(network)
    enough = cutoff - network.constant
    dual = Dual(arrays, enough=enough, deadline=deadline)
    bound = -math.inf
    for attempt in range(_ATTEMPTS):
        dual.ascend(_ITERATIONS, incumbent.cost - network.constant)
        bound = max(bound, dual.bound + network.constant)
        if dual.bound >= enough:
            return bound
        assert dual.best is not None
        starts = [dual.best.choice, None if attempt else _known(network, arrays, incumbent)]
        for start in starts:
            if start is not None:
                _improve(network, arrays, dual, incumbent, start, seed + attempt)
        if relative_gap(incumbent.cost, bound) <= gap:
            return bound
        if not len(network.slack) or time.perf_counter() > deadline:
            # Without memory the first rounding is as good as any.
            break
    reached = relative_gap(incumbent.cost, bound)
    if gap < reached < _HOPELESS_GAP and time.perf_counter() < deadline:
        fix_by_bound(network, dual, incumbent.cost - network.constant)
        bound = max(bound, dual.bound + network.constant)
    return min(bound, incumbent.cost)


def _improve(
    network: Network,
    arrays: Arrays,
    dual: Dual,
    incumbent: Incumbent,
    start: IntArray,
    seed: int,
) -> None:
    """Offers a start and what forests make of it."""
    choice = start.copy()
    scale = 1e-3 * abs(dual.bound)
    forest_search(arrays, choice, dual.prices.copy(), scale, _MOVES, 0, seed)
    for found in (start, choice):
        full = np.zeros(len(network.unary), dtype=np.int64)
        full[arrays.nodes] = found
        incumbent.offer(network.expand(full.tolist()))


def _known(network: Network, arrays: Arrays, incumbent: Incumbent) -> IntArray | None:
    """The incumbent in terms of the arrays."""
    if incumbent.choices is None:
        return None
    choice = np.array(network.project(incumbent.choices))[arrays.nodes]
    return choice if (choice >= 0).all() else None
