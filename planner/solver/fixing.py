"""Removes what a lower bound proves to cost more than a known solution."""

from __future__ import annotations

import numpy as np

from shardwright.planner.solver.dual import Dual
from shardwright.planner.solver.network import Network

_SWEEPS = 20
# Above rounding errors of the bounds, below any gap that is reported.
_MARGIN = 1e-9


def fix_by_bound(network: Network, dual: Dual, upper: float) -> int:
    """Forbid strategies and pairs that only solutions costing more than `upper` contain.

    Args:
      network: what `dual.arrays` was laid out from.
      upper: cost of a known solution, without the network's constant.

    Returns:
      How many entries were forbidden. The network is to be reduced again.
    """
    g = dual.arrays
    threshold = upper + _MARGIN * abs(upper)
    allowed = dual.settle(_SWEEPS) <= threshold
    forbidden = int(np.count_nonzero(~allowed))
    for place, node in enumerate(g.nodes):
        keep = allowed[g.first[place] : g.first[place + 1]]
        if not keep.all():
            network.unary[node] = np.where(keep, network.costs(node), np.inf)
    for edge, (a, b) in enumerate(zip(g.nodes[g.edge_a], g.nodes[g.edge_b], strict=True)):
        table = network.tables[a][b]
        going = (dual.pair_bounds(edge) > threshold) & np.isfinite(table)
        if going.any():
            forbidden += int(np.count_nonzero(going))
            network.tables[a][b] = np.where(going, np.inf, table)
            network.tables[b][a] = network.tables[a][b].T
    return forbidden
