"""Compiled loops over the tables of reshards, which have a million entries on three axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from shardwright.planner.strategies import IntArray

FloatArray = NDArray[np.float64]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _kernel(function: _Function) -> _Function:
    """Compile without the interpreter lock; keep the machine code on disk."""
    return cast("_Function", numba.njit(cache=True, nogil=True)(function))


@_kernel
def is_known(answers: IntArray, before: IntArray, after: IntArray) -> bool:
    """Whether a table of answers has one from every code before to every code after."""
    for i in range(len(before)):
        of = answers[before[i]]
        for j in range(len(after)):
            if of[after[j]] < 0:
                return False
    return True


@_kernel
def mark_unknown(answers: IntArray, before: IntArray, after: IntArray) -> bool:
    """Turns -1 into -2 from every code before to every code after; whether there are any such."""
    found = False
    for i in range(len(before)):
        of = answers[before[i]]
        for j in range(len(after)):
            if of[after[j]] < 0:
                of[after[j]] = -2
                found = True
    return found


@_kernel
def add_steps(
    answers: IntArray,
    before: IntArray,
    after: IntArray,
    rows: IntArray,
    by_step: FloatArray,
    gathers: FloatArray,
    rest: FloatArray,
) -> None:
    """Adds up the seconds of the steps of every change.

    Args:
      answers: number of the answer by sharding codes before and after.
      before, after: codes of the rows and the columns of the results.
      rows: the steps of each answer, -1 for no more.
      by_step: seconds of each step, asynchronous gathers and the rest, shape (2, steps).
      gathers, rest: results, of zeros, shape (before, after).
    """
    for i in range(len(before)):
        of = answers[before[i]]
        for j in range(len(after)):
            steps = rows[of[after[j]]]
            for step in steps:
                if step < 0:
                    break
                gathers[i, j] += by_step[0, step]
                rest[i, j] += by_step[1, step]


@_kernel
def pick_reductions(
    answers: IntArray,
    before: IntArray,
    after: IntArray,
    sliced: IntArray,
    masks: IntArray,
    reduce: FloatArray,
    scatter: FloatArray,
    splits: NDArray[np.bool_],
    out: FloatArray,
) -> None:
    """Writes what adding up partial sums takes, scattered where the change then slices.

    Args:
      answers, before, after: as of `add_steps`.
      sliced: a bit mask of the axes that each answer begins by slicing over.
      masks: of the axes that each row is a partial sum over, shape (before,).
      reduce, scatter: seconds by row, shape (before,).
      splits: whether a scatter becomes an all-reduce, by mask and code after.
      out: the result, of zeros, shape (before, after).
    """
    for i in range(len(before)):
        mask = masks[i]
        if mask == 0:
            continue
        of = answers[before[i]]
        for j in range(len(after)):
            scatters = (sliced[of[after[j]]] & mask) == mask and not splits[mask, after[j]]
            out[i, j] = scatter[i] if scatters else reduce[i]
