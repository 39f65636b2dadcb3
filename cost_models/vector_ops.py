"""Work of elementwise operations on a TPU's vector unit, counted from compiled programs.

A vector register holds 8 x 128 values. In one cycle a core starts up to `vpu_alus` vector
operations, and one transcendental operation on a unit of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.hardware_profiles.chip import ChipProfile


@dataclass(frozen=True)
class VectorWork:
    """Operations for one vector register of results: plain ones and transcendental ones."""

    alu: float
    transcendental: float = 0.0


@dataclass(frozen=True)
class VectorOps:
    """Work of one kind of operation, up to the fifth TPU generation and since the sixth."""

    to_fifth: VectorWork
    since_sixth: VectorWork

    def on(self, chip: ChipProfile) -> VectorWork:
        """The work on `chip`; a chip that is not known counts as new."""
        return self.to_fifth if chip.name in _TO_FIFTH else self.since_sixth


_TO_FIFTH = frozenset({"v2", "v3", "v4", "v5e", "v5p"})


def _ops(
    alu: float, transcendental: float = 0, newer: tuple[float, float] | None = None
) -> VectorOps:
    work = VectorWork(alu, transcendental)
    return VectorOps(work, VectorWork(*newer) if newer else work)


# Counted in the final instruction bundles of libtpu 0.0.42.1 for v5e and v6e: chains of the
# operation in f32 on [256, 128], occupied slots of the longer less the shorter chain, for each
# register and operation. Kinds that are not listed take one ALU operation.
_WORK = {
    "atan2": _ops(51, 1, (39, 1)),
    "cbrt": _ops(17, 2, (10, 2)),
    "cosine": _ops(148, 0, (95, 2)),
    "divide": _ops(14, 1, (2, 1)),
    "erf": _ops(38, 1, (1, 1)),
    "erf_inv": _ops(58, 2, (53, 2)),
    "exponential": _ops(2, 1),
    "exponential_minus_one": _ops(9, 1, (8, 2)),
    "log": _ops(2, 1),
    "log_plus_one": _ops(9, 1),
    "logistic": _ops(16, 2, (4, 2)),
    "power": _ops(73, 1, (35, 2)),
    "remainder": _ops(21, 1, (10, 1)),
    "round_nearest_even": _ops(9),
    "rsqrt": _ops(9, 1, (1, 1)),
    "sign": _ops(8),
    "sine": _ops(148, 0, (96, 2)),
    "sqrt": _ops(12, 1, (7, 1)),
    "tan": _ops(169, 1),
    "tanh": _ops(1, 1),
}
_PLAIN = _ops(1)


def vector_ops(name: str) -> VectorOps:
    """Work of an operation by its StableHLO or CHLO name without the dialect ("exponential")."""
    return _WORK.get(name, _PLAIN)
