"""The integer program as a mixed-integer model for HiGHS, through OR-Tools MathOpt.

Edges are flows from the strategies of one end to those of the other (the local polytope), which are
whole wherever the strategies are. Memory is a row a time point, for the points asked for.
"""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy.sparse
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from shardwright.planner.solver.arrays import BIG, Arrays
from shardwright.planner.solver.network import IntArray
from shardwright.planner.solver.problem import FloatArray

_ROWS_PER_ROUND = 10
# HiGHS works to absolute tolerances near 1e-6: costs are scaled to about this total.
_OBJECTIVE_SCALE = 1e5
# Whole rows are scaled to this much slack, so that their tolerance is about 1e-9 of the slack.
_ROW_SCALE = 1e3
# Relative to the largest cost, what is lost in sums of costs.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Relaxed:
    """Value of each strategy (None where none was found) and a lower bound on the cost."""

    picks: FloatArray | None
    bound: float
    infeasible: bool


class MipModel:
    """Columns are the strategies, then the allowed pairs of each edge."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        strategies = len(arrays.unary)
        sizes = np.diff(arrays.first)
        pair = np.flatnonzero(arrays.table < BIG / 2)
        edge = np.searchsorted(arrays.edge_first, pair, side="right") - 1
        row, column = np.divmod(pair - arrays.edge_first[edge], sizes[arrays.edge_b[edge]])
        rounded = np.arange(len(pair)) + strategies
        # One row a node (its strategies sum to 1), then one a strategy at each end of each edge
        # (its pairs sum to it).
        node_of = np.repeat(np.arange(len(sizes)), sizes)
        at_a = len(sizes) + arrays.to_a[edge] + row
        at_b = len(sizes) + arrays.to_a[-1] + arrays.to_b[edge] + column
        ends_a = np.repeat(arrays.first[arrays.edge_a] - arrays.to_a[:-1], np.diff(arrays.to_a))
        ends_b = np.repeat(arrays.first[arrays.edge_b] - arrays.to_b[:-1], np.diff(arrays.to_b))
        own_a = ends_a + np.arange(len(ends_a))
        own_b = ends_b + np.arange(len(ends_b))
        linked = len(own_a) + len(own_b)
        self.height = len(sizes) + linked
        self.width = strategies + len(pair)
        entries = np.concatenate(
            [np.ones(strategies), np.ones(2 * len(pair)), np.full(linked, -1.0)]
        )
        rows = np.concatenate([node_of, at_a, at_b, len(sizes) + np.arange(linked)])
        columns = np.concatenate([np.arange(strategies), rounded, rounded, own_a, own_b])
        self.matrix = scipy.sparse.csr_matrix(
            (entries, (rows, columns)), shape=(self.height, self.width)
        )
        self.right = np.concatenate([np.ones(len(sizes)), np.zeros(linked)])
        self.costs = np.concatenate([arrays.unary, arrays.table[pair]])
        # A cost of the order of the optimum, to scale by; a solution or a bound tells it better.
        positive = np.abs(self.costs[self.costs != 0])
        self.reference = float(np.median(positive)) * len(sizes) if len(positive) else 1.0
        # Less than this is the rounding of a relaxation whose value is zero.
        self.least_reference = (
            max(float(positive.min()), _ROUNDING * float(positive.max())) if len(positive) else 1.0
        )

    def refer(self, cost: float) -> None:
        """Scale by a cost known to be of the order of the optimum."""
        if math.isfinite(cost):
            self.reference = max(abs(cost), self.least_reference)

    def solve(
        self,
        points: list[int],
        deadline: float,
        *,
        integer: bool = False,
        hint: IntArray | None = None,
        gap: float = 0.0,
        seed: int = 0,
    ) -> Relaxed:
        """Solve with the memory rows at `points`."""
        arrays = self.arrays
        strategies = len(arrays.unary)
        remaining = deadline - time.perf_counter()
        if remaining <= 0:
            return Relaxed(None, -math.inf, False)
        scale = _OBJECTIVE_SCALE / self.reference
        model = mathopt.Model.from_model_proto(self._proto(points, scale, integer))
        parameters = mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=remaining),
            random_seed=seed,
            highs=highs_pb2.HighsOptionsProto(int_options={"threads": 1}),
        )
        if integer:
            parameters.relative_gap_tolerance = max(gap, 1e-10)
            parameters.absolute_gap_tolerance = 1e-9
        picked = [model.get_variable(s) for s in range(strategies)]
        extra = mathopt.ModelSolveParameters(
            variable_values_filter=mathopt.VariableFilter(filtered_items=picked)
        )
        if hint is not None and integer:
            values = dict(zip(picked, self.indicator(hint).tolist(), strict=True))
            extra.solution_hints.append(mathopt.SolutionHint(variable_values=values))
        try:
            result = mathopt.solve(
                model, mathopt.SolverType.HIGHS, params=parameters, model_params=extra
            )
        except (RuntimeError, AttributeError):
            # HiGHS gave up for numerical reasons. MathOpt should raise RuntimeError; as of 9.15 its
            # translation of the status raises AttributeError.
            return Relaxed(None, -math.inf, False)
        if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
            return Relaxed(None, math.inf, True)
        bound = result.dual_bound() / scale
        if not result.has_primal_feasible_solution():
            return Relaxed(None, bound, False)
        values = result.variable_values()
        return Relaxed(np.array([values[v] for v in picked]), bound, False)

    def cost(self, choice: IntArray) -> float:
        """Sum of the costs of nodes and edges."""
        g = self.arrays
        width = np.diff(g.first)[g.edge_b]
        pair = g.edge_first[:-1] + choice[g.edge_a] * width + choice[g.edge_b]
        return float(g.unary[g.first[:-1] + choice].sum() + g.table[pair].sum())

    def _proto(self, points: list[int], scale: float, integer: bool) -> model_pb2.ModelProto:
        strategies = len(self.arrays.unary)
        blocks = [self.matrix]
        lower, upper = self.right, self.right
        if points:
            rows = np.array([self.memory_row(t) for t in points])
            factors = _ROW_SCALE / np.maximum(self.arrays.slack[points], 1e-300)
            others = scipy.sparse.csr_matrix((len(points), self.width - strategies))
            blocks.append(
                scipy.sparse.hstack([scipy.sparse.csr_matrix(rows * factors[:, None]), others])
            )
            lower = np.concatenate([lower, np.full(len(points), -math.inf)])
            upper = np.concatenate([upper, self.arrays.slack[points] * factors])
        matrix = scipy.sparse.vstack(blocks, format="csr")
        matrix.sort_indices()
        coordinates = matrix.tocoo()
        proto = model_pb2.ModelProto()
        proto.variables.ids.extend(range(self.width))
        proto.variables.lower_bounds.extend([0.0] * self.width)
        proto.variables.upper_bounds.extend([1.0] * self.width)
        proto.variables.integers.extend(
            [integer] * strategies + [False] * (self.width - strategies)
        )
        proto.linear_constraints.ids.extend(range(len(upper)))
        proto.linear_constraints.lower_bounds.extend(lower.tolist())
        proto.linear_constraints.upper_bounds.extend(upper.tolist())
        proto.linear_constraint_matrix.row_ids.extend(coordinates.row.tolist())
        proto.linear_constraint_matrix.column_ids.extend(coordinates.col.tolist())
        proto.linear_constraint_matrix.coefficients.extend(coordinates.data.tolist())
        used = np.flatnonzero(self.costs)
        proto.objective.linear_coefficients.ids.extend(used.tolist())
        proto.objective.linear_coefficients.values.extend((self.costs[used] * scale).tolist())
        return proto

    def memory_row(self, point: int) -> FloatArray:
        """Bytes by strategy at a time point, shape (strategies,)."""
        arrays = self.arrays
        row = np.zeros(len(arrays.unary))
        live = np.flatnonzero((arrays.term_start <= point) & (point < arrays.term_end))
        for q in live:
            usage = arrays.usage[arrays.usage_first[q] : arrays.usage_first[q + 1]]
            start = arrays.first[arrays.term_node[q]]
            row[start : start + len(usage)] += usage
        return row

    def broken_points(self, picks: FloatArray, tolerance: float) -> list[int]:
        """The points most over the limit, one in each stretch of time."""
        slack = self.arrays.slack
        over = self.usage(picks) - slack
        over[over <= tolerance * np.maximum(slack, 1.0)] = 0.0
        found: list[int] = []
        while len(found) < _ROWS_PER_ROUND and over.any():
            worst = int(np.argmax(over))
            found.append(worst)
            left, right = worst, worst
            while left > 0 and over[left - 1] > 0:
                left -= 1
            while right + 1 < len(over) and over[right + 1] > 0:
                right += 1
            over[left : right + 1] = 0.0
        return found

    def usage(self, picks: FloatArray) -> FloatArray:
        """Bytes above the least at each time point."""
        g = self.arrays
        steps = np.zeros(len(g.slack) + 1)
        if len(g.usage):
            owner = np.repeat(g.first[g.term_node] - g.usage_first[:-1], np.diff(g.usage_first))
            used = picks[owner + np.arange(len(owner))] * g.usage
            by_term = np.add.reduceat(used, g.usage_first[:-1])
            np.add.at(steps, g.term_start, by_term)
            np.subtract.at(steps, g.term_end, by_term)
        return np.cumsum(steps)[:-1]

    def choice(self, picks: FloatArray) -> IntArray:
        """The strategy of each node with the largest value."""
        first = self.arrays.first
        return np.array([int(np.argmax(picks[a:b])) for a, b in pairwise(first)])

    def indicator(self, choice: IntArray) -> FloatArray:
        """1 at the chosen strategies, shape (strategies,)."""
        picks = np.zeros(len(self.arrays.unary))
        picks[self.arrays.first[:-1] + choice] = 1.0
        return picks
