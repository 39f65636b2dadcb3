"""A large problem with known choices: improved as it is, and bounded, without making it smaller.

For problems of many alike parts, whose arrays are shared: they take no more memory than one part,
where reductions would make each part its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.planner.solver.arrays import to_arrays
from shardwright.planner.solver.dual import Dual
from shardwright.planner.solver.incumbent import PROVEN, Incumbent, relative_gap
from shardwright.planner.solver.kernels import forest_search
from shardwright.planner.solver.network import IntArray, Network, NoFeasibleChoiceError
from shardwright.planner.solver.problem import FloatArray, Problem
from shardwright.planner.solver.reductions import forbid_unsupported, reduce_memory
from shardwright.planner.solver.solve import Solution

_ITERATIONS = 10
_SLOW_ROUNDS = 3
_MOVES = 20
_NEARBY = 200


def improve(
    problem: Problem,
    choices: Sequence[int],
    *,
    deadline: float,
    gap: float,
    seed: int = 0,
    prices: Mapping[int, float] | None = None,
) -> Solution:
    """Improves choices and bounds what any choices cost, round by round.

    Args:
      choices: feasible ones to begin with.
      deadline: on the clock of `time.perf_counter`; one round is always made.
      gap: relative gap at which to stop.
      prices: of a byte at time points, to begin with.
    """
    started = time.perf_counter()
    incumbent = Incumbent(problem)
    incumbent.offer(choices)
    bound = -math.inf
    try:
        bound = _rounds(problem, incumbent, deadline, gap, seed, prices or {})
    except NoFeasibleChoiceError:
        bound = incumbent.cost
    bound = min(bound, incumbent.cost)
    reached = relative_gap(incumbent.cost, bound)
    return Solution(
        incumbent.choices or tuple(choices),
        incumbent.cost,
        bound,
        reached,
        "optimal" if reached <= max(gap, PROVEN) else "feasible",
        time.perf_counter() - started,
        incumbent.peak,
        problem.memory_limit,
    )


def _rounds(
    problem: Problem,
    incumbent: Incumbent,
    deadline: float,
    gap: float,
    seed: int,
    prices: Mapping[int, float],
) -> float:
    network = Network(problem)
    forbid_unsupported(network, network.alive())
    reduce_memory(network)
    arrays = to_arrays(network, share=True)
    dual = Dual(arrays, _nearby(prices, network.times), deadline=deadline)
    bound = -math.inf
    slow = 0
    while True:
        began = time.perf_counter()
        before = bound, incumbent.cost
        dual.ascend(_ITERATIONS, incumbent.cost - network.constant)
        bound = max(bound, dual.bound + network.constant)
        own = np.array(network.project(incumbent.choices or ()))[arrays.nodes]
        if (own >= 0).all() and relative_gap(incumbent.cost, bound) > gap:
            seed += 1
            scale = 1e-3 * abs(dual.bound)
            for reach in (0, _NEARBY):
                forest_search(arrays, own, dual.prices.copy(), scale, _MOVES, reach, seed)
            full = np.zeros(len(network.unary), dtype=np.int64)
            full[arrays.nodes] = own
            incumbent.offer(network.expand(full.tolist()))
        took = time.perf_counter() - began
        gained = bound - before[0] + before[1] - incumbent.cost
        slow = slow + 1 if gained < 0.02 * (incumbent.cost - bound) else 0
        enough = relative_gap(incumbent.cost, bound) <= max(gap, PROVEN)
        if enough or slow >= _SLOW_ROUNDS or time.perf_counter() + took > deadline:
            return bound


def _nearby(prices: Mapping[int, float], times: IntArray) -> FloatArray:
    """Prices at the time points that are left; those of points that are not go to the nearest."""
    placed = np.zeros(len(times))
    for point, price in prices.items() if len(times) else ():
        placed[int(np.argmin(np.abs(times - point)))] += price
    return placed
