"""Makes a network smaller without losing an optimal choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solver.memory_points import (
    keep_binding_points,
    move_least_usage,
    prune_by_memory,
)
from shardwright.planner.solver.network import (
    Indexed,
    Merger,
    Network,
    flatten,
)

MERGE_GROWTH = 1.5
DOMINANCE_WORK = 4e7
_LOOKED_AT = 6
_WORTH_A_ROUND = 0.98


def reduce(network: Network, expired: Callable[[], bool] = lambda: False) -> None:
    """Apply all reductions until a round changes little, or until `expired`.

    Raises:
      NoFeasibleChoiceError: there is no feasible choice.
    """
    forbid_unsupported(network, network.alive())
    size = _size(network)
    while True:
        reduce_memory(network)
        shrink_graph(network)
        forbid_unsupported(network, network.alive())
        if not expired():
            drop_dominated(network, expired)
        before, size = size, _size(network)
        if size >= _WORTH_A_ROUND * before or expired():
            break
    shrink_graph(network)
    forbid_unsupported(network, network.alive())
    reduce_memory(network)


def reduce_memory(network: Network) -> None:
    """Drop the strategies that do not fit and the time points that cannot bind.

    Raises:
      NoFeasibleChoiceError: there is no feasible choice.
    """
    if not len(network.slack):
        return
    touched: set[int] = set()
    while True:
        move_least_usage(network)
        touched = prune_by_memory(network)
        if not touched:
            break
        forbid_unsupported(network, touched)
    keep_binding_points(network)


def _size(network: Network) -> int:
    terms = sum(len(terms) for terms in network.terms)
    return network.entries() + len(network.alive()) + terms


def forbid_unsupported(network: Network, nodes: Iterable[int]) -> None:
    """Drop strategies forbidden, or without an allowed partner at an edge (arc consistency)."""
    queue = [node for node in nodes if network.unary[node] is not None]
    waiting = set(queue)
    while queue:
        node = queue.pop()
        waiting.discard(node)
        keep = np.isfinite(network.costs(node))
        if not keep.all():
            network.restrict(node, keep)
        for other, table in network.tables[node].items():
            supported = np.isfinite(table).any(axis=0)
            if not supported.all():
                network.unary[other] = np.where(supported, network.costs(other), np.inf)
                if other not in waiting:
                    waiting.add(other)
                    queue.append(other)


def drop_dominated(network: Network, expired: Callable[[], bool]) -> None:
    """Drop each strategy that another of its node can replace whatever the neighbours choose."""
    changed, network.changed = sorted(network.changed), set()
    for node in changed:
        if expired():
            break
        if network.unary[node] is not None and len(network.costs(node)) > 1:
            _drop_dominated_of(network, node)


def _drop_dominated_of(network: Network, node: int) -> None:
    """Goldstein's criterion (dead-end elimination, Biophys. J. 66, 1994), with memory.

    Strategy t replaces s where it needs no more memory in any term and
    cost(s) - cost(t) + sum over edges of min over j of (table[s, j] - table[t, j]) >= 0.
    """
    costs = network.costs(node)
    count = len(costs)
    replaces = np.ones((count, count), dtype=np.bool_)
    for term in flatten(network.terms[node]):
        replaces &= term.usage[:, None] >= term.usage[None, :]
    np.fill_diagonal(replaces, False)
    s, t = np.nonzero(replaces)
    margin = costs[s] - costs[t]
    work = len(s) * sum(table.shape[1] for table in network.tables[node].values())
    if not len(s) or work > DOMINANCE_WORK:
        return
    tables = list(network.tables[node].values())
    # Most pairs already fail where only a few of the neighbours' strategies are looked at.
    hopeful = margin + sum(
        (_least_difference(table[:, _spread(table.shape[1])], s, t) for table in tables),
        start=np.zeros(len(s)),
    )
    likely = hopeful >= 0
    s, t, margin = s[likely], t[likely], margin[likely]
    for table in tables:
        margin = margin + _least_difference(table, s, t)
    wins = margin >= 0
    if not wins.any():
        return
    forward = np.arange(count)
    keep = np.ones(count, dtype=np.bool_)
    for loser, winner in zip(s[wins], t[wins], strict=True):
        if keep[loser] and keep[winner]:
            keep[loser] = False
            forward[loser] = winner
    while not keep[forward].all():
        forward = forward[forward]
    network.restrict(node, keep, forward)


def _spread(columns: int) -> NDArray[np.int64]:
    """A few columns of a table, spread evenly."""
    return np.unique(np.linspace(0, columns - 1, _LOOKED_AT).astype(np.int64))


def _least_difference(
    table: NDArray[np.float64], s: NDArray[np.int64], t: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The least that row s costs more than row t in any column not forbidden for both."""
    with np.errstate(invalid="ignore"):
        difference = table[s] - table[t]
    difference[np.isnan(difference)] = np.inf
    least: NDArray[np.float64] = difference.min(axis=1, initial=np.inf)
    # Where every column is forbidden for both rows, nothing is gained or lost.
    return np.where(least == np.inf, 0.0, least)


def shrink_graph(network: Network) -> None:
    """Take out nodes whose choice follows from one or two neighbours, and merge tied pairs."""
    edges = [(a, b) for a in network.alive() for b in network.tables[a] if a < b]
    work = _Worklist(edges, network.alive())
    while work.edges or work.nodes:
        if work.edges:
            a, b = work.edges.popitem()[0]
            if b in network.tables[a] and not _drop_separable(network, a, b, work):
                _merge(network, a, b, work)
        else:
            node = work.nodes.popitem()[0]
            if network.unary[node] is not None:
                _take_out(network, node, work)


class _Worklist:
    """Edges and nodes to look at, each once, in a fixed order."""

    def __init__(self, edges: Iterable[tuple[int, int]], nodes: Iterable[int]) -> None:
        self.edges = dict.fromkeys(edges)
        self.nodes = dict.fromkeys(nodes)

    def add_edge(self, a: int, b: int) -> None:
        self.edges[min(a, b), max(a, b)] = None


def _drop_separable(network: Network, a: int, b: int, work: _Worklist) -> bool:
    """Remove an edge that is a sum of a cost by row and a cost by column."""
    table = network.tables[a][b]
    if not np.isfinite(table).all():
        return False
    rows, columns = table[:, 0], table[0] - table[0, 0]
    residue = table - rows[:, None] - columns[None, :]
    if np.abs(residue).max() > 4e-16 * np.abs(table).max():
        return False
    network.unary[a] = network.costs(a) + rows
    network.unary[b] = network.costs(b) + columns
    network.drop_table(a, b)
    work.nodes[a] = work.nodes[b] = None
    return True


def _take_out(network: Network, node: int, work: _Worklist) -> None:
    """Eliminate a node whose best strategy is a function of at most two neighbours."""
    neighbours = list(network.tables[node])
    if len(neighbours) > 2 or (len(neighbours) != 1 and network.terms[node]):
        return
    if not neighbours:
        best = int(np.argmin(network.costs(node)))
        network.constant += network.costs(node)[best]
        network.eliminate(node, (), np.array(best))
    elif len(neighbours) == 1:
        if not _fold_leaf(network, node):
            return
    elif not _fold_chain(network, node):
        return
    else:
        work.add_edge(*neighbours)
    work.nodes.update(dict.fromkeys(neighbours))


def _fold_leaf(network: Network, leaf: int) -> bool:
    """Let a leaf follow its neighbour where one strategy is best for each of the neighbour's."""
    ((parent, table),) = network.tables[leaf].items()
    total = network.costs(leaf)[:, None] + table
    terms = flatten(network.terms[leaf])
    best = np.argmin(total, axis=0)
    if terms:
        # The cheapest, and among those the one of least memory, must need the least memory of all
        # strategies that the neighbour's strategy allows.
        finite = np.isfinite(total)
        usage = sum((term.usage for term in terms), np.zeros(len(total)))
        order = np.argsort(usage, kind="stable")
        best = order[np.argmin(total[order], axis=0)]
        for term in terms:
            least = np.where(finite, term.usage[:, None], np.inf).min(axis=0)
            if (term.usage[best] > least).any():
                return False
    picked = total[best, np.arange(len(best))]
    network.unary[parent] = network.costs(parent) + picked
    if terms:
        network.terms[parent].append(Indexed(best, tuple(network.terms[leaf])))
    network.eliminate(leaf, (parent,), best)
    return True


def _fold_chain(network: Network, node: int) -> bool:
    """Replace a node between two others by an edge between these."""
    (p, to_p), (q, to_q) = network.tables[node].items()
    if to_p.shape[1] * to_q.shape[1] > MERGE_GROWTH * (to_p.size + to_q.size):
        return False
    total = network.costs(node)[:, None, None] + to_p[:, :, None] + to_q[:, None, :]
    best = np.argmin(total, axis=0)
    network.eliminate(node, (p, q), best)
    network.add_table(p, q, np.take_along_axis(total, best[None], axis=0)[0])
    return True


def _merge(network: Network, a: int, b: int, work: _Worklist) -> None:
    """Join two nodes where a strategy of one leaves a single strategy to the other.

    The allowed pairs are then as many as the strategies of the node that stays.
    """
    allowed = np.isfinite(network.tables[a][b])
    count = int(allowed.sum())
    if count > max(allowed.shape):
        return
    stays_a = (allowed.sum(axis=1) == 1).all()
    stays_b = (allowed.sum(axis=0) == 1).all()
    if not stays_a or (stays_b and len(network.tables[b]) > len(network.tables[a])):
        a, b, allowed = b, a, allowed.T
        stays_a = stays_b
    if not stays_a:
        return
    table = network.tables[a][b]
    follow = np.argmax(allowed, axis=1)
    theirs = {c: t for c, t in network.tables[b].items() if c != a}
    growth = sum(t.shape[1] for t in theirs.values()) * (len(follow) - table.shape[1])
    if growth > MERGE_GROWTH * (table.size + sum(t.size for t in theirs.values())):
        return
    forward = np.where(allowed, np.arange(len(follow))[:, None], -1)
    network.unary[a] = (
        network.costs(a) + network.costs(b)[follow] + table[np.arange(len(follow)), follow]
    )
    if network.terms[b]:
        network.terms[a].append(Indexed(follow, tuple(network.terms[b])))
    for c in list(network.tables[b]):
        network.drop_table(b, c)
    network.unary[b], network.terms[b] = None, []
    for c, t in theirs.items():
        network.add_table(a, c, t[follow])
        work.add_edge(a, c)
        work.nodes[c] = None
    work.nodes[a] = None
    network.trail.append(Merger(a, b, follow, forward))
