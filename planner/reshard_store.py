"""Shardy's answers kept on disk: they depend on nothing but the version of jaxlib.

Asking takes seconds for three axes of some sizes. A file holds the answers for one tuple of axis
sizes; what cannot be read or written is asked again.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jaxlib
import numpy as np

from shardwright.hardware_profiles.mesh import AxisRef
from shardwright.planner.cache_folder import cache_folder
from shardwright.planner.collectives import Step
from shardwright.planner.strategies import IntArray

_FORMAT = 1
"""Of the files; to be raised when what is asked, or how it is told, changes."""
_MOST = 60_000
"""Answers in a file; of more the last are kept."""


@dataclass(frozen=True)
class Stored:
    """Answers to patterns of change.

    Attributes:
      steps: every different collective, some perhaps in no answer.
      patterns: shape (answers, 4 * axes), see `reshard_patterns.Changes`.
      rows: the steps of each answer by number, -1 for no more, shape (answers, longest).
      divisors: what must divide each dimension of a pattern, shape (answers, dimensions).
    """

    steps: Sequence[Step]
    patterns: IntArray
    rows: IntArray
    divisors: IntArray


def load_answers(sizes: tuple[int, ...]) -> Stored | None:
    """The answers on disk for axes of these sizes; None where there are none to be read."""
    try:
        with _path(sizes).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            steps = [
                Step(kind, tuple(AxisRef(*axis) for axis in axes), divisor)
                for kind, axes, divisor in json.loads(str(file["steps"]))
            ]
            parts = [file[name].astype(np.int64) for name in ("patterns", "rows", "divisors")]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    patterns, rows, divisors = parts
    agree = (
        len(patterns) == len(rows) == len(divisors)
        and patterns.shape[1:] == (4 * len(sizes),)
        and rows.max(initial=-1) < len(steps)
    )
    return Stored(steps, patterns, rows, divisors) if agree else None


def save_answers(sizes: tuple[int, ...], stored: Stored) -> None:
    """Puts answers on disk, in place of those that were there."""
    steps = [
        (step.kind, [(a.name, a.pre_size, a.size) for a in step.axes], step.divisor)
        for step in stored.steps
    ]
    path = _path(sizes)
    # Without a place to keep them, they are asked again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            np.savez_compressed(
                file,
                steps=np.array(json.dumps(steps)),
                patterns=stored.patterns[-_MOST:].astype(np.int32),
                rows=stored.rows[-_MOST:].astype(np.int32),
                divisors=stored.divisors[-_MOST:].astype(np.int32),
            )
        os.replace(file.name, path)


def _path(sizes: tuple[int, ...]) -> Path:
    folder = cache_folder("reshards") / f"jaxlib-{jaxlib.__version__}-{_FORMAT}"
    return folder / f"{'x'.join(map(str, sizes))}.npz"


def padded(rows: Sequence[Sequence[int]], empty: int) -> IntArray:
    """Rows of numbers as an array, the shorter ones filled up."""
    longest = max(1, *map(len, rows))
    filled: IntArray = np.full((len(rows), longest), empty, dtype=np.int64)
    lengths = np.array(list(map(len, rows)))
    filled[np.arange(longest) < lengths[:, None]] = [n for row in rows for n in row]
    return filled
