"""With which collectives Shardy changes a sharding: every pattern of change is asked once.

A pattern says for each mesh axis which dimension it shards before and after. Shardy's answer
depends on the sizes of dimensions only where one cannot hold all the axes that the answer puts on
it on the way, so that patterns are asked with large dimensions first, and with real ones where
those do not hold. Axes that shard nothing on either side have no part in it. So answers are kept
by the sizes of the axes alone, and serve every mesh and every tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

from shardwright.hardware_profiles.mesh import AxisRef
from shardwright.planner import mlir
from shardwright.planner.collectives import (
    DimAxes,
    Step,
    parse_sharding,
    read_steps,
    shards,
    whole_axes,
)
from shardwright.planner.mlir import ir
from shardwright.planner.strategies import IntArray

_LARGE = 2**20
_OPERATION = re.compile(r"= (sdy\.\w+) (.*)%\w+ out_sharding=(.*) : ")

Dims = tuple[int, ...]
"""Sizes of the dimensions of a tensor."""

Pattern = tuple[Dims, tuple[int, ...]]
"""Sizes of the dimensions that an axis shards, in order since Shardy goes through them in order;
and for each axis which of them it shards before and after (-1: none)."""


_OUT_OF_REACH = 1e-9
"""Divisor of a step that would move a billion times the tensor."""


@dataclass(frozen=True)
class Answer:
    """How Shardy makes one pattern of change.

    Attributes:
      steps: the collectives in order; mesh axes are called a, b, c...
      divisors: for each dimension of the pattern, what must divide it for all shardings on the
        way to be even.
    """

    steps: tuple[Step, ...]
    divisors: tuple[int, ...]


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

    Attributes:
      sizes: sizes of the mesh axes.
      steps: every different collective in an answer.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.steps: list[Step] = []
        self._step_ids: dict[Step, int] = {}
        self._answers: list[Answer] = []
        self._numbers: dict[Pattern, int] = {}
        self._rows: list[tuple[int, ...]] = []
        self._sliced: list[int] = []
        self._tables: dict[Dims, IntArray] = {}
        self._large: dict[int, IntArray] = {}
        self._sliced_array = np.zeros(0, dtype=np.int64)
        self._padded = np.zeros((0, 1), dtype=np.int64)
        self._padded_divisors = np.zeros((0, 2 * len(sizes)), dtype=np.int64)

    def ask(self, wanted: Iterable[tuple[Dims, IntArray, IntArray]]) -> None:
        """Asks for changes of tensors: from each of some sharding codes to each of some others.

        All at once, since asking many things together takes little longer than asking one.
        """
        questions = [new for each in wanted if len((new := self._new_pairs(*each))[1])]
        self._ask_of_large_tensors(questions)
        uneven = [self._settle(shape, pairs) for shape, pairs in questions]
        self._number([pattern for _, real, _ in uneven for pattern in real])
        for (shape, _), (pairs, real, which) in zip(questions, uneven, strict=True):
            if real:
                numbers = np.array(self._number(real), dtype=np.int64)
                self._table(shape).ravel()[pairs] = numbers[which]

    def numbers(self, shape: Dims, before: IntArray, after: IntArray) -> IntArray:
        """Which answer tells how one sharding code of a tensor becomes another.

        Args:
          shape: shape of the tensor.
          before, after: sharding codes. Where one cuts a dimension in more parts than it has
            elements, the answer is that of a larger tensor.

        Returns:
          Numbers of answers, shape (before, after).
        """
        pick = np.ix_(before, after)
        table = self._table(shape)
        if (table[pick] < 0).any():
            self.ask([(shape, before, after)])
        return table[pick]

    def step_rows(self) -> IntArray:
        """The numbers of the steps of every answer, shape (answers, longest); -1 for none."""
        if len(self._padded) != len(self._rows):
            longest = max(1, *map(len, self._rows))
            self._padded = np.full((len(self._rows), longest), -1, dtype=np.int64)
            lengths = np.array(list(map(len, self._rows)))
            filled = np.arange(longest) < lengths[:, None]
            self._padded[filled] = [step for row in self._rows for step in row]
        return self._padded

    def sliced(self) -> IntArray:
        """A bit mask of the axes that every answer begins by slicing over, shape (answers,)."""
        if len(self._sliced_array) != len(self._sliced):
            self._sliced_array = np.array(self._sliced, dtype=np.int64)
        return self._sliced_array

    def answers(self, patterns: Sequence[Pattern]) -> list[Answer]:
        """Shardy's answers to patterns of change."""
        return [self._answers[number] for number in self._number(patterns)]

    def _table(self, shape: Dims) -> IntArray:
        """Numbers of answers by codes before and after; -1 where not asked yet."""
        if shape not in self._tables:
            codes = (len(shape) + 1) ** len(self.sizes)
            self._tables[shape] = np.full((codes, codes), -1, dtype=np.int64)
        return self._tables[shape]

    def _new_pairs(self, shape: Dims, before: IntArray, after: IntArray) -> tuple[Dims, IntArray]:
        """The pairs of codes not known yet, as places in the flat table."""
        table = self._table(shape)
        before, after = np.unique(before), np.unique(after)
        row, column = np.nonzero(table[np.ix_(before, after)] < 0)
        return shape, before[row] * len(table) + after[column]

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
            large: list[Pattern] = [
                ((_LARGE,) * (max(row, default=-1) + 1), tuple(row))
                for row in patterns.distinct[new].tolist()
            ]
            known[new] = self._number(large)

    def _settle(self, shape: Dims, pairs: IntArray) -> tuple[IntArray, list[Pattern], IntArray]:
        """Notes the answers of large tensors.

        Returns:
          The pairs that are to be asked with real dimensions, their different patterns, and which
          of these each pair has.
        """
        patterns = _patterns(len(self.sizes), len(shape))
        numbers = self._large[len(shape)][patterns.index[pairs]]
        self._table(shape).ravel()[pairs] = numbers
        used = patterns.used[pairs]
        dims = np.zeros((len(pairs), 2 * len(self.sizes)), dtype=np.int64)
        row, dim = np.nonzero(used)
        dims[row, used.cumsum(axis=1)[row, dim] - 1] = np.asarray(shape)[dim]
        uneven = (dims % self._divisors()[numbers] != 0).any(axis=1)
        holds = _holds(self.sizes, shape)
        before, after = np.divmod(pairs, len(holds))
        ask = np.flatnonzero(uneven & holds[before] & holds[after])
        if not len(ask):
            return ask, [], ask
        rows = patterns.distinct[patterns.index[pairs[ask]]]
        first, which = _distinct(np.concatenate([rows, dims[ask]], axis=1))
        real = [
            (tuple(d for d in dims[ask[k]].tolist() if d), tuple(rows[k].tolist())) for k in first
        ]
        return pairs[ask], real, which

    def _divisors(self) -> IntArray:
        """What must divide the dimensions of a tensor, shape (answers, dimensions of a pattern)."""
        if len(self._padded_divisors) != len(self._answers):
            padded = np.ones((len(self._answers), 2 * len(self.sizes)), dtype=np.int64)
            old = len(self._padded_divisors)
            padded[:old] = self._padded_divisors
            for number, answer in enumerate(self._answers[old:], start=old):
                padded[number, : len(answer.divisors)] = answer.divisors
            self._padded_divisors = padded
        return self._padded_divisors

    def _number(self, patterns: Sequence[Pattern]) -> list[int]:
        new = [pattern for pattern in patterns if pattern not in self._numbers]
        by_axes: dict[tuple[int, ...], list[Pattern]] = {}
        for pattern in dict.fromkeys(new):
            by_axes.setdefault(_moving_axes(pattern), []).append(pattern)
        for axes, asked in by_axes.items():
            if not axes:
                answers = [Answer((), ())] * len(asked)
            elif len(axes) == len(self.sizes):
                answers = ask_shardy(self.sizes, asked)
            else:
                answers = self._from_fewer_axes(axes, asked)
            for pattern, answer in zip(asked, answers, strict=True):
                self._numbers[pattern] = self._add(answer)
        return [self._numbers[pattern] for pattern in patterns]

    def _from_fewer_axes(self, axes: tuple[int, ...], patterns: Sequence[Pattern]) -> list[Answer]:
        """Answers of a mesh that has only the axes with a part in a change."""
        fewer = changes(tuple(self.sizes[a] for a in axes))
        asked = [
            (dims, tuple(d for a in axes for d in digits[2 * a : 2 * a + 2]))
            for dims, digits in patterns
        ]
        names = axis_names(len(self.sizes))
        renamed = {
            step: replace(
                step,
                axes=tuple(
                    replace(ref, name=names[axes[ascii_lowercase.index(ref.name)]])
                    for ref in step.axes
                ),
            )
            for answer in fewer.answers(asked)
            for step in answer.steps
        }
        return [
            Answer(tuple(renamed[step] for step in answer.steps), answer.divisors)
            for answer in fewer.answers(asked)
        ]

    def _add(self, answer: Answer) -> int:
        for step in answer.steps:
            if step not in self._step_ids:
                self._step_ids[step] = len(self.steps)
                self.steps.append(step)
        sliced = 0
        if answer.steps and answer.steps[0].kind == "all_slice":
            shape = dict(zip(axis_names(len(self.sizes)), self.sizes, strict=True))
            for name in whole_axes(answer.steps[0].axes, shape):
                sliced |= 1 << ascii_lowercase.index(name)
        self._answers.append(answer)
        self._rows.append(tuple(self._step_ids[step] for step in answer.steps))
        self._sliced.append(sliced)
        return len(self._answers) - 1


@dataclass(frozen=True)
class _Patterns:
    """Every pair of sharding codes of one rank, pairs in the first dimension of `used` and `index`.

    Attributes:
      used: whether a dimension is sharded before or after, shape (pairs, rank).
      distinct: the different patterns: for each axis the dimension that it shards before and
        after, numbered among those used.
      index: which of these each pair has.
    """

    used: NDArray[np.bool_]
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
    return _Patterns(used, rows[first], index)


def _moving_axes(pattern: Pattern) -> tuple[int, ...]:
    """The axes that shard something before or after."""
    digits = pattern[1]
    return tuple(a for a in range(len(digits) // 2) if digits[2 * a] >= 0 or digits[2 * a + 1] >= 0)


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


def axis_names(axes: int) -> tuple[str, ...]:
    """What the axes of a mesh are called in answers."""
    return tuple(ascii_lowercase[:axes])


def ask_shardy(sizes: tuple[int, ...], patterns: list[Pattern]) -> list[Answer]:
    """Puts patterns of change to Shardy.

    On axes whose sizes are not powers of two its pass fails on some changes. Such a change is
    priced out of reach, so that no plan has it.
    """
    try:
        return _ask_shardy(sizes, patterns)
    except ir.MLIRError:
        if len(patterns) == 1:
            every_axis = tuple(AxisRef(name) for name in axis_names(len(sizes)))
            out_of_reach = Step("all_to_all", every_axis, _OUT_OF_REACH)
            return [Answer((out_of_reach,), (1,) * len(patterns[0][0]))]
    half = len(patterns) // 2
    return ask_shardy(sizes, patterns[:half]) + ask_shardy(sizes, patterns[half:])


def _ask_shardy(sizes: tuple[int, ...], patterns: list[Pattern]) -> list[Answer]:
    names = axis_names(len(sizes))
    shape = dict(zip(names, sizes, strict=True))
    text = [mesh_text(shape)]
    begins: list[DimAxes] = []
    for i, (dims, digits) in enumerate(patterns):
        before = _dim_axes(digits[0::2], names, len(dims))
        begins.append(before)
        tensor = f"tensor<{''.join(f'{size}x' for size in dims)}f32>"
        start = sharding_text(before)
        end = sharding_text(_dim_axes(digits[1::2], names, len(dims)))
        text.append(
            f"func.func private @f{i}(%a: {tensor} {{sdy.sharding = #sdy.sharding{start}}})"
            f" -> ({tensor} {{sdy.sharding = #sdy.sharding{end}}}) {{\n"
            f"  %0 = sdy.reshard %a {end} : {tensor}\n  return %0 : {tensor}\n}}"
        )
    with mlir.new_context():
        module = mlir.parse_module("\n".join(text))
        mlir.run_passes(module, mlir.RESHARDS_TO_COLLECTIVES)
        _, *functions = str(module).split("func.func private @f")
    read = _AnswerReader(shape)
    return [
        read(_OPERATION.findall(function), before)
        for function, before in zip(functions, begins, strict=True)
    ]


@dataclass(frozen=True)
class _PrintedOp:
    """A collective as the printed module tells it."""

    name: str
    attributes: _PrintedAttributes


@dataclass(frozen=True)
class _PrintedAttributes:
    axes: str
    out_sharding: str

    def __getitem__(self, name: str) -> str:
        return self.out_sharding if name == "out_sharding" else self.axes


class _AnswerReader:
    """Reads printed collectives; those that are alike are read once."""

    def __init__(self, shape: dict[str, int]) -> None:
        self._shape = shape
        self._read: dict[tuple[str, str, str, str], tuple[tuple[Step, ...], list[Dims]]] = {}
        self._parts: dict[str, Dims] = {}

    def __call__(self, printed: Iterable[tuple[str, str, str]], before: DimAxes) -> Answer:
        now = sharding_text(before)
        if now not in self._parts:
            self._parts[now] = self._count_parts(before)
        steps: list[Step] = []
        on_the_way = [self._parts[now]]
        for name, axes, out_sharding in printed:
            key = (name, axes, out_sharding, now)
            if key not in self._read:
                op = _PrintedOp(name, _PrintedAttributes(axes, out_sharding))
                made = list(read_steps(op, parse_sharding(now), self._shape))
                parts = [self._count_parts(stop) for _, stop in made]
                self._read[key] = tuple(step for step, _ in made), parts
            made_steps, stops = self._read[key]
            steps += made_steps
            on_the_way += stops
            now = out_sharding
        divisors = tuple(lcm(*parts) for parts in zip(*on_the_way, strict=True))
        return Answer(tuple(steps), divisors)

    def _count_parts(self, sharding: DimAxes) -> Dims:
        """In how many parts each dimension is cut."""
        return tuple(shards((dim,), self._shape) for dim in sharding)


def mesh_text(shape: dict[str, int]) -> str:
    """A mesh in Shardy's syntax."""
    axes = ", ".join(f'"{name}"={size}' for name, size in shape.items())
    return f"sdy.mesh @mesh = <[{axes}]>"


@lru_cache(maxsize=1 << 16)
def sharding_text(sharding: DimAxes) -> str:
    """A closed sharding in Shardy's syntax: `<@mesh, [{"x"}, {}]>`."""
    dims = (", ".join(_axis_text(a) for a in dim) for dim in sharding)
    return "<@mesh, [" + ", ".join(f"{{{dim}}}" for dim in dims) + "]>"


def _axis_text(axis: AxisRef) -> str:
    part = f":({axis.pre_size}){axis.size}" if axis.size is not None else ""
    return f'"{axis.name}"{part}'


@lru_cache(maxsize=1 << 16)
def _dim_axes(dims: tuple[int, ...], names: tuple[str, ...], rank: int) -> DimAxes:
    return tuple(
        tuple(AxisRef(name) for name, on in zip(names, dims, strict=True) if on == dim)
        for dim in range(rank)
    )
