"""The solver against enumeration of all choices."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.solver import Edge, MemoryTerm, Problem, evaluate, solve
from shardwright.planner.solver.incumbent import Incumbent
from shardwright.planner.solver.network import Network, NoFeasibleChoiceError
from shardwright.planner.solver.reductions import forbid_unsupported, reduce, reduce_memory
from shardwright.planner.solver.screening import screen

ENOUGH_S = 3600.0
"""No solve here takes so long: what ends each is its proof, however busy the machine."""


def brute_force(problem: Problem) -> float:
    """Least cost by enumeration; inf where nothing is feasible."""
    best = math.inf
    for choices in itertools.product(*(range(len(c)) for c in problem.costs)):
        checked = evaluate(problem, choices)
        if checked.feasible:
            best = min(best, checked.cost)
    return best


def least_peak(problem: Problem) -> float:
    """Least peak over choices without a forbidden entry."""
    checked = [
        evaluate(problem, choices)
        for choices in itertools.product(*(range(len(c)) for c in problem.costs))
    ]
    return min((c.peak for c in checked if math.isfinite(c.cost)), default=math.inf)


def best_left(problem: Problem, network: Network) -> float:
    """Least cost of what a network still allows, by enumeration; inf where nothing is feasible."""
    rest = network.alive()
    found = math.inf
    for picked in itertools.product(*(range(len(network.costs(n))) for n in rest)):
        choices = [0] * len(problem.costs)
        for node, choice in zip(rest, picked, strict=True):
            choices[node] = choice
        checked = evaluate(problem, network.expand(choices))
        if checked.feasible:
            found = min(found, checked.cost)
    return found


@st.composite
def problems(draw, max_nodes=6, max_strategies=4, horizon=6):
    """Small problems with ties, forbidden entries, parallel edges, loops and tight memory."""
    sizes = draw(st.lists(st.integers(1, max_strategies), min_size=1, max_size=max_nodes))
    seed = draw(st.integers(0, 2**32 - 1))
    forbidden = draw(st.sampled_from([0.0, 0.2, 0.5, 0.7]))
    density = draw(st.sampled_from([0.3, 0.7, 1.2]))
    tightness = draw(st.sampled_from([None, 0.3, 0.5, 0.7, 1.0]))
    distinct = draw(st.sampled_from([3, 1000]))
    rng = np.random.default_rng(seed)

    def table(*shape, often=1.0):
        values = rng.integers(0, distinct, shape).astype(float)
        values[rng.random(shape) < forbidden * often] = np.inf
        return values

    count = len(sizes)
    edges = tuple(
        Edge(a, b, table(sizes[a], sizes[b]))
        for a, b in rng.integers(0, count, (int(density * count), 2)).tolist()
    )
    memory = []
    for _ in range(rng.integers(0, 2 * count + 1)):
        node, start = int(rng.integers(count)), int(rng.integers(horizon))
        end = int(rng.integers(start, horizon + 1))
        memory.append(MemoryTerm(node, start, end, rng.integers(0, 5, sizes[node])))
    base = rng.integers(0, 3, horizon) if rng.random() < 0.3 else None
    problem = Problem(
        tuple(table(size, often=0.3) for size in sizes), edges, tuple(memory), None, base
    )
    if tightness is None:
        return problem
    most = sum(int(t.usage.max()) for t in memory)
    return Problem(problem.costs, edges, tuple(memory), int(tightness * most), base)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_reductions_keep_an_optimal_choice(problem):
    network = Network(problem)
    best = brute_force(problem)
    try:
        reduce(network)
    except NoFeasibleChoiceError:
        assert best == math.inf
        return
    assert best_left(problem, network) == best


@settings(max_examples=200, deadline=None)
@given(problems())
def test_a_feasible_choice_stays_feasible_and_no_dearer_when_projected(problem):
    network = Network(problem)
    try:
        reduce(network)
    except NoFeasibleChoiceError:
        return
    for choices in itertools.product(*(range(len(c)) for c in problem.costs)):
        before = evaluate(problem, choices)
        if before.feasible:
            own = network.project(choices)
            assert all(own[node] >= 0 for node in network.alive())
            after = evaluate(problem, network.expand(own))
            assert after.feasible and after.cost <= before.cost


@settings(max_examples=100, deadline=None)
@given(problems())
def test_solve_finds_the_optimum_by_mip(problem):
    best = brute_force(problem)
    solution = solve(problem, time_limit_s=ENOUGH_S)
    if best == math.inf:
        assert solution.status == "infeasible"
    else:
        assert solution.status == "optimal"
        assert solution.cost == best
        assert evaluate(problem, solution.choices).feasible
        assert solution.bound == pytest.approx(best, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_an_infeasible_problem_tells_the_least_peak(problem):
    if brute_force(problem) < math.inf:
        return
    solution = solve(problem, time_limit_s=ENOUGH_S)
    assert solution.status == "infeasible"
    assert solution.least_peak_proven
    least = least_peak(problem)
    if least == math.inf:
        assert solution.least_peak is None
    else:
        assert solution.least_peak == least == evaluate(problem, solution.choices).peak


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([0.5, 0.9, 1.0, 1.1]))
def test_a_cutoff_stops_only_where_nothing_costs_less(problem, share):
    best = brute_force(problem)
    if not 0 < best < math.inf:
        return
    solution = solve(problem, time_limit_s=ENOUGH_S, cutoff=share * best)
    if solution.status == "cut off":
        assert best >= share * best - 1e-9 * best
        assert share * best <= solution.bound <= best * (1 + 1e-9)
    else:
        assert solution.cost == best


@settings(max_examples=100, deadline=None)
@given(problems())
def test_screening_keeps_an_optimum_and_bounds_it(problem):
    best = brute_force(problem)
    network, incumbent = Network(problem), Incumbent(problem)
    try:
        forbid_unsupported(network, network.alive())
        reduce_memory(network)
        bound = screen(network, incumbent, gap=0.0, cutoff=math.inf, seed=0)
        assert bound <= best * (1 + 1e-9) + 1e-9
        reduce(network)
    except NoFeasibleChoiceError:
        assert incumbent.cost == best
        return
    assert min(incumbent.cost, best_left(problem, network)) == best
