"""From a problem to a solution with a bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shardwright.planner.solver.arrays import Arrays, to_arrays
from shardwright.planner.solver.elimination import elimination_order, solve_by_elimination
from shardwright.planner.solver.exact import solve_exact
from shardwright.planner.solver.incumbent import PROVEN, Incumbent, relative_gap
from shardwright.planner.solver.least_peak import find_least_peak
from shardwright.planner.solver.network import IntArray, Network, NoFeasibleChoiceError
from shardwright.planner.solver.problem import Problem, evaluate, validate
from shardwright.planner.solver.reductions import forbid_unsupported, reduce, reduce_memory
from shardwright.planner.solver.screening import LEAST_ENTRIES, screen

_PLAIN_EXACT_ENTRIES = 5_000
_ELIMINATION_ENTRIES = 1e6
_LEAST_TIME_FOR_PEAK_S = 1.0


@dataclass(frozen=True)
class Solution:
    """The best choices found and how good they can at most be.

    Attributes:
      choices: one strategy a node; where infeasible, the choices of the least peak found.
      cost: of the choices (exact, see `evaluate`).
      bound: no feasible choice costs less; inf where there is none.
      gap: (cost - bound) / |cost|.
      status: "optimal" where the gap asked for is proven (1e-9 where none was, the rounding of the
        solvers), "feasible", "infeasible" where no choice within the limit was found, or "cut off"
        where none costs less than the cutoff; its choices are then the best seen, if any.
      seconds: wall time taken.
      peak, limit: bytes.
      least_peak: where infeasible, the least peak memory found, in bytes; None where forbidden
        entries alone exclude every choice.
      least_peak_proven: whether no choice has a lower peak.
    """

    choices: tuple[int, ...]
    cost: float
    bound: float
    gap: float
    status: Literal["optimal", "feasible", "infeasible", "cut off"]
    seconds: float
    peak: float
    limit: float | None
    least_peak: float | None = None
    least_peak_proven: bool = False


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    warm_starts: Sequence[Sequence[int]] = (),
    gap: float = 0.0,
    cutoff: float = math.inf,
    workers: int = 2,
    on_progress: Callable[[float, float, float], None] | None = None,
) -> Solution:
    """Choose a strategy for each node at least cost within the memory limit.

    Args:
      problem: costs in any one unit, memory in bytes.
      time_limit_s: wall time after which to stop with the best found.
      seed: of all random choices; the same seed tries the same things, as far as the time goes.
      warm_starts: choices to begin with, feasible or not.
      gap: relative gap at which to stop; 0 for a proven optimum.
      cutoff: a cost that is of no use: stop once it is proven that nothing costs less.
      workers: threads.
      on_progress: called with (seconds, best cost, bound) as they improve.

    Raises:
      InputError: the problem or a warm start is malformed.
    """
    started = time.perf_counter()
    deadline = started + time_limit_s
    validate(problem)
    incumbent = Incumbent(problem)
    for warm_start in warm_starts:
        incumbent.offer(warm_start)
    bound = -math.inf

    def report(proven: float) -> None:
        if on_progress is not None:
            on_progress(time.perf_counter() - started, incumbent.cost, proven)

    options = _Options(seed, gap, workers, cutoff)
    bound = _search_to(problem, incumbent, deadline, options, report)
    if bound >= cutoff < min(math.inf, incumbent.cost):
        return _cut_off(problem, incumbent, bound, started)
    if incumbent.found:
        return _conclude(problem, incumbent, bound, gap, started)
    return _conclude_infeasible(problem, incumbent, bound, deadline, options, started)


@dataclass(frozen=True)
class _Options:
    seed: int
    gap: float
    workers: int
    cutoff: float

    def enough(self, cost: float, bound: float) -> bool:
        """Whether there is nothing left to prove."""
        return bound >= self.cutoff or relative_gap(cost, bound) <= max(self.gap, PROVEN)


def _search_to(
    problem: Problem,
    incumbent: Incumbent,
    deadline: float,
    options: _Options,
    report: Callable[[float], None],
) -> float:
    """Improve the incumbent until proven or the deadline; the bound, inf where nothing fits."""
    started = time.perf_counter()
    bound = -math.inf
    try:
        network = Network(problem)
        forbid_unsupported(network, network.alive())
        reduce_memory(network)
        if network.entries() >= LEAST_ENTRIES:
            bound = screen(
                network,
                incumbent,
                gap=options.gap,
                cutoff=options.cutoff,
                seed=options.seed,
                deadline=deadline,
            )
            report(bound)
            out_of_time = time.perf_counter() > deadline and incumbent.found
            if options.enough(incumbent.cost, bound) or out_of_time:
                return bound
        reduce(network, lambda: time.perf_counter() > 0.5 * (started + deadline))
        return max(bound, _solve_reduced(network, incumbent, deadline, options, report))
    except NoFeasibleChoiceError:
        # What was forbidden for its bound costs more than the incumbent.
        return incumbent.cost


def _solve_reduced(
    network: Network,
    incumbent: Incumbent,
    deadline: float,
    options: _Options,
    report: Callable[[float], None],
) -> float:
    """The bound proven; the incumbent is improved on the way."""
    if not network.alive():
        incumbent.offer(network.expand([0] * len(network.unary)))
        return network.constant
    arrays = to_arrays(network)
    order = elimination_order(arrays, _ELIMINATION_ENTRIES)
    if order is not None:
        # Without the memory limit a choice costs at least this; one that fits is then the best.
        choice, cost = solve_by_elimination(arrays, order)
        _offer(network, arrays, choice, incumbent)
        bound = cost + network.constant
        if options.enough(incumbent.cost, bound):
            return bound
    if network.entries() > _PLAIN_EXACT_ENTRIES:
        from shardwright.planner.solver.search import Search

        search = Search(
            network,
            incumbent,
            deadline=deadline,
            seed=options.seed,
            gap=options.gap,
            workers=options.workers,
            cutoff=options.cutoff,
            on_progress=report,
        )
        search.run()
        return search.bound
    result = solve_exact(
        arrays,
        time_limit_s=deadline - time.perf_counter(),
        gap=options.gap,
        seed=options.seed,
    )
    if result.infeasible:
        raise NoFeasibleChoiceError
    if result.choice is not None:
        _offer(network, arrays, result.choice, incumbent)
    return result.bound + network.constant


def _offer(network: Network, arrays: Arrays, choice: IntArray, incumbent: Incumbent) -> None:
    full = np.zeros(len(network.unary), dtype=np.int64)
    full[arrays.nodes] = choice
    incumbent.offer(network.expand(full.tolist()))


def _conclude(
    problem: Problem, incumbent: Incumbent, bound: float, gap: float, started: float
) -> Solution:
    assert incumbent.choices is not None
    # As a plain float it compares with whole costs exactly.
    bound = min(float(bound), incumbent.cost)
    reached = relative_gap(incumbent.cost, bound)
    return Solution(
        incumbent.choices,
        incumbent.cost,
        bound,
        reached,
        "optimal" if reached <= max(gap, PROVEN) else "feasible",
        time.perf_counter() - started,
        incumbent.peak,
        problem.memory_limit,
    )


def _cut_off(problem: Problem, incumbent: Incumbent, bound: float, started: float) -> Solution:
    choices = incumbent.choices or (0,) * len(problem.costs)
    return Solution(
        choices,
        incumbent.cost,
        bound,
        relative_gap(incumbent.cost, bound),
        "cut off",
        time.perf_counter() - started,
        incumbent.peak,
        problem.memory_limit,
    )


def _conclude_infeasible(
    problem: Problem,
    incumbent: Incumbent,
    bound: float,
    deadline: float,
    options: _Options,
    started: float,
) -> Solution:
    """Say how little memory would do, using what is left of the time and at least a little."""

    def attempt(tried: Problem, until: float) -> tuple[tuple[int, ...] | None, bool]:
        found = Incumbent(tried)
        free = replace(options, cutoff=math.inf)
        proven = _search_to(tried, found, until, free, lambda _: None)
        return (found.choices if found.found else None), float(proven) == math.inf

    extra = time.perf_counter() + _LEAST_TIME_FOR_PEAK_S
    excluded = -1.0
    if math.isinf(bound) and bound > 0 and problem.memory_limit is not None:
        excluded = math.floor(problem.memory_limit)
    least = find_least_peak(
        problem, incumbent.choices, attempt, excluded=excluded, deadline=max(deadline, extra)
    )
    choices = least.choices or (0,) * len(problem.costs)
    checked = evaluate(problem, choices)
    return Solution(
        choices,
        checked.cost,
        bound,
        math.inf,
        "infeasible",
        time.perf_counter() - started,
        checked.peak,
        problem.memory_limit,
        None if least.choices is None else least.peak,
        least.proven,
    )
