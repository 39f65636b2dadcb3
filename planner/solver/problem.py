"""The integer program: one strategy a node, costs on nodes and edges, memory over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import InputError

FORBIDDEN = 10**18
"""In integer tables, entries from this on are forbidden (google/iopddl, ASPLOS 2025 contest)."""

FloatArray = NDArray[np.float64]
CostArray = NDArray[np.float64] | NDArray[np.int64]


@dataclass(frozen=True)
class MemoryTerm:
    """Bytes that a node holds in the time points [start, end), by strategy.

    Args:
      node: index of the node.
      start, end: half-open interval of time points; an empty interval holds nothing.
      usage: shape (strategies of the node,), whole bytes, not negative; fractions are rounded up.
    """

    node: int
    start: int
    end: int
    usage: CostArray

    def __post_init__(self) -> None:
        usage = np.asarray(self.usage)
        if usage.dtype.kind == "f":
            usage = np.ceil(usage)
        object.__setattr__(self, "usage", usage)


@dataclass(frozen=True)
class Edge:
    """Cost of a pair of choices.

    Args:
      a, b: the two nodes. Parallel edges add up.
      cost: shape (strategies of a, strategies of b); inf (or FORBIDDEN in an integer table) where
        the pair may not be chosen.
    """

    a: int
    b: int
    cost: CostArray


@dataclass(frozen=True)
class Problem:
    """Choose a strategy for each node; minimise the sum of costs; keep memory within the limit.

    Args:
      costs: one array a node, shape (strategies,): float64, or int64 where exact integers matter.
      edges: costs of pairs of choices.
      memory: terms of memory; a node may have several.
      memory_limit: bytes allowed at each time point, or None.
      base_memory: shape (time points,), bytes in use whatever is chosen.
      names: one name a node, for messages.
    """

    costs: tuple[CostArray, ...]
    edges: tuple[Edge, ...] = ()
    memory: tuple[MemoryTerm, ...] = ()
    memory_limit: float | None = None
    base_memory: CostArray | None = None
    names: tuple[str, ...] | None = None

    @property
    def horizon(self) -> int:
        """Number of time points."""
        base = 0 if self.base_memory is None else len(self.base_memory)
        return max([base, *(term.end for term in self.memory)])


@dataclass(frozen=True)
class Evaluation:
    """What a vector of choices costs.

    `cost` is an exact int where every table is of integers, else the correctly rounded float sum;
    inf where a forbidden entry is chosen. `peak` is in bytes, reached first at `peak_time` (-1
    where the problem has no memory).
    """

    cost: float
    peak: float
    peak_time: int
    feasible: bool


def evaluate(problem: Problem, choices: Sequence[int]) -> Evaluation:
    """Cost and peak memory of `choices`, exactly.

    Raises:
      InputError: the number of choices or one of them does not fit the problem.
    """
    _check_choices(problem, choices)
    picked = [costs[choice] for costs, choice in zip(problem.costs, choices, strict=True)]
    picked += [edge.cost[choices[edge.a], choices[edge.b]] for edge in problem.edges]
    profile = memory_profile(problem, choices)
    peak_time = int(np.argmax(profile)) if len(profile) else -1
    peak = profile[peak_time].item() if len(profile) else 0
    within = problem.memory_limit is None or peak <= problem.memory_limit
    cost = _exact_sum(picked)
    return Evaluation(cost, peak, peak_time, within and math.isfinite(cost))


def memory_profile(problem: Problem, choices: Sequence[int]) -> CostArray:
    """Bytes in use at each time point under `choices`, shape (problem.horizon,)."""
    integral = all(term.usage.dtype.kind in "iu" for term in problem.memory) and (
        problem.base_memory is None or problem.base_memory.dtype.kind in "iu"
    )
    steps = np.zeros(problem.horizon + 1, dtype=np.int64 if integral else np.float64)
    for term in problem.memory:
        if term.start < term.end:
            used = term.usage[choices[term.node]]
            steps[term.start] += used
            steps[term.end] -= used
    profile = np.cumsum(steps)[:-1]
    if problem.base_memory is not None:
        base = np.zeros_like(profile)
        base[: len(problem.base_memory)] = problem.base_memory
        return cast("CostArray", profile + base)
    return cast("CostArray", profile)


def _exact_sum(values: Sequence[Any]) -> float:
    """Sum without rounding on the way; inf where any value is forbidden."""
    if any(v >= FORBIDDEN if v.dtype.kind in "iu" else math.isinf(v) for v in values):
        return math.inf
    if all(v.dtype.kind in "iu" for v in values):
        return sum(int(v) for v in values)
    return math.fsum(float(v) for v in values)


def _check_choices(problem: Problem, choices: Sequence[int]) -> None:
    if len(choices) != len(problem.costs):
        raise InputError(
            f"{len(choices)} choices for {len(problem.costs)} nodes",
            where="choices",
            do="give one strategy for each node",
        )
    for node, (costs, choice) in enumerate(zip(problem.costs, choices, strict=True)):
        if not 0 <= choice < len(costs):
            raise InputError(
                f"strategy {choice} of {len(costs)}",
                where=node_name(problem, node),
                do="number strategies from 0",
            )


def as_costs(costs: CostArray) -> FloatArray:
    """Float costs with inf for what is forbidden; integers below 2**53 stay exact."""
    if costs.dtype.kind in "iu":
        return np.where(costs >= FORBIDDEN, np.inf, costs.astype(np.float64))
    return costs.astype(np.float64)


def node_name(problem: Problem, node: int) -> str:
    """How messages call a node."""
    return problem.names[node] if problem.names is not None else f"node {node}"


def validate(problem: Problem) -> None:
    """Check shapes, indices and values.

    Raises:
      InputError: the first thing that does not fit, with its node or edge.
    """
    checked: set[int] = set()  # nodes, edges and terms may share their arrays
    for node, costs in enumerate(problem.costs):
        where = node_name(problem, node)
        if costs.ndim != 1 or not len(costs):
            raise InputError("no strategies", where=where, do="give at least one cost")
        _check_costs(costs, where, checked)
    for number, edge in enumerate(problem.edges):
        where = f"edge {number} ({edge.a}, {edge.b})"
        for end in (edge.a, edge.b):
            if not 0 <= end < len(problem.costs):
                raise InputError(f"no node {end}", where=where, do="number nodes from 0")
        shape = (len(problem.costs[edge.a]), len(problem.costs[edge.b]))
        if edge.cost.shape != shape:
            raise InputError(
                f"cost table of shape {edge.cost.shape}",
                where=where,
                do=f"give it the shape {shape}, strategies of {edge.a} by strategies of {edge.b}",
            )
        _check_costs(edge.cost, where, checked)
    for number, term in enumerate(problem.memory):
        where = f"memory term {number}"
        if not 0 <= term.node < len(problem.costs):
            raise InputError(f"no node {term.node}", where=where, do="number nodes from 0")
        if term.usage.shape != problem.costs[term.node].shape:
            raise InputError(
                f"usage of shape {term.usage.shape} for {len(problem.costs[term.node])} strategies",
                where=where,
                do="give one usage for each strategy",
            )
        if term.start < 0 or not (np.isfinite(term.usage).all() and (term.usage >= 0).all()):
            raise InputError(
                "a negative time or usage, or one that is not finite", where=where, do="correct it"
            )
    limit = problem.memory_limit
    if limit is not None and (math.isnan(limit) or limit < 0):
        raise InputError(f"memory limit {limit}", do="give bytes, not negative, or None")


def _check_costs(costs: CostArray, where: str, checked: set[int]) -> None:
    if id(costs) in checked:
        return
    checked.add(id(costs))
    if costs.dtype.kind not in "iuf":
        raise InputError(f"costs of type {costs.dtype}", where=where, do="give float64 or int64")
    if costs.dtype.kind == "f" and (np.isnan(costs).any() or np.isneginf(costs).any()):
        raise InputError(
            "a cost is not a number or -inf", where=where, do="give finite costs or inf"
        )
