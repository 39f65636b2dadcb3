"""A network as flat arrays, for compiled kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.planner.solver.network import IntArray, Network, flatten
from shardwright.planner.solver.problem import FloatArray

BIG = 1e30
"""Stands for inf in the tables of kernels, which must not subtract inf from inf."""


class Arrays(NamedTuple):
    """What is left of a network; nodes are numbered 0..N-1 in the order of `nodes`.

    Attributes:
      nodes: the network's number of each node.
      first: shape (N + 1,), offsets of strategies.
      unary: cost, shape (strategies,).
      edge_a, edge_b: shape (E,), ends of each edge, edge_a < edge_b.
      edge_first: shape (E + 1,), offsets of tables (row-major, rows are strategies of edge_a).
      table: shape (entries,); BIG where forbidden.
      to_a, to_b: shape (E + 1,), offsets of the message of each edge to its two ends.
      incident_first, incident_split, incident: edges of each node n, first those to earlier nodes
        [incident_first[n], incident_split[n]), then to later ones, up to incident_first[n + 1].
      term_first: shape (N + 1,), offsets of the memory terms of each node.
      term_node, term_start, term_end: shape (M,).
      usage_first: shape (M + 1,), offsets of `usage`.
      usage: bytes by term and strategy.
      slack: bytes by time point.
    """

    nodes: IntArray
    first: IntArray
    unary: FloatArray
    edge_a: IntArray
    edge_b: IntArray
    edge_first: IntArray
    table: FloatArray
    to_a: IntArray
    to_b: IntArray
    incident_first: IntArray
    incident_split: IntArray
    incident: IntArray
    term_first: IntArray
    term_node: IntArray
    term_start: IntArray
    term_end: IntArray
    usage_first: IntArray
    usage: FloatArray
    slack: FloatArray


def to_arrays(network: Network, *, share: bool = False) -> Arrays:
    """Lay out what is left of a network: at least one node, no strategy forbidden by itself.

    Args:
      share: lay out tables that edges share once. `edge_first` then tells where the table of each
        edge begins, but not where it ends: for message passing and forests only.
    """
    nodes = network.alive()
    count = len(nodes)
    position = {node: place for place, node in enumerate(nodes)}
    sizes = np.array([len(network.costs(node)) for node in nodes], dtype=np.int64)
    pairs = [(a, b) for a in nodes for b in network.tables[a] if a < b]
    edge_a = np.array([position[a] for a, _ in pairs], dtype=np.int64)
    edge_b = np.array([position[b] for _, b in pairs], dtype=np.int64)
    tables = [network.tables[a][b] for a, b in pairs]
    if share:
        tables, edge_first = _shared(tables)
    else:
        edge_first = _offsets(sizes[edge_a] * sizes[edge_b])
    table = _joined([table.ravel() for table in tables])
    table[np.isinf(table)] = BIG
    terms = [(position[node], term) for node in nodes for term in flatten(network.terms[node])]
    term_node = np.array([node for node, _ in terms], dtype=np.int64)
    # Edges seen from edge_b lead to earlier nodes; listed first, a stable sort keeps them first.
    owners = np.concatenate([edge_b, edge_a])
    order = np.argsort(owners, kind="stable")
    incident_first = _offsets(np.bincount(owners, minlength=count))
    return Arrays(
        nodes=np.array(nodes, dtype=np.int64),
        first=_offsets(sizes),
        unary=_joined([network.costs(node) for node in nodes]),
        edge_a=edge_a,
        edge_b=edge_b,
        edge_first=edge_first,
        table=table,
        to_a=_offsets(sizes[edge_a]),
        to_b=_offsets(sizes[edge_b]),
        incident_first=incident_first,
        incident_split=incident_first[:-1] + np.bincount(edge_b, minlength=count),
        incident=order % max(len(pairs), 1),
        term_first=_offsets(np.bincount(term_node, minlength=count)),
        term_node=term_node,
        term_start=np.array([term.start for _, term in terms], dtype=np.int64),
        term_end=np.array([term.end for _, term in terms], dtype=np.int64),
        usage_first=_offsets(sizes[term_node]),
        usage=_joined([term.usage for _, term in terms]),
        slack=network.slack.copy(),
    )


def _shared(tables: list[FloatArray]) -> tuple[list[FloatArray], IntArray]:
    """The different tables, and where each one given begins among them."""
    number: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    different: list[FloatArray] = []
    which = np.zeros(len(tables) + 1, dtype=np.int64)
    for place, table in enumerate(tables):
        key = (table.__array_interface__["data"][0], table.strides, table.shape)
        if key not in number:
            number[key] = len(different)
            different.append(table)
        which[place] = number[key]
    begins = _offsets(np.array([table.size for table in different], dtype=np.int64))
    which[-1] = len(different)
    return different, begins[which]


def _joined(parts: list[FloatArray]) -> FloatArray:
    return np.concatenate(parts) if parts else np.zeros(0)


def _offsets(sizes: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
