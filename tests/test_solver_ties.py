"""Tied problems against the whole ones, by enumeration."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.solver import Edge, MemoryTerm, Problem, evaluate, solve
from shardwright.planner.solver.mixtures import mix, price_memory
from shardwright.planner.solver.problem import memory_profile
from shardwright.planner.solver.restricted import open_nodes, restrict
from shardwright.planner.solver.ties import tie
from shardwright.planner.solver.whole import improve

ENOUGH_S = 3600.0
"""No solve here takes so long: what ends each is its proof, however busy the machine."""


@st.composite
def repeated(draw):
    """Three or four equal parts in a row, each of two nodes, with shared arrays; and classes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parts = draw(st.integers(3, 4))
    sizes = rng.integers(2, 4, 2)
    costs = [rng.integers(0, 50, size).astype(float) for size in sizes]
    inner = rng.integers(0, 50, sizes).astype(float)
    onward = rng.integers(0, 50, (sizes[1], sizes[0])).astype(float)
    usages = [rng.integers(0, 9, size) for size in sizes]
    edges, memory = [], []
    for part in range(parts):
        a, b = 2 * part, 2 * part + 1
        edges.append(Edge(a, b, inner))
        if part + 1 < parts:
            edges.append(Edge(b, a + 2, onward))
        end = 2 * parts - part if draw(st.booleans()) else part + 1
        memory += [MemoryTerm(a, part, end, usages[0]), MemoryTerm(b, part, part + 1, usages[1])]
    base = rng.integers(0, 4, 2 * parts) if draw(st.booleans()) else None
    most = sum(int(term.usage.max()) for term in memory)
    limit = draw(st.sampled_from([0.3, 0.5, 0.8])) * most
    problem = Problem(tuple(costs * parts), tuple(edges), tuple(memory), limit, base)
    return problem, [0, 1] * parts


@settings(max_examples=150, deadline=None)
@given(repeated())
def test_tied_choices_cost_and_hold_what_they_do_in_the_whole_problem(case):
    problem, classes = case
    tied = tie(problem, classes)
    for choices in itertools.product(*(range(len(c)) for c in tied.problem.costs)):
        small, whole = evaluate(tied.problem, choices), evaluate(problem, tied.lift(choices))
        assert small.cost == whole.cost
        assert small.feasible == whole.feasible
        assert max(small.peak, 0) == whole.peak


@settings(max_examples=80, deadline=None)
@given(repeated())
def test_the_tied_optimum_is_the_best_of_equal_parts(case):
    problem, classes = case
    tied = tie(problem, classes)
    best = min(
        (
            checked.cost
            for choices in itertools.product(*(range(len(c)) for c in tied.problem.costs))
            if (checked := evaluate(problem, tied.lift(choices))).feasible
        ),
        default=math.inf,
    )
    solution = solve(tied.problem, time_limit_s=ENOUGH_S)
    if best == math.inf:
        assert solution.status == "infeasible"
    else:
        assert solution.cost == best
        lifted = tied.lift(solution.choices)
        assert evaluate(problem, lifted).cost == best
        assert tied.project(lifted) == solution.choices


def test_nodes_left_alone_stay_as_they_are():
    costs = (np.array([1.0, 2.0]), np.array([5.0, 3.0]))
    problem = Problem(costs, (Edge(0, 1, np.array([[0.0, 9.0], [9.0, 0.0]])),))
    tied = tie(problem, [0, 1])
    assert solve(tied.problem).cost == pytest.approx(solve(problem).cost)


@settings(max_examples=100, deadline=None)
@given(repeated())
def test_improving_the_whole_problem_bounds_and_never_worsens(case):
    problem, classes = case
    solution = solve(tie(problem, classes).problem, time_limit_s=ENOUGH_S)
    if solution.status == "infeasible":
        return
    start = tie(problem, classes).lift(solution.choices)
    better = improve(problem, start, deadline=0.0, gap=0.0)
    assert better.cost <= solution.cost
    assert evaluate(problem, better.choices).cost == better.cost
    least = solve(problem, time_limit_s=ENOUGH_S).cost
    assert better.bound <= least * (1 + 1e-9) + 1e-9 <= better.cost * (1 + 2e-9) + 2e-9


@settings(max_examples=60, deadline=None)
@given(repeated())
def test_a_tied_time_point_holds_what_that_point_of_the_whole_problem_does(case):
    problem, classes = case
    tied = tie(problem, classes)
    for choices in itertools.product(*(range(len(c)) for c in tied.problem.costs)):
        small = memory_profile(tied.problem, choices)
        whole = memory_profile(problem, tied.lift(choices))
        assert small.tolist() == whole[list(tied.times[: len(small)])].tolist()


@settings(max_examples=60, deadline=None)
@given(repeated(), st.integers(0, 2**32 - 1))
def test_restricted_problems_have_the_best_of_all_mixtures(case, seed):
    problem, _ = case
    rng = np.random.default_rng(seed)
    known = [[int(rng.integers(len(c))) for c in problem.costs] for _ in range(2)]
    small = restrict(problem, known)
    assert [small.lift(small.project(choices)) for choices in known] == [*map(tuple, known)]
    found = solve(small.problem, time_limit_s=ENOUGH_S)
    mixtures = itertools.product(*map(set, zip(*known, strict=True)))
    checked = [evaluate(problem, choices) for choices in mixtures]
    least = min((one.cost for one in checked if one.feasible), default=math.inf)
    assert found.status == ("infeasible" if least == math.inf else "optimal")
    if least < math.inf:
        assert found.cost == evaluate(problem, small.lift(found.choices)).cost == least


@settings(max_examples=60, deadline=None)
@given(repeated(), st.integers(0, 2**32 - 1))
def test_what_is_left_open_costs_and_holds_as_much_as_the_whole(case, seed):
    problem, _ = case
    rng = np.random.default_rng(seed)
    known = [[int(rng.integers(len(c))) for c in problem.costs] for _ in range(2)]
    small = restrict(problem, known).problem
    left = open_nodes(small)
    if left is None:
        assert known[0] == known[1]
        return
    for choices in itertools.product(*(range(len(c)) for c in left.problem.costs)):
        ours, whole = evaluate(left.problem, choices), evaluate(small, left.lift(choices))
        assert (ours.cost, ours.peak, ours.feasible) == (whole.cost, whole.peak, whole.feasible)
        assert left.project(left.lift(choices)) == choices


def mixture(problem, tied, start):
    until = time.perf_counter() + ENOUGH_S
    cost = evaluate(problem, start).cost
    priced = price_memory(tied.problem, cost, deadline=until, gap=0.0, seed=0)
    return mix(problem, tied, priced, start, deadline=until, gap=0.0, seed=0)


def test_parts_that_choose_differently_use_the_memory_that_one_choice_for_all_leaves():
    # Ten parts; the fast choice costs 1 and holds 10 bytes, the lean one costs 2 and holds 5.
    costs = np.array([1.0, 2.0])
    memory = tuple(MemoryTerm(part, 0, 1, np.array([10, 5])) for part in range(10))
    problem = Problem((costs,) * 10, (), memory, 80)
    tied = tie(problem, [0] * 10)
    alone = solve(tied.problem)
    assert alone.cost == 20
    start = tied.lift(alone.choices)
    mixed = mixture(problem, tied, start)
    assert evaluate(problem, mixed.choices).cost == 14
    better = improve(
        problem,
        mixed.choices,
        deadline=time.perf_counter() + ENOUGH_S,
        gap=0.0,
        prices=mixed.prices,
    )
    # A byte is worth a fifth of a second, which proves that nothing is better.
    assert better.bound == pytest.approx(14, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(repeated())
def test_mixtures_fit_and_cost_no_more_than_one_choice_for_all(case):
    problem, classes = case
    tied = tie(problem, classes)
    alone = solve(tied.problem, time_limit_s=ENOUGH_S)
    if alone.status == "infeasible":
        return
    start = tied.lift(alone.choices)
    mixed = mixture(problem, tied, start)
    checked = evaluate(problem, mixed.choices)
    assert checked.feasible and checked.cost <= alone.cost
