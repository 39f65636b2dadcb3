"""Lower bounds: message passing on the cost network with prices on memory over time."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from shardwright.planner.solver.arrays import Arrays
from shardwright.planner.solver.kernels import price_memory, sweep, total_cost, usage_over_time
from shardwright.planner.solver.network import IntArray
from shardwright.planner.solver.problem import FloatArray

_SMOOTHING = 0.1
_SETTLING_SWEEPS = 20
_GUESSED_GAP = 0.05


@dataclass(frozen=True)
class Rounding:
    """Choices read off the messages: their cost, and bytes over the limit summed over time."""

    choice: IntArray
    cost: float
    excess: float


class Dual:
    """Ascends the Lagrangian dual: messages by TRW-S, prices by the volume algorithm.

    Source: Barahona and Anbil, The volume algorithm (Mathematical Programming 87, 2000): step from
      the best prices along the averaged usage of the primal points seen.

    Attributes:
      begun: lower bound on the cost of the arrays at the prices to begin with.
      bound: best lower bound proven on it that was asked for: reached `enough`, or by `ascend`.
      prices: cost per byte at each time point that proved it.
      best: of the roundings of the last ascent, the one that fits and costs least, else the one
        least over the limit.
      worst_points: how often each time point was the most over the limit.
    """

    def __init__(
        self,
        arrays: Arrays,
        prices: FloatArray | None = None,
        enough: float = np.inf,
        deadline: float = np.inf,
    ) -> None:
        """Passes messages at some prices, or none, until they settle.

        Args:
          arrays: the problem.
          prices: cost per byte at each time point.
          enough: a bound at which to stop, now and in `ascend`.
          deadline: on the clock of `time.perf_counter`; no sweep but the first begins after it.
        """
        self.arrays = arrays
        self._enough = enough
        self._deadline = deadline
        self.bound = -np.inf
        self.prices = np.zeros(len(arrays.slack)) if prices is None else prices.copy()
        self.best: Rounding | None = None
        self.worst_points: Counter[int] = Counter()
        self._trial = self.prices.copy()
        self._average: FloatArray | None = None
        self._settled = -np.inf
        self._step = 0.5
        self._worse = self._better = 0
        self._message_a = np.zeros(arrays.to_a[-1])
        self._message_b = np.zeros(arrays.to_b[-1])
        self._beliefs = np.zeros(len(arrays.unary))
        self._priced = np.zeros(len(arrays.unary))
        self._choice = np.zeros(len(arrays.nodes), dtype=np.int64)
        self._usage = np.zeros(len(arrays.slack) + 1)
        price_memory(arrays, self.prices, self._priced)
        paid = float(self.prices @ arrays.slack)
        self.begun = -np.inf
        for _ in range(_SETTLING_SWEEPS):
            self.begun = max(self.begun, max(self._sweep()) - paid)
            if self.begun >= enough:
                self.bound = self.begun
                break
            if self._out_of_time():
                break

    def ascend(self, iterations: int, upper: float = np.inf) -> None:
        """Improve the bound; `upper`, the cost of a known solution, sets the step length."""
        self.best = None
        for iteration in range(iterations):
            if self.bound >= self._enough or (iteration and self._out_of_time()):
                return
            value = max(self._sweep()) - float(self._trial @ self.arrays.slack)
            self._consider_rounding()
            if not len(self.prices):
                self.bound = max(self.bound, value)
            else:
                over = self._usage[:-1] - self.arrays.slack
                if over.max() > 0:
                    self.worst_points[int(np.argmax(over))] += 1
                self._judge(value, over)
                self._move(over, upper)

    def _out_of_time(self) -> bool:
        return time.perf_counter() > self._deadline

    def settle(self, sweeps: int) -> FloatArray:
        """Pass messages at the best prices.

        Returns:
          For each strategy, a lower bound on the cost of what contains it.
        """
        price_memory(self.arrays, self.prices, self._priced)
        self._trial = self.prices.copy()
        paid = float(self.prices @ self.arrays.slack)
        bounds = np.full(len(self.arrays.unary), -np.inf)
        for sweep_number in range(sweeps):
            if sweep_number and self._out_of_time():
                break
            first, second = self._sweep()
            # What a belief adds holds over the bound of the forward pass just before.
            np.maximum(bounds, first - paid + self._beliefs, out=bounds)
            self._settled = second - paid
            self.bound = max(self.bound, self._settled)
        return bounds

    def pair_bounds(self, edge: int) -> FloatArray:
        """After `settle`: for each pair of an edge, a lower bound on the cost of what contains it.

        After a backward pass an edge keeps its table less both messages plus the share that its
        later end sent back; a node keeps what it did not send. All are at least 0 over the bound.
        """
        g = self.arrays
        a, b = int(g.edge_a[edge]), int(g.edge_b[edge])
        at_a, at_b = slice(g.first[a], g.first[a + 1]), slice(g.first[b], g.first[b + 1])
        table = g.table[g.edge_first[edge] : g.edge_first[edge + 1]]
        kept = table.reshape(at_a.stop - at_a.start, -1) + (
            self._share(b) * self._beliefs[at_b] - self._message_b[g.to_b[edge] : g.to_b[edge + 1]]
        )
        kept = kept - self._message_a[g.to_a[edge] : g.to_a[edge + 1], None]
        kept -= kept.min()
        kept += (self._rest(a) * self._beliefs[at_a])[:, None] + self._rest(b) * self._beliefs[at_b]
        return kept + self._settled

    def _share(self, node: int) -> float:
        g = self.arrays
        earlier = g.incident_split[node] - g.incident_first[node]
        later = g.incident_first[node + 1] - g.incident_split[node]
        return 1.0 / float(max(earlier, later, 1))

    def _rest(self, node: int) -> float:
        g = self.arrays
        earlier = g.incident_split[node] - g.incident_first[node]
        return float(1.0 - earlier * self._share(node))

    def _sweep(self) -> tuple[float, float]:
        first, second = sweep(
            self.arrays, self._priced, self._message_a, self._message_b, self._beliefs, self._choice
        )
        return float(first), float(second)

    def _consider_rounding(self) -> None:
        usage_over_time(self.arrays, self._choice, self._usage)
        excess = float(np.maximum(self._usage[:-1] - self.arrays.slack, 0.0).sum())
        cost = float(total_cost(self.arrays, self._choice))
        if self.best is None or (excess, cost) < (self.best.excess, self.best.cost):
            self.best = Rounding(self._choice.copy(), cost, excess)

    def _judge(self, value: float, over: FloatArray) -> None:
        """Keep prices that proved more, and adapt the step length."""
        if value > self.bound:
            self.bound = value
            self.prices = self._trial.copy()
            self._worse = 0
            self._better += int(self._average is not None and over @ self._average >= 0)
            if self._better >= 2:
                self._step, self._better = min(1.3 * self._step, 2.0), 0
        else:
            self._worse += 1
            if self._worse >= 5:
                self._step, self._worse = max(0.7 * self._step, 1e-3), 0

    def _move(self, over: FloatArray, upper: float) -> None:
        if self._average is None:
            self._average = over.copy()
        else:
            self._average = (1 - _SMOOTHING) * self._average + _SMOOTHING * over
        direction = np.where((self.prices > 0) | (self._average > 0), self._average, 0.0)
        if not np.isfinite(upper):
            upper = self.bound + _GUESSED_GAP * abs(self.bound)
        distance = max(upper - self.bound, 1e-3 * abs(self.bound))
        square = float(direction @ direction)
        length = self._step * distance / square if square > 0 else 0.0
        self._trial = np.maximum(self.prices + length * direction, 0.0)
        price_memory(self.arrays, self._trial, self._priced)
