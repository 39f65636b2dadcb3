"""Compiled kernels: message passing, memory profiles, and moves over induced forests.

They take the flat arrays of `arrays.Arrays` as `g`, release the interpreter lock and keep no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from shardwright.planner.solver.arrays import Arrays
from shardwright.planner.solver.network import IntArray
from shardwright.planner.solver.problem import FloatArray

# Arrays are copied by loops: assigning one to a slice of another compiles, for its error message,
# all that makes strings, a quarter of the time that the kernels take to compile.
# Sums may be reordered for speed; infinities are not assumed away, for they start the minima.
_FAST = {"reassoc", "nsz", "arcp", "contract", "nnan"}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _kernel(function: _Function) -> _Function:
    """Compile without the interpreter lock; keep the machine code on disk."""
    compiled = numba.njit(cache=True, nogil=True, fastmath=_FAST)(function)
    return cast("_Function", compiled)


@_kernel
def price_memory(g: Arrays, prices: FloatArray, out: FloatArray) -> None:
    """Write unary costs plus memory at `prices` (cost per byte at each time point) to `out`."""
    total = np.zeros(len(prices) + 1)
    for t in range(len(prices)):
        total[t + 1] = total[t] + prices[t]
    for s in range(len(out)):
        out[s] = g.unary[s]
    for q in range(len(g.term_node)):
        weight = total[g.term_end[q]] - total[g.term_start[q]]
        if weight != 0.0:
            base = g.first[g.term_node[q]] - g.usage_first[q]
            for u in range(g.usage_first[q], g.usage_first[q + 1]):
                out[base + u] += weight * g.usage[u]


@_kernel
def usage_over_time(g: Arrays, choice: IntArray, out: FloatArray) -> None:
    """Write the bytes above the least at each time point to `out`, one longer than `g.slack`."""
    out[:] = 0.0
    for q in range(len(g.term_node)):
        used = g.usage[g.usage_first[q] + choice[g.term_node[q]]]
        out[g.term_start[q]] += used
        out[g.term_end[q]] -= used
    running = 0.0
    for t in range(len(out)):
        running += out[t]
        out[t] = running


@_kernel
def total_cost(g: Arrays, choice: IntArray) -> float:
    """Sum of the costs of nodes and edges."""
    cost = 0.0
    for n in range(len(g.nodes)):
        cost += g.unary[g.first[n] + choice[n]]
    for e in range(len(g.edge_a)):
        b = g.edge_b[e]
        width = g.first[b + 1] - g.first[b]
        cost += g.table[g.edge_first[e] + choice[g.edge_a[e]] * width + choice[b]]
    return cost


@_kernel
def _send_to_b(g: Arrays, e: int, own: FloatArray, out: FloatArray) -> float:
    """out[j] = min over i of own[i] + table[i, j], less its minimum, which is returned."""
    width = len(out)
    out[:] = np.inf
    for i in range(len(own)):
        base = own[i]
        row = g.table[g.edge_first[e] + i * width : g.edge_first[e] + (i + 1) * width]
        for j in range(width):
            out[j] = min(out[j], base + row[j])
    least = np.inf
    for j in range(width):
        least = min(least, out[j])
    for j in range(width):
        out[j] -= least
    return least


@_kernel
def _send_to_a(g: Arrays, e: int, own: FloatArray, out: FloatArray) -> float:
    """out[i] = min over j of own[j] + table[i, j], less its minimum, which is returned."""
    size = len(own)
    lowest = np.inf
    for i in range(len(out)):
        row = g.table[g.edge_first[e] + i * size : g.edge_first[e] + (i + 1) * size]
        least = np.inf
        for j in range(size):
            least = min(least, own[j] + row[j])
        out[i] = least
        lowest = min(lowest, least)
    for i in range(len(out)):
        out[i] -= lowest
    return lowest


@_kernel
def _collect(
    g: Arrays,
    n: int,
    priced: FloatArray,
    message_a: FloatArray,
    message_b: FloatArray,
    belief: FloatArray,
) -> float:
    """Costs of a node plus all messages to it, less their minimum, which is returned."""
    size = g.first[n + 1] - g.first[n]
    for s in range(size):
        belief[s] = priced[g.first[n] + s]
    for p in range(g.incident_first[n], g.incident_split[n]):
        incoming = message_b[g.to_b[g.incident[p]] :]
        for s in range(size):
            belief[s] += incoming[s]
    for p in range(g.incident_split[n], g.incident_first[n + 1]):
        incoming = message_a[g.to_a[g.incident[p]] :]
        for s in range(size):
            belief[s] += incoming[s]
    least = np.inf
    for s in range(size):
        least = min(least, belief[s])
    for s in range(size):
        belief[s] -= least
    return least


@_kernel
def sweep(
    g: Arrays,
    priced: FloatArray,
    message_a: FloatArray,
    message_b: FloatArray,
    beliefs: FloatArray,
    choice: IntArray,
) -> tuple[float, float]:
    """A forward and a backward pass of sequential tree-reweighted message passing (TRW-S).

    Returns the lower bounds that the two passes prove. `choice` receives a rounding: each node's
    best strategy for the choices of earlier neighbours and the messages of later ones. `beliefs`
    receives by how much, at least, what contains a strategy exceeds the bound of the first pass.

    Source: Kolmogorov, Convergent tree-reweighted message passing for energy minimization (PAMI
      2006), section 3 and figure 3.
    """
    widest = 0
    for n in range(len(g.nodes)):
        widest = max(widest, g.first[n + 1] - g.first[n])
    outgoing = np.empty(widest)
    rounded = np.empty(widest)
    bounds = np.zeros(2)
    for place in range(2 * len(g.nodes)):
        forward = place < len(g.nodes)
        n = place if forward else 2 * len(g.nodes) - 1 - place
        size = g.first[n + 1] - g.first[n]
        belief = beliefs[g.first[n] : g.first[n + 1]]
        least = _collect(g, n, priced, message_a, message_b, belief)
        earlier = g.incident_split[n] - g.incident_first[n]
        later = g.incident_first[n + 1] - g.incident_split[n]
        share = 1.0 / max(earlier, later, 1)
        if forward:
            for s in range(size):
                rounded[s] = belief[s]
            for p in range(g.incident_first[n], g.incident_split[n]):
                e = g.incident[p]
                incoming = message_b[g.to_b[e] :]
                row = g.table[g.edge_first[e] + choice[g.edge_a[e]] * size :]
                for s in range(size):
                    rounded[s] += row[s] - incoming[s]
            best = 0
            for s in range(1, size):
                if rounded[s] < rounded[best]:
                    best = s
            choice[n] = best
            bounds[0] += least
            for p in range(g.incident_split[n], g.incident_first[n + 1]):
                e = g.incident[p]
                back = message_a[g.to_a[e] :]
                for s in range(size):
                    outgoing[s] = share * belief[s] - back[s]
                out = message_b[g.to_b[e] : g.to_b[e + 1]]
                bounds[0] += _send_to_b(g, e, outgoing[:size], out)
        else:
            bounds[1] += least
            for p in range(g.incident_first[n], g.incident_split[n]):
                e = g.incident[p]
                back = message_b[g.to_b[e] :]
                for s in range(size):
                    outgoing[s] = share * belief[s] - back[s]
                out = message_a[g.to_a[e] : g.to_a[e + 1]]
                bounds[1] += _send_to_a(g, e, outgoing[:size], out)
    return bounds[0], bounds[1]


@_kernel
def _grow_forest(
    g: Arrays, order: IntArray, ordered: IntArray, parent_edge: IntArray, member: Any
) -> int:
    """Take nodes in `order` as long as they induce a forest; returns how many.

    `ordered` receives them parents first, `parent_edge` the edge to the parent (-1 for a root),
    `member` who is in.
    """
    count = len(g.nodes)
    member[:] = False
    root = np.arange(count)
    seen = np.full(count, -1)
    for n in order:
        fits = True
        for p in range(g.incident_first[n], g.incident_first[n + 1]):
            e = g.incident[p]
            m = g.edge_a[e] + g.edge_b[e] - n
            if member[m]:
                while root[m] != m:
                    root[m] = root[root[m]]
                    m = root[m]
                if seen[m] == n:
                    fits = False
                    break
                seen[m] = n
        if fits:
            member[n] = True
            for p in range(g.incident_first[n], g.incident_first[n + 1]):
                e = g.incident[p]
                m = g.edge_a[e] + g.edge_b[e] - n
                if member[m]:
                    while root[m] != m:
                        m = root[m]
                    root[m] = n
    parent_edge[:] = -2
    filled = 0
    head = 0
    for n in order:
        if not member[n] or parent_edge[n] != -2:
            continue
        parent_edge[n] = -1
        ordered[filled] = n
        filled += 1
        while head < filled:
            v = ordered[head]
            head += 1
            for p in range(g.incident_first[v], g.incident_first[v + 1]):
                e = g.incident[p]
                m = g.edge_a[e] + g.edge_b[e] - v
                if member[m] and parent_edge[m] == -2:
                    parent_edge[m] = e
                    ordered[filled] = m
                    filled += 1
    return filled


@_kernel
def _solve_forest(
    g: Arrays,
    ordered: IntArray,
    parent_edge: IntArray,
    member: Any,
    given: FloatArray,
    work: FloatArray,
    result: IntArray,
) -> None:
    """Best choices of a forest by dynamic programming, written to `result`.

    `given` are the costs by strategy with memory and the edges to nodes outside priced in.
    """
    widest = 0
    for n in ordered:
        widest = max(widest, g.first[n + 1] - g.first[n])
        for s in range(g.first[n], g.first[n + 1]):
            work[s] = given[s]
    out = np.empty(widest)
    for place in range(len(ordered) - 1, -1, -1):
        n = ordered[place]
        e = parent_edge[n]
        if e < 0:
            continue
        own = work[g.first[n] : g.first[n + 1]]
        parent = g.edge_a[e] + g.edge_b[e] - n
        width = g.first[parent + 1] - g.first[parent]
        if parent == g.edge_b[e]:
            _send_to_b(g, e, own, out[:width])
        else:
            _send_to_a(g, e, own, out[:width])
        for j in range(width):
            work[g.first[parent] + j] += out[j]
    for n in ordered:
        start = g.first[n]
        size = g.first[n + 1] - start
        e = parent_edge[n]
        at = 0
        step = 0
        if e >= 0 and g.edge_a[e] == n:
            b = g.edge_b[e]
            step = g.first[b + 1] - g.first[b]
            at = g.edge_first[e] + result[b]
        elif e >= 0:
            step = 1
            at = g.edge_first[e] + result[g.edge_a[e]] * size
        best = 0
        least = np.inf
        for s in range(size):
            value = work[start + s]
            if step > 0:
                value += g.table[at + s * step]
            if value < least:
                least = value
                best = s
        result[n] = best


@_kernel
def _price_outside(
    g: Arrays, ordered: IntArray, member: Any, choice: IntArray, out: FloatArray
) -> None:
    """Write to `out` the costs of members with their edges to what is chosen outside."""
    for n in ordered:
        start = g.first[n]
        size = g.first[n + 1] - start
        for s in range(size):
            out[start + s] = g.unary[start + s]
        for p in range(g.incident_first[n], g.incident_first[n + 1]):
            e = g.incident[p]
            m = g.edge_a[e] + g.edge_b[e] - n
            if member[m]:
                continue
            if m > n:
                width = g.first[m + 1] - g.first[m]
                at = g.edge_first[e] + choice[m]
                for s in range(size):
                    out[start + s] += g.table[at + s * width]
            else:
                at = g.edge_first[e] + choice[m] * size
                for s in range(size):
                    out[start + s] += g.table[at + s]


@_kernel
def _cost_within(
    g: Arrays, ordered: IntArray, parent_edge: IntArray, outside: FloatArray, choice: IntArray
) -> float:
    """Cost of the members of a forest and of all edges that they touch."""
    cost = 0.0
    for n in ordered:
        cost += outside[g.first[n] + choice[n]]
        e = parent_edge[n]
        if e >= 0:
            b = g.edge_b[e]
            width = g.first[b + 1] - g.first[b]
            cost += g.table[g.edge_first[e] + choice[g.edge_a[e]] * width + choice[b]]
    return cost


@_kernel
def _add_prices(g: Arrays, ordered: IntArray, prices: FloatArray, out: FloatArray) -> None:
    """Add memory at `prices` to the costs of members in `out`."""
    total = np.zeros(len(prices) + 1)
    for t in range(len(prices)):
        total[t + 1] = total[t] + prices[t]
    for n in ordered:
        for q in range(g.term_first[n], g.term_first[n + 1]):
            weight = total[g.term_end[q]] - total[g.term_start[q]]
            if weight != 0.0:
                base = g.first[n] - g.usage_first[q]
                for u in range(g.usage_first[q], g.usage_first[q + 1]):
                    out[base + u] += weight * g.usage[u]


@_kernel
def _excess(g: Arrays, usage: FloatArray) -> float:
    """Bytes over the slack, summed over time."""
    total = 0.0
    for t in range(len(g.slack)):
        total += max(usage[t] - g.slack[t], 0.0)
    return total


@_kernel
def forest_search(
    g: Arrays, choice: IntArray, prices: FloatArray, scale: float, moves: int, reach: int, seed: int
) -> tuple[float, float]:
    """Large-neighbourhood search: re-solve random induced forests exactly, `moves` times.

    A move frees a forest, fixes the rest, and prices memory; where the best choices break the
    memory limit, prices rise at the points broken, and it is solved again. It is kept where it
    costs no more and fits; until something fits, where it is less over the limit.

    Args:
      choice: the start, and the result.
      prices: cost per byte at each time point; adapted on the way.
      scale: a cost that matters, about a thousandth of the total.
      reach: nodes that a forest may span, grown around a random node; 0 for the whole graph.

    Returns:
      The cost, and the bytes over the limit summed over time (0 where it fits).
    """
    np.random.seed(seed)
    count = len(g.nodes)
    horizon = len(g.slack)
    order = np.arange(count)
    ordered = np.empty(count, dtype=np.int64)
    parent_edge = np.empty(count, dtype=np.int64)
    member = np.zeros(count, dtype=np.bool_)
    near = np.zeros(count, dtype=np.bool_)
    outside = np.empty(len(g.unary))
    given = np.empty(len(g.unary))
    work = np.empty(len(g.unary))
    usage = np.zeros(horizon + 1)
    trial_prices = prices.copy()
    trial = choice.copy()
    cost = total_cost(g, choice)
    usage_over_time(g, choice, usage)
    excess = _excess(g, usage)
    for _ in range(moves):
        if reach > 0:
            size = _ball(g, np.random.randint(count), reach, near, order)
        else:
            size = count
            for i in range(count):
                order[i] = i
        for i in range(size - 1, 0, -1):
            j = np.random.randint(i + 1)
            order[i], order[j] = order[j], order[i]
        filled = _grow_forest(g, order[:size], ordered, parent_edge, member)
        forest = ordered[:filled]
        _price_outside(g, forest, member, choice, outside)
        before = _cost_within(g, forest, parent_edge, outside, choice)
        for t in range(horizon):
            trial_prices[t] = prices[t]
        trial_excess = 0.0
        tries = 0
        while tries < 6:
            for n in forest:
                for s in range(g.first[n], g.first[n + 1]):
                    given[s] = outside[s]
            _add_prices(g, forest, trial_prices, given)
            _solve_forest(g, forest, parent_edge, member, given, work, trial)
            if horizon == 0:
                break
            usage_over_time(g, trial, usage)
            trial_excess = _excess(g, usage)
            if trial_excess == 0.0:
                break
            paid = 0.0
            square = 0.0
            for t in range(horizon):
                over = max(usage[t] - g.slack[t], 0.0)
                paid += trial_prices[t] * over
                square += over * over
            step = (0.3 * paid + 0.1 * scale) * 2.0**tries / square
            for t in range(horizon):
                trial_prices[t] += step * max(usage[t] - g.slack[t], 0.0)
            tries += 1
        after = _cost_within(g, forest, parent_edge, outside, trial)
        if trial_excess < excess or (trial_excess == excess and after <= before):
            for n in forest:
                choice[n] = trial[n]
            cost += after - before
            excess = trial_excess
        else:
            for n in forest:
                trial[n] = choice[n]
        if trial_excess == 0.0 and tries == 0:
            for t in range(horizon):
                prices[t] *= 0.97
        else:
            for t in range(horizon):
                prices[t] = 0.9 * prices[t] + 0.1 * trial_prices[t]
    return total_cost(g, choice), excess


@_kernel
def _ball(g: Arrays, centre: int, reach: int, near: Any, order: IntArray) -> int:
    """Write the first `reach` nodes around `centre`, by breadth, to `order`; returns how many."""
    near[:] = False
    near[centre] = True
    order[0] = centre
    filled = 1
    head = 0
    while head < filled < reach:
        v = order[head]
        head += 1
        for p in range(g.incident_first[v], g.incident_first[v + 1]):
            e = g.incident[p]
            m = g.edge_a[e] + g.edge_b[e] - v
            if not near[m] and filled < reach:
                near[m] = True
                order[filled] = m
                filled += 1
    return filled
