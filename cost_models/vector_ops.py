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
    """Work of one kind of operation.

    Attributes:
      to_fifth: up to the fifth TPU generation.
      bf16_to_fifth: the same on bf16 values, where less precision is cheaper.
      since_sixth: since the sixth generation.
    """

    to_fifth: VectorWork
    bf16_to_fifth: VectorWork
    since_sixth: VectorWork

    def on(self, chip: ChipProfile, dtype: str) -> VectorWork:
        """The work on `chip` for values of `dtype`; a chip that is not known counts as new."""
        if chip.generation not in _TO_FIFTH:
            return self.since_sixth
        return self.bf16_to_fifth if dtype in ("bf16", "bfloat16") else self.to_fifth


_TO_FIFTH = frozenset({"v2", "v3", "v4", "v5e", "v5p"})


def _ops(
    alu: float,
    transcendental: float = 0,
    *,
    newer: tuple[float, float] | None = None,
    bf16: tuple[float, float] | None = None,
) -> VectorOps:
    work = VectorWork(alu, transcendental)
    return VectorOps(
        to_fifth=work,
        bf16_to_fifth=VectorWork(*bf16) if bf16 else work,
        since_sixth=VectorWork(*newer) if newer else work,
    )


# Counted in the final instruction bundles of libtpu 0.0.42.1 for v5e and v6e: chains of the
# operation on [256, 128] values, occupied slots of the longer less the shorter chain, for each
# register and operation. Kinds that are not listed take one ALU operation.
_WORK = {
    "atan2": _ops(51, 1, newer=(39, 1)),
    "cbrt": _ops(17, 2, newer=(10, 2)),
    "cosine": _ops(148, 0, newer=(95, 2)),
    "divide": _ops(14, 1, newer=(2, 1), bf16=(2, 1)),
    "erf": _ops(38, 1, newer=(1, 1)),
    "erf_inv": _ops(58, 2, newer=(53, 2)),
    "exponential": _ops(2, 1),
    "exponential_minus_one": _ops(9, 1, newer=(8, 2)),
    "log": _ops(2, 1),
    "log_plus_one": _ops(9, 1),
    "logistic": _ops(16, 2, newer=(4, 2), bf16=(4, 2)),
    "power": _ops(73, 1, newer=(35, 2)),
    "remainder": _ops(21, 1, newer=(10, 1)),
    "round_nearest_even": _ops(9),
    "rsqrt": _ops(9, 1, newer=(1, 1)),
    "sign": _ops(8),
    "sine": _ops(148, 0, newer=(96, 2)),
    "sqrt": _ops(12, 1, newer=(7, 1)),
    "tan": _ops(169, 1),
    "tanh": _ops(1, 1),
}
_PLAIN = _ops(1)


def vector_ops(name: str) -> VectorOps:
    """Work of an operation by its StableHLO or CHLO name without the dialect ("exponential")."""
    return _WORK.get(name, _PLAIN)
