"""Shardy's own answers to how a sharding changes into another, one pattern of change at a time.

A pattern says for each mesh axis which dimension it shards before and after; dimensions that no
axis shards have no part in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from string import ascii_lowercase

from shardwright.hardware_profiles.mesh import AxisRef
from shardwright.planner import mlir
from shardwright.planner.collectives import DimAxes, Step, parse_sharding, read_steps, shards
from shardwright.planner.mlir import ir

Dims = tuple[int, ...]
"""Sizes of the dimensions of a tensor."""

Pattern = tuple[Dims, tuple[int, ...]]
"""Sizes of the dimensions that an axis shards, in order since Shardy goes through them in order;
and for each axis which of them it shards before and after (-1: none)."""

_OPERATION = re.compile(r"= (sdy\.\w+) (.*)%(\w+) out_sharding=(.*) : ")
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
    begins: list[DimAxes] = []
    arguments, reshards = [], []
    for i, (dims, digits) in enumerate(patterns):
        before = _dim_axes(digits[0::2], names, len(dims))
        begins.append(before)
        tensor = f"tensor<{''.join(f'{size}x' for size in dims)}f32>"
        start = sharding_text(before)
        end = sharding_text(_dim_axes(digits[1::2], names, len(dims)))
        arguments.append(f"%a{i}: {tensor} {{sdy.sharding = #sdy.sharding{start}}}")
        reshards.append(f"  %r{i} = sdy.reshard %a{i} {end} : {tensor}")
    text = (
        f"{mesh_text(shape)}\nfunc.func @main({', '.join(arguments)}) {{\n"
        + "\n".join(reshards)
        + "\n  return\n}"
    )
    with mlir.new_context():
        module = mlir.parse_module(text)
        mlir.run_passes(module, mlir.RESHARDS_TO_COLLECTIVES)
        printed = str(module)
    made: list[list[tuple[str, str, str]]] = [[] for _ in patterns]
    at = -1
    for name, axes, operand, out_sharding in _OPERATION.findall(printed):
        # Each change is a chain that begins with its argument.
        at = int(operand[3:]) if operand.startswith("arg") else at
        made[at].append((name, axes, out_sharding))
    read = _AnswerReader(shape)
    return [read(steps, before) for steps, before in zip(made, begins, strict=True)]


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
