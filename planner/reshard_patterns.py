"""With which collectives Shardy changes a sharding: every pattern of change is asked once.

A pattern says for each mesh axis which dimension it shards before and after. Shardy's answer
depends on the sizes of dimensions only where one cannot hold all the axes that the answer puts on
it on the way, so that patterns are asked with large dimensions first, and with real ones where
those do not hold. Axes that shard nothing on either side have no part in it. So answers are kept
by the sizes of the axes alone, and serve every mesh and every tensor; those of Shardy itself are
also kept on disk, for other programs and later runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from string import ascii_lowercase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.collectives import Step, whole_axes
from shardwright.planner.pattern_numbers import LARGE, PatternNumbers, pattern_keys
from shardwright.planner.reshard_answers import Dims, Pattern, ask_shardy, axis_names
from shardwright.planner.reshard_kernels import is_known, mark_unknown
from shardwright.planner.reshard_store import Stored, load_answers, padded, save_answers
from shardwright.planner.strategies import IntArray

_MARKED = -2
"""In a table of answers: asked for and not known."""


@lru_cache(maxsize=256)
def sharding_digits(axes: int, rank: int) -> IntArray:
    """For every sharding code the dimension that each axis shards, or -1, shape (codes, axes)."""
    count = (rank + 1) ** axes
    digits: IntArray = np.arange(count)[:, None] // (rank + 1) ** np.arange(axes) % (rank + 1) - 1
    return digits


@lru_cache(maxsize=256)
def changes(sizes: tuple[int, ...]) -> Changes:
    """The changes of sharding on meshes whose axes have these sizes."""
    return Changes(sizes)


class Changes:
    """What Shardy answered so far for axes of some sizes; asks what it does not know yet.

    Patterns are rows of an array here: the sizes of up to two dimensions an axis (0: no more), then
    for each axis the dimension that it shards before and after. Answers are numbered.

    Attributes:
      sizes: sizes of the mesh axes.
      steps: every different collective in an answer.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.steps: list[Step] = []
        self._step_ids: dict[Step, int] = {}
        self._known = PatternNumbers(len(sizes))
        self._rows: IntArray = np.full((0, 1), -1, dtype=np.int64)
        self._divisors: IntArray = np.ones((0, 2 * len(sizes)), dtype=np.int64)
        self._sliced: IntArray = np.zeros(0, dtype=np.int64)
        self._step_slices: list[int] = []
        self._renamed: dict[tuple[int, ...], list[int]] = {}
        self._tables: dict[Dims, IntArray] = {}
        self._large: dict[int, IntArray] = {}
        self._of_shardy: list[tuple[IntArray, IntArray]] | None = None
        self._unsaved = False

    def ask(self, wanted: Iterable[tuple[Dims, IntArray, IntArray]]) -> None:
        """Asks for changes of tensors: from each of some sharding codes to each of some others.

        All at once, since asking many things together takes little longer than asking one.
        """
        unknown = [
            shape
            for shape, before, after in wanted
            if mark_unknown(self._table(shape), before, after)
        ]
        questions = [
            (shape, np.flatnonzero(self._table(shape) == _MARKED))
            for shape in dict.fromkeys(unknown)
        ]
        self._ask_of_large_tensors(questions)
        uneven = [self._settle(shape, pairs) for shape, pairs in questions]
        if not uneven:
            return
        numbers = self._number(np.concatenate([patterns for _, patterns in uneven]))
        for (shape, _), (pairs, patterns) in zip(questions, uneven, strict=True):
            self._table(shape).ravel()[pairs] = numbers[: len(patterns)]
            numbers = numbers[len(patterns) :]
        self._save()

    def numbers(self, shape: Dims, before: IntArray, after: IntArray) -> IntArray:
        """Which answer tells how one sharding code of a tensor becomes another.

        Args:
          shape: shape of the tensor.
          before, after: sharding codes. Where one cuts a dimension in more parts than it has
            elements, the answer is that of a larger tensor.

        Returns:
          Numbers of answers, shape (before, after).
        """
        return self.answers(shape, before, after)[np.ix_(before, after)]

    def answers(self, shape: Dims, before: IntArray, after: IntArray) -> IntArray:
        """The numbers of answers by codes before and after, with those of `numbers` in it."""
        table = self._table(shape)
        if not is_known(table, before, after):
            self.ask([(shape, before, after)])
        return table

    def step_rows(self) -> IntArray:
        """The numbers of the steps of every answer, shape (answers, longest); -1 for none."""
        return self._rows

    def sliced(self) -> IntArray:
        """A bit mask of the axes that every answer begins by slicing over, shape (answers,)."""
        return self._sliced

    def _table(self, shape: Dims) -> IntArray:
        """Numbers of answers by codes before and after; -1 where not asked yet."""
        if shape not in self._tables:
            codes = (len(shape) + 1) ** len(self.sizes)
            self._tables[shape] = np.full((codes, codes), -1, dtype=np.int64)
        return self._tables[shape]

    def _ask_of_large_tensors(self, questions: Sequence[tuple[Dims, IntArray]]) -> None:
        by_rank: dict[int, list[IntArray]] = {}
        for shape, pairs in questions:
            by_rank.setdefault(len(shape), []).append(pairs)
        for rank, asked_pairs in by_rank.items():
            patterns = _patterns(len(self.sizes), rank)
            known = self._large.setdefault(rank, np.full(len(patterns.distinct), -1))
            asked = np.zeros(len(known), dtype=bool)
            asked[patterns.index[np.concatenate(asked_pairs)]] = True
            new = np.flatnonzero(asked & (known < 0))
            digits = patterns.distinct[new]
            used = np.arange(digits.shape[1]) <= digits.max(axis=1, initial=-1)[:, None]
            known[new] = self._number(np.concatenate([LARGE * used, digits], axis=1))

    def _settle(self, shape: Dims, pairs: IntArray) -> tuple[IntArray, IntArray]:
        """Notes the answers of large tensors.

        Returns:
          The pairs that are to be asked with real dimensions, and their patterns.
        """
        axes, patterns = len(self.sizes), _patterns(len(self.sizes), len(shape))
        numbers = self._large[len(shape)][patterns.index[pairs]]
        self._table(shape).ravel()[pairs] = numbers
        answers = np.zeros(len(self._rows), dtype=bool)
        answers[numbers] = True
        divisors = np.unique(self._divisors[answers])
        cut_unevenly = [d for d, size in enumerate(shape) if (size % divisors).any()]
        uneven = np.zeros(len(pairs), dtype=bool)
        for dim in cut_unevenly:
            of = self._divisors[numbers, patterns.number[pairs, dim]]
            uneven |= patterns.used[pairs, dim] & (shape[dim] % of != 0)
        holds = _holds(self.sizes, shape)
        before, after = np.divmod(pairs[uneven], len(holds))
        ask = pairs[uneven][holds[before] & holds[after]]
        dims = np.zeros((len(ask), 2 * axes), dtype=np.int64)
        row, dim_of = np.nonzero(patterns.used[ask])
        dims[row, patterns.number[ask][row, dim_of]] = np.asarray(shape, dtype=np.int64)[dim_of]
        return ask, np.concatenate([dims, patterns.distinct[patterns.index[ask]]], axis=1)

    # -- answers -------------------------------------------------------------------------------

    def _number(self, patterns: IntArray) -> IntArray:
        """The numbers of the answers to patterns."""
        numbers = self._known.find(patterns)
        if (numbers < 0).any() and self._of_shardy is None:
            self._load()
            numbers = self._known.find(patterns)
        new = patterns[numbers < 0]
        if len(new):
            places = {key: place for place, key in enumerate(pattern_keys(new))}
            self._answer(new[list(places.values())])
            numbers[numbers < 0] = self._known.find(new)
        return numbers

    def _answer(self, patterns: IntArray) -> None:
        """Finds answers to new patterns."""
        axes = len(self.sizes)
        digits = patterns[:, 2 * axes :]
        moving = (digits[:, 0::2] >= 0) | (digits[:, 1::2] >= 0)
        masks = moving @ (1 << np.arange(axes))
        for mask in np.unique(masks).tolist():
            asked = patterns[masks == mask]
            if not mask:
                self._add(asked, np.full((len(asked), 1), -1), np.ones((len(asked), 1)))
            elif mask == (1 << axes) - 1:
                self._answer_of_all_axes(asked)
            else:
                self._from_others([a for a in range(axes) if mask >> a & 1], asked)

    def _answer_of_all_axes(self, patterns: IntArray) -> None:
        """Finds answers to new patterns in which every axis has a part.

        Where no dimension is sharded by two axes, they may be in any order in the mesh; then it is
        asked for in one of them.
        """
        axes = sorted(range(len(self.sizes)), key=lambda a: self.sizes[a])
        alone = np.zeros(len(patterns), dtype=bool)
        if axes != list(range(len(axes))):
            digits = patterns[:, 2 * len(axes) :].reshape(-1, len(axes), 2)
            alone = ~_shared_dims(digits[:, :, 0]) & ~_shared_dims(digits[:, :, 1])
        if alone.any():
            self._from_others(axes, patterns[alone])
        if not alone.all():
            self._ask_shardy(patterns[~alone])

    def _ask_shardy(self, patterns: IntArray) -> None:
        axes = len(self.sizes)
        asked: list[Pattern] = [
            (tuple(size for size in row[: 2 * axes] if size), tuple(row[2 * axes :]))
            for row in patterns.tolist()
        ]
        answers = ask_shardy(self.sizes, asked)
        rows = padded([[self._step_id(step) for step in answer.steps] for answer in answers], -1)
        self._keep(patterns, rows, padded([answer.divisors for answer in answers], 1))
        self._unsaved = True

    def _from_others(self, axes: list[int], patterns: IntArray) -> None:
        """Answers of a mesh that has only the axes with a part in a change, in some order."""
        others = changes(tuple(self.sizes[a] for a in axes))
        first = 2 * len(self.sizes)
        columns = [*range(2 * len(axes)), *(first + 2 * a + k for a in axes for k in (0, 1))]
        numbers = others._number(patterns[:, columns])
        renamed = self._renamed.setdefault(tuple(axes), [])
        names = axis_names(len(self.sizes))
        for step in others.steps[len(renamed) :]:
            refs = (
                replace(ref, name=names[axes[ascii_lowercase.index(ref.name)]]) for ref in step.axes
            )
            renamed.append(self._step_id(replace(step, axes=tuple(refs))))
        rows = np.array([*renamed, -1], dtype=np.int64)[others._rows[numbers]]
        self._add(patterns, rows, others._divisors[numbers])
        others._save()

    def _step_id(self, step: Step) -> int:
        if step not in self._step_ids:
            self._step_ids[step] = len(self.steps)
            self.steps.append(step)
            self._step_slices.append(self._slices(step))
        return self._step_ids[step]

    def _add(self, patterns: IntArray, rows: IntArray, divisors: NDArray[Any]) -> IntArray:
        """Notes answers, by the numbers of their steps and what must divide dimensions."""
        numbers = np.arange(len(self._rows), len(self._rows) + len(patterns))
        self._known.add(patterns, numbers)
        self._rows = _stacked(self._rows, rows, -1)
        self._divisors = _stacked(self._divisors, divisors, 1)
        sliced = np.array([*self._step_slices, 0], dtype=np.int64)[rows[:, 0]]
        self._sliced = np.concatenate([self._sliced, sliced])
        return numbers

    def _slices(self, step: Step) -> int:
        """A bit mask of the whole axes that a step slices over."""
        if step.kind != "all_slice":
            return 0
        shape = dict(zip(axis_names(len(self.sizes)), self.sizes, strict=True))
        return sum(1 << ascii_lowercase.index(name) for name in whole_axes(step.axes, shape))

    # -- on disk -------------------------------------------------------------------------------

    def _keep(self, patterns: IntArray, rows: IntArray, divisors: IntArray) -> None:
        """Notes answers of Shardy itself, which are to be kept on disk."""
        assert self._of_shardy is not None
        self._of_shardy.append((patterns, self._add(patterns, rows, divisors)))

    def _load(self) -> None:
        self._of_shardy = []
        stored = load_answers(self.sizes)
        if stored is not None:
            ids = np.array([*map(self._step_id, stored.steps), -1], dtype=np.int64)
            self._keep(stored.patterns, ids[stored.rows], stored.divisors)

    def _save(self) -> None:
        if not self._unsaved or self._of_shardy is None:
            return
        patterns = np.concatenate([patterns for patterns, _ in self._of_shardy])
        numbers = np.concatenate([numbers for _, numbers in self._of_shardy])
        stored = Stored(self.steps, patterns, self._rows[numbers], self._divisors[numbers])
        save_answers(self.sizes, stored)
        self._unsaved = False


def _shared_dims(digits: IntArray) -> NDArray[np.bool_]:
    """Whether two axes shard one dimension, by pattern; digits of shape (patterns, axes)."""
    ordered = np.sort(digits, axis=1)
    shared: NDArray[np.bool_] = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(
        axis=1
    )
    return shared


def _stacked(above: IntArray, below: NDArray[Any], empty: int) -> IntArray:
    """Two arrays of rows one above the other, the shorter rows filled up."""
    width = max(above.shape[1], below.shape[1])
    stacked = np.full((len(above) + len(below), width), empty, dtype=np.int64)
    stacked[: len(above), : above.shape[1]] = above
    stacked[len(above) :, : below.shape[1]] = below
    return stacked


@dataclass(frozen=True)
class _Patterns:
    """Every pair of sharding codes of one rank, pairs in the first dimension of `used` and `index`.

    Attributes:
      used: whether a dimension is sharded before or after, shape (pairs, rank).
      number: which of the used dimensions a dimension is, where it is one.
      distinct: the different patterns: for each axis the dimension that it shards before and
        after, numbered among those used.
      index: which of these each pair has.
    """

    used: NDArray[np.bool_]
    number: NDArray[np.int8]
    distinct: IntArray
    index: IntArray


@lru_cache(maxsize=64)
def _patterns(axes: int, rank: int) -> _Patterns:
    digits = sharding_digits(axes, rank)
    count = len(digits)
    before = np.broadcast_to(digits[:, None, :], (count, count, axes))
    after = np.broadcast_to(digits[None, :, :], (count, count, axes))
    pairs = np.stack([before, after], axis=-1).reshape(count * count, 2 * axes)
    used = (pairs[:, :, None] == np.arange(max(rank, 1))).any(axis=1)
    number = used.cumsum(axis=1) - 1
    rows = np.where(pairs >= 0, np.take_along_axis(number, np.maximum(pairs, 0), axis=1), -1)
    first, index = _distinct(rows)
    return _Patterns(used, np.maximum(number, 0).astype(np.int8), rows[first], index)


@lru_cache(maxsize=4096)
def _holds(sizes: tuple[int, ...], shape: Dims) -> NDArray[np.bool_]:
    """Which sharding codes leave every shard of a tensor an element."""
    digits = sharding_digits(len(sizes), len(shape))
    holds = np.ones(len(digits), dtype=bool)
    for dim, size in enumerate(shape):
        holds &= np.where(digits == dim, sizes, 1).prod(axis=1) <= size
    return holds


def _distinct(rows: IntArray) -> tuple[IntArray, IntArray]:
    """One place of each distinct row, and which of them every row is."""
    codes = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        values, position = np.unique(column, return_inverse=True)
        # Renumbered after every column, so that codes stay small.
        codes = np.unique(codes * len(values) + position, return_inverse=True)[1]
    _, first, index = np.unique(codes, return_index=True, return_inverse=True)
    return first, index
