"""The numbers of answers by pattern of change (see `reshard_patterns`), looked up many at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.strategies import IntArray

LARGE = 2**20
"""Size that stands for a dimension which holds all axes."""


class PatternNumbers:
    """Numbers by pattern: a row of the sizes of `2 * axes` dimensions and as many digits.

    Patterns of large dimensions follow from their digits alone, which make one whole number; those
    are kept in order. There are few others.
    """

    def __init__(self, axes: int) -> None:
        self._axes = axes
        self._codes: IntArray = np.zeros(0, dtype=np.int64)
        self._numbers: IntArray = np.zeros(0, dtype=np.int64)
        self._others: dict[bytes, int] = {}

    def find(self, patterns: IntArray) -> IntArray:
        """The number of each pattern, -1 where it has none."""
        found = np.full(len(patterns), -1, dtype=np.int64)
        large = self._large(patterns)
        if len(self._codes):
            codes = self._code(patterns[large])
            place = np.searchsorted(self._codes, codes)
            place[place == len(self._codes)] = 0
            found[large] = np.where(self._codes[place] == codes, self._numbers[place], -1)
        found[~large] = [self._others.get(key, -1) for key in pattern_keys(patterns[~large])]
        return found

    def add(self, patterns: IntArray, numbers: IntArray) -> None:
        """Numbers patterns that have no number yet."""
        large = self._large(patterns)
        codes = np.concatenate([self._codes, self._code(patterns[large])])
        order = np.argsort(codes, kind="stable")
        self._codes = codes[order]
        self._numbers = np.concatenate([self._numbers, numbers[large]])[order]
        keys = pattern_keys(patterns[~large])
        self._others.update(zip(keys, numbers[~large].tolist(), strict=True))

    def _large(self, patterns: IntArray) -> NDArray[np.bool_]:
        sizes = patterns[:, : 2 * self._axes]
        large: NDArray[np.bool_] = ((sizes == LARGE) | (sizes == 0)).all(axis=1)
        return large

    def _code(self, patterns: IntArray) -> IntArray:
        digits = patterns[:, 2 * self._axes :] + 1
        weights = (2 * self._axes + 1) ** np.arange(2 * self._axes, dtype=np.int64)
        codes: IntArray = digits @ weights
        return codes


def pattern_keys(patterns: IntArray) -> list[bytes]:
    """Patterns as keys of a dict."""
    rows = np.ascontiguousarray(patterns, dtype=np.int32)
    keys: list[bytes] = rows.view(f"V{rows.shape[1] * rows.itemsize}").ravel().tolist()
    return keys
