"""The largest batch of a step within a latency: most tokens a second that users will wait for.

A step of more sequences takes longer and makes more tokens a second, as weights are read once for
all of them. So batches are doubled until a step is too slow or does not fit, then bisected.

Source: Pope et al., Efficiently Scaling Transformer Inference (2022), section 2.1 (the trade of
  latency for throughput by the batch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardwright.errors import DoesNotFitError, InputError
from shardwright.planner.plan import Plan

_CLOSE = 8
"""Batches nearer than this part of the smaller one are not told apart."""


@dataclass(frozen=True)
class Trial:
    """A batch that was planned.

    Attributes:
      batch: sequences of a step.
      step_time_s: of its plan; None where it does not fit in memory.
    """

    batch: int
    step_time_s: float | None

    @property
    def rate(self) -> float:
        """Sequences a second; none where it does not fit."""
        return self.batch / self.step_time_s if self.step_time_s else 0.0


@dataclass(frozen=True)
class WithinLatency:
    """What was found.

    Attributes:
      plan: of the batch with the most sequences a second within the limit.
      batch: that batch.
      trials: every batch that was planned, smallest first.
    """

    plan: Plan = field(repr=False)
    batch: int
    trials: tuple[Trial, ...]


def largest_batch(
    plan_at: Callable[[int], Plan], limit_s: float, *, first: int = 32
) -> WithinLatency:
    """Plans batches around the largest whose step takes no longer than a limit.

    Args:
      plan_at: from a batch to its plan; raises `DoesNotFitError` where there is none.
      limit_s: seconds that a step may take.
      first: batch to begin with.

    Raises:
      InputError: the limit or the first batch is nothing, or even a batch of one takes longer.
      DoesNotFitError: even a batch of one does not fit.
    """
    if not limit_s > 0 or first < 1:
        raise InputError(
            f"no batch from {first} takes {limit_s:g} s",
            where="latency",
            do="Give a limit above 0, and a batch of at least 1",
        )
    trials: dict[int, Trial] = {}
    plans: dict[int, Plan] = {}

    def fits(batch: int) -> bool:
        try:
            plans[batch] = plan_at(batch)
        except DoesNotFitError:
            if batch == 1:
                raise
            trials[batch] = Trial(batch, None)
            return False
        seconds = plans[batch].estimate.step_time_s
        trials[batch] = Trial(batch, seconds)
        return seconds <= limit_s

    good, bad = 0, first
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // _CLOSE):
        middle = max(1, (good + bad) // 2)
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    if not good:
        took = trials[1].step_time_s or 0.0
        raise InputError(
            f"a step of one sequence takes {took * 1e3:.3g} ms, and {limit_s * 1e3:.3g} ms are "
            "allowed",
            where="latency",
            do="Allow more, or take a larger or faster slice, int8 weights or a shorter context",
        )
    within = [t for t in trials.values() if t.step_time_s and t.step_time_s <= limit_s]
    best = max(within, key=lambda trial: trial.rate)
    ordered = tuple(trials[batch] for batch in sorted(trials))
    return WithinLatency(plans[best.batch], best.batch, ordered)
