"""Evaluation and checking of problems, with sums done by hand."""

import math

import numpy as np
import pytest

from shardwright.errors import InputError
from shardwright.planner.solver import Edge, MemoryTerm, Problem, evaluate, solve


def two_nodes(**changes):
    fields = {
        "costs": (np.array([1, 2]), np.array([10, 20, 30])),
        "edges": (Edge(0, 1, np.array([[100, 200, 300], [400, 500, 10**18]])),),
        "memory": (
            MemoryTerm(0, 0, 3, np.array([5, 1])),
            MemoryTerm(1, 2, 4, np.array([7, 8, 9])),
        ),
        "memory_limit": 13,
    }
    return Problem(**(fields | changes))


def test_cost_is_the_sum_of_nodes_and_edges():
    assert evaluate(two_nodes(), [0, 2]).cost == 1 + 30 + 300


def test_peak_is_the_most_held_at_once_and_when():
    checked = evaluate(two_nodes(), [0, 1])
    assert (checked.peak, checked.peak_time, checked.feasible) == (5 + 8, 2, True)


def test_more_than_the_limit_is_not_feasible():
    checked = evaluate(two_nodes(), [0, 2])
    assert (checked.peak, checked.feasible) == (5 + 9, False)


def test_a_forbidden_pair_costs_infinity():
    checked = evaluate(two_nodes(), [1, 2])
    assert checked.cost == math.inf and not checked.feasible


def test_integer_costs_are_exact_beyond_floats():
    big = 2**60 - 1
    problem = Problem(
        (np.array([2**53 + 1]), np.array([2])), (Edge(0, 1, np.array([[2**53 + 3]])),)
    )
    assert evaluate(problem, [0, 0]).cost == 2**54 + 6
    assert big > 10**18  # entries from 10**18 on are forbidden, whatever they are
    assert evaluate(Problem((np.array([big]),)), [0]).cost == math.inf


def test_parallel_edges_and_loops_add_up():
    edge = np.array([[1, 2], [3, 4]])
    problem = Problem(
        (np.zeros(2, dtype=int), np.zeros(2, dtype=int)),
        (Edge(0, 1, edge), Edge(1, 0, edge), Edge(1, 1, edge)),
    )
    # Choices 0 and 1: edge[0, 1] + edge[1, 0] + edge[1, 1].
    assert evaluate(problem, [0, 1]).cost == 2 + 3 + 4


def test_several_terms_of_a_node_and_base_memory_add_up():
    problem = Problem(
        (np.zeros(1),),
        memory=(MemoryTerm(0, 0, 2, np.array([3])), MemoryTerm(0, 1, 3, np.array([4]))),
        base_memory=np.array([0, 10, 0, 1]),
        memory_limit=17,
    )
    checked = evaluate(problem, [0])
    assert (checked.peak, checked.peak_time, checked.feasible) == (3 + 4 + 10, 1, True)


def test_fractions_of_bytes_count_whole():
    problem = Problem(
        (np.zeros(1),), memory=(MemoryTerm(0, 0, 1, np.array([2.25])),), memory_limit=2.5
    )
    assert evaluate(problem, [0]).peak == 3
    assert not evaluate(problem, [0]).feasible


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"costs": (np.array([]), np.array([1, 2, 3]))}, "node 0.*no strategies"),
        ({"costs": (np.array([1.0, np.nan]), np.array([1, 2, 3]))}, "node 0.*not a number"),
        ({"edges": (Edge(0, 1, np.zeros((3, 2))),)}, r"edge 0 \(0, 1\).*shape \(3, 2\)"),
        ({"edges": (Edge(0, 7, np.zeros((2, 3))),)}, r"edge 0 \(0, 7\).*no node 7"),
        ({"memory": (MemoryTerm(1, 0, 1, np.array([1, 2])),)}, "memory term 0.*shape"),
        ({"memory": (MemoryTerm(0, 0, 1, np.array([1, -2])),)}, "memory term 0.*negative"),
        ({"memory_limit": -1}, "memory limit -1"),
        ({"names": ("a", "b"), "costs": (np.array([]), np.array([1]))}, "a: no strategies"),
    ],
)
def test_a_malformed_problem_says_what_and_where(changes, message):
    with pytest.raises(InputError, match=message):
        solve(two_nodes(**changes))


def test_a_warm_start_that_does_not_fit_the_problem_is_refused():
    with pytest.raises(InputError, match="1 choices for 2 nodes"):
        solve(two_nodes(), warm_starts=[[0]])
    with pytest.raises(InputError, match="node 1: strategy 3 of 3"):
        solve(two_nodes(), warm_starts=[[0, 3]])


def test_a_problem_of_one_node_takes_its_cheapest_strategy():
    solution = solve(Problem((np.array([3.0, 1.0, 2.0]),)))
    assert (solution.choices, solution.cost, solution.status) == ((1,), 1.0, "optimal")


def test_progress_and_bounds_are_reported():
    solution = solve(two_nodes())
    # By hand: 0,0 costs 111 and holds 12 at most; all others cost more.
    assert (solution.choices, solution.cost, solution.bound) == ((0, 0), 111, 111)
    assert (solution.peak, solution.limit, solution.gap) == (12, 13, 0.0)
