"""Variable elimination against enumeration."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.solver import Edge, Problem, evaluate, solve
from shardwright.planner.solver.arrays import to_arrays
from shardwright.planner.solver.elimination import elimination_order, solve_by_elimination
from shardwright.planner.solver.network import Network


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_elimination_finds_the_least_cost(seed, count):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, count)
    pairs = [p for p in itertools.combinations(range(count), 2) if rng.random() < 0.5]
    edges = tuple(Edge(a, b, rng.integers(0, 9, (sizes[a], sizes[b])) * 1.0) for a, b in pairs)
    problem = Problem(tuple(rng.integers(0, 9, size) * 1.0 for size in sizes), edges)
    arrays = to_arrays(Network(problem))
    order = elimination_order(arrays, 1e6)
    assert order is not None and sorted(order) == list(range(count))
    choice, cost = solve_by_elimination(arrays, order)
    best = min(
        evaluate(problem, choices).cost
        for choices in itertools.product(*(range(size) for size in sizes))
    )
    assert cost == best == evaluate(problem, choice.tolist()).cost


def test_no_order_is_given_where_a_table_would_be_too_large():
    edges = tuple(Edge(a, b, np.ones((10, 10))) for a, b in itertools.combinations(range(5), 2))
    arrays = to_arrays(Network(Problem(tuple(np.ones(10) for _ in range(5)), edges)))
    # All five nodes are tied together: the first to go makes a table of 10**5.
    assert elimination_order(arrays, 10**5 - 1) is None
    assert elimination_order(arrays, 10**5 + 1) is not None


def test_a_ladder_without_memory_is_solved_without_a_mip():
    rng = np.random.default_rng(1)
    rungs, size = 60, 12
    pairs = [(n, n + 2) for n in range(2 * rungs - 2)] + [(2 * r, 2 * r + 1) for r in range(rungs)]
    edges = tuple(Edge(a, b, rng.random((size, size))) for a, b in pairs)
    costs = tuple(rng.random(size) for _ in range(2 * rungs))
    # Viterbi over rungs, from the definition.
    total = np.zeros((size, size))
    for r in range(rungs):
        own = costs[2 * r][:, None] + costs[2 * r + 1][None, :] + edges[2 * rungs - 2 + r].cost
        if r:
            total = (total[:, None, :] + edges[2 * r - 2].cost[:, :, None]).min(axis=0)
            total = (total[:, :, None] + edges[2 * r - 1].cost[None, :, :]).min(axis=1)
        total = total + own
    solution = solve(Problem(costs, edges))
    assert solution.status == "optimal"
    assert solution.cost == pytest.approx(total.min(), rel=1e-12)
