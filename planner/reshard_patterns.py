"""With which collectives Shardy changes a sharding: every pattern of change is asked once.

A pattern says for each mesh axis which dimension it shards before and after. Shardy's answer
depends on the sizes of dimensions only where one cannot hold all the axes that the answer puts on
it on the way, so that patterns are asked with large dimensions first, and with real ones where
those do not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

from shardwright.hardware_profiles.mesh import AxisRef
from shardwright.planner import mlir
from shardwright.planner.collectives import DimAxes, Step, read_steps, shards
from shardwright.planner.mlir import ir
from shardwright.planner.strategies import IntArray

_LARGE = 2**20

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


def changes(sizes: tuple[int, ...], shape: Dims) -> tuple[list[tuple[Step, ...]], IntArray]:
    """How every sharding code of a tensor becomes every other.

    Args:
      sizes: sizes of the mesh axes.
      shape: shape of the tensor.

    Returns:
      Lists of collectives; and which list each pair of codes has, shape (codes, codes). Where a
      code cuts a dimension in more parts than it has elements, the list is of a larger tensor.
    """
    patterns = _patterns(sizes, len(shape))
    answers, index = list(patterns.answers), patterns.index
    dims = np.zeros_like(patterns.rows)
    row, dim = np.nonzero(patterns.used)
    dims[row, patterns.used.cumsum(axis=1)[row, dim] - 1] = np.asarray(shape)[dim]
    holds = _holds(sizes, shape)
    uneven = (dims % patterns.divisors[index] != 0).any(axis=1)
    ask = np.flatnonzero(uneven & np.logical_and.outer(holds, holds).ravel())
    if len(ask):
        first, which = _distinct(np.concatenate([patterns.rows, dims], axis=1)[ask])
        real = [
            (tuple(d for d in dims[k].tolist() if d), tuple(patterns.rows[k].tolist()))
            for k in ask[first]
        ]
        index = index.copy()
        index[ask] = len(answers) + which
        answers += _answers(sizes, real)
    return [answer.steps for answer in answers], index.reshape(len(holds), len(holds))


@dataclass(frozen=True)
class _Patterns:
    """Every pair of sharding codes of one rank, pairs in the first dimension of all arrays.

    Attributes:
      used: whether a dimension is sharded before or after, shape (pairs, rank).
      rows: for each axis the dimension that it shards before and after, numbered among those used.
      answers: of large tensors.
      index: which answer each pair has.
      divisors: of each answer, shape (answers, dimensions used).
    """

    used: NDArray[np.bool_]
    rows: IntArray
    answers: tuple[Answer, ...]
    index: IntArray
    divisors: IntArray


@lru_cache(maxsize=256)
def _patterns(sizes: tuple[int, ...], rank: int) -> _Patterns:
    digits = sharding_digits(len(sizes), rank)
    count, axes = digits.shape
    before = np.broadcast_to(digits[:, None, :], (count, count, axes))
    after = np.broadcast_to(digits[None, :, :], (count, count, axes))
    pairs = np.stack([before, after], axis=-1).reshape(count * count, 2 * axes)
    used = (pairs[:, :, None] == np.arange(max(rank, 1))).any(axis=1)
    number = used.cumsum(axis=1) - 1
    rows = np.where(pairs >= 0, np.take_along_axis(number, np.maximum(pairs, 0), axis=1), -1)
    first, index = _distinct(rows)
    large: list[Pattern] = [
        ((_LARGE,) * (int(row.max(initial=-1)) + 1), tuple(row.tolist())) for row in rows[first]
    ]
    answers = _answers(sizes, large)
    divisors = np.ones((len(answers), 2 * axes), dtype=np.int64)
    for row, answer in enumerate(answers):
        divisors[row, : len(answer.divisors)] = answer.divisors
    return _Patterns(used, rows, tuple(answers), index, divisors)


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


def _answers(sizes: tuple[int, ...], patterns: list[Pattern]) -> list[Answer]:
    known = _known_answers(sizes)
    new = [pattern for pattern in patterns if pattern not in known]
    if new:
        known.update(zip(new, ask_shardy(sizes, new), strict=True))
    return [known[pattern] for pattern in patterns]


@lru_cache(maxsize=256)
def _known_answers(sizes: tuple[int, ...]) -> dict[Pattern, Answer]:
    """Shardy's answers so far on meshes of these sizes; `_answers` adds to them."""
    return {}


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
        functions = [f for f in module.body.operations if f.operation.name == "func.func"]
        return [
            _read_answer(function, before, shape)
            for function, before in zip(functions, begins, strict=True)
        ]


def _read_answer(function: object, sharding: DimAxes, shape: dict[str, int]) -> Answer:
    steps = []
    on_the_way = [sharding]
    *body, _terminator = mlir.walk_block(mlir.entry_block(function))
    for op in body:
        for step, sharding in read_steps(op, sharding, shape):
            steps.append(step)
            on_the_way.append(sharding)
    divisors = tuple(
        lcm(*(shards((dim,), shape) for dim in dims)) for dims in zip(*on_the_way, strict=True)
    )
    return Answer(tuple(steps), divisors)


def mesh_text(shape: dict[str, int]) -> str:
    """A mesh in Shardy's syntax."""
    axes = ", ".join(f'"{name}"={size}' for name, size in shape.items())
    return f"sdy.mesh @mesh = <[{axes}]>"


def sharding_text(sharding: DimAxes) -> str:
    """A closed sharding in Shardy's syntax: `<@mesh, [{"x"}, {}]>`."""
    dims = (", ".join(_axis_text(a) for a in dim) for dim in sharding)
    return "<@mesh, [" + ", ".join(f"{{{dim}}}" for dim in dims) + "]>"


def _axis_text(axis: AxisRef) -> str:
    part = f":({axis.pre_size}){axis.size}" if axis.size is not None else ""
    return f'"{axis.name}"{part}'


def _dim_axes(dims: tuple[int, ...], names: tuple[str, ...], rank: int) -> DimAxes:
    return tuple(
        tuple(AxisRef(name) for name, on in zip(names, dims, strict=True) if on == dim)
        for dim in range(rank)
    )
