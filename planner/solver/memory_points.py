"""Keeps only the time points where memory can bind, and the strategies that fit there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solver.network import (
    Indexed,
    Network,
    NoFeasibleChoiceError,
    Term,
    flatten,
    join_intervals,
)
from shardwright.planner.solver.problem import FloatArray


def move_least_usage(network: Network) -> None:
    """Let each term start from zero; what a node holds at the least is taken from the slack."""
    steps = np.zeros(len(network.slack) + 1)
    for node, terms in enumerate(network.terms):
        moved: list[Term | Indexed] = []
        for term in flatten(terms):
            least = term.usage.min()
            steps[term.start] += least
            steps[term.end] -= least
            usage = term.usage - least if least else term.usage
            if usage.any():
                moved.append(Term(term.start, term.end, usage) if least else term)
        if len(moved) != len(terms):
            network.changed.add(node)
        network.terms[node] = moved
    network.slack = network.slack - np.cumsum(steps)[:-1]
    if (network.slack < 0).any():
        raise NoFeasibleChoiceError


def prune_by_memory(network: Network) -> set[int]:
    """Drop strategies that do not fit though all other nodes use their least; nodes touched."""
    lowest = RangeMinimum(network.slack)
    touched = set()
    for node, terms in enumerate(network.terms):
        if not terms:
            continue
        keep = np.ones(len(network.costs(node)), dtype=np.bool_)
        for term in flatten(terms):
            keep &= term.usage <= lowest(term.start, term.end)
        if not keep.all():
            network.restrict(node, keep)
            touched.add(node)
    return touched


def keep_binding_points(network: Network) -> None:
    """Renumber time to the points that can bind.

    A point goes when everything fits there whatever is chosen, or when another point has no more
    slack and sees all the terms that it sees (so its constraint follows from the other's).
    """
    horizon = len(network.slack)
    most = np.zeros(horizon + 1)
    rise = np.zeros(horizon + 1)
    fall = np.zeros(horizon + 1)
    flat = [flatten(terms) for terms in network.terms]
    for terms in flat:
        change: dict[int, FloatArray] = {}
        for term in terms:
            most[term.start] += term.usage.max()
            most[term.end] -= term.usage.max()
            change[term.start] = change.get(term.start, 0.0) + term.usage
            change[term.end] = change.get(term.end, 0.0) - term.usage
        for time, step in change.items():
            rise[time] += step.max()
            fall[time] -= step.min()
    keep = np.cumsum(most)[:-1] > network.slack
    keep = _drop_implied(network.slack, fall[1:], keep)
    keep = _drop_implied(network.slack[::-1], rise[:-1][::-1], keep[::-1])[::-1]
    position = np.concatenate([[0], np.cumsum(keep)])
    network.slack = network.slack[keep]
    network.times = network.times[keep]
    for node, terms in enumerate(flat):
        kept = join_intervals(
            Term(int(position[term.start]), int(position[term.end]), term.usage)
            for term in terms
            if position[term.start] < position[term.end]
        )
        if len(kept) != len(terms):
            network.changed.add(node)
        network.terms[node] = list(kept)


def _drop_implied(
    slack: FloatArray, fall: FloatArray, keep: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Drop each point t for which a later kept point u allows no more than t does.

    What is in use at t is at most what is in use at u plus the sum of `fall` over [t, u); so where
    slack[u] plus that sum is at most slack[t], the constraint at t follows from that at u.

    Args:
      fall: shape of slack; the most that usage can drop from t to t + 1, whatever is chosen.
    """
    keep = keep.copy()
    least = np.inf
    for t in range(len(slack) - 1, -1, -1):
        least += fall[t]
        if keep[t]:
            if least <= slack[t]:
                keep[t] = False
            least = min(least, slack[t])
    return keep


class RangeMinimum:
    """Least value of any slice of a fixed array, in constant time (sparse table)."""

    def __init__(self, values: FloatArray) -> None:
        self.levels = [values]
        width = 1
        while 2 * width <= len(values):
            last = self.levels[-1]
            self.levels.append(np.minimum(last[:-width], last[width:]))
            width *= 2

    def __call__(self, start: int, end: int) -> float:
        """Minimum over [start, end), which must not be empty."""
        level = (end - start).bit_length() - 1
        row = self.levels[level]
        return float(min(row[start], row[end - (1 << level)]))
