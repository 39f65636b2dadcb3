"""What it costs to change a tensor's sharding.

Shardy decides with which collectives: every pattern of change is put to its pass once, and the
answer holds for tensors of any size. Prices come from the cost model of the slice's torus.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models.collectives import Collective, compiled_collective
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner import mlir
from shardwright.planner.collectives import DimAxes, Step, compiled_step, read_step
from shardwright.planner.strategies import IntArray

FloatArray = NDArray[np.float64]
_LARGE_DIM = 2**20
"""Dimensions of the tensors that patterns are tried on: every axis divides them."""

_REDUCTIONS: tuple[Collective, Collective] = ("all_reduce", "reduce_scatter")

Pattern = tuple[int, ...]
"""For each axis the dimension it shards before and after (-1: none); dimensions that no axis
shards are left out, the others keep their order, since Shardy goes through them in order."""


class ReshardCosts:
    """Seconds to change shardings on one mesh, as tables over sharding codes.

    Tables are kept, since a program has few tensor sizes and many edges.
    """

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self._axis_names = tuple(mesh.shape)
        self._sizes = tuple(mesh.shape.values())
        self._steps: list[Step] = []
        self._step_ids: dict[Step, int] = {}
        self._routes: dict[int, _Routes] = {}
        self._seconds: dict[float, tuple[FloatArray, FloatArray]] = {}
        self._tables: dict[tuple[int, float], tuple[FloatArray, FloatArray]] = {}
        self._partial: dict[tuple[int, float, int], FloatArray] = {}

    def tables(self, rank: int, nbytes: float) -> tuple[FloatArray, FloatArray]:
        """Seconds from every sharding code to every other.

        Args:
          rank: rank of the tensor.
          nbytes: size of the whole tensor.

        Returns:
          Two tables of shape (codes, codes): seconds of the all-gathers that the compiler runs
          asynchronously, and of all the rest.
        """
        key = (rank, nbytes)
        if key not in self._tables:
            routes = self._routes_of(rank)
            gathers, rest = self._step_seconds(nbytes)
            self._tables[key] = (
                gathers[routes.steps].sum(axis=-1),
                rest[routes.steps].sum(axis=-1),
            )
        return self._tables[key]

    def partial_table(self, rank: int, nbytes: float, mask: int) -> FloatArray:
        """Extra seconds where the tensor starts as partial sums over the axes in `mask`.

        An all-reduce, or a reduce-scatter where the change then slices over all those axes.
        Shape (codes, codes).
        """
        key = (rank, nbytes, mask)
        if key not in self._partial:
            routes = self._routes_of(rank)
            axes = tuple(AxisRef(n) for a, n in enumerate(self._axis_names) if mask >> a & 1)
            sizes, inverse = np.unique(nbytes / routes.shards, return_inverse=True)
            reduce, scatter = (
                np.array([compiled_collective(kind, n, axes, self.mesh)[1] for n in sizes])[inverse]
                for kind in _REDUCTIONS
            )
            scatters = (routes.sliced & mask) == mask
            self._partial[key] = np.where(scatters, scatter[:, None], reduce[:, None])
        return self._partial[key]

    def steps_between(self, rank: int, before: int, after: int) -> tuple[Step, ...]:
        """The collectives that change one sharding code to another."""
        ids = self._routes_of(rank).steps[before, after]
        return tuple(self._steps[i] for i in ids if i >= 0)

    def _step_seconds(self, nbytes: float) -> tuple[FloatArray, FloatArray]:
        """Seconds of every known step, asynchronous gathers and the rest apart.

        Each array ends with a 0 that stands for no step.
        """
        known = self._seconds.get(nbytes)
        if known is None or len(known[0]) != len(self._steps) + 1:
            gathers, rest = np.zeros((2, len(self._steps) + 1))
            for i, step in enumerate(self._steps):
                kind, seconds = compiled_step(step, nbytes, self.mesh)
                (gathers if kind == "all_gather" else rest)[i] = seconds
            known = self._seconds[nbytes] = (gathers, rest)
        return known

    def _routes_of(self, rank: int) -> _Routes:
        if rank not in self._routes:
            self._routes[rank] = self._find_routes(rank)
        return self._routes[rank]

    def _find_routes(self, rank: int) -> _Routes:
        axes = len(self._sizes)
        count = (rank + 1) ** axes
        digits = np.arange(count)[:, None] // (rank + 1) ** np.arange(axes) % (rank + 1) - 1
        patterns, index = _patterns(digits)
        answers = ask_shardy(self._axis_names, self._sizes, tuple(map(tuple, patterns.tolist())))
        longest = max(map(len, answers), default=0)
        ids = np.full((len(answers), max(longest, 1)), -1, dtype=np.int64)
        sliced = np.zeros(len(answers), dtype=np.int64)
        for row, steps in enumerate(answers):
            for column, step in enumerate(steps):
                if step not in self._step_ids:
                    self._step_ids[step] = len(self._steps)
                    self._steps.append(step)
                ids[row, column] = self._step_ids[step]
            if steps and steps[0].kind == "all_slice":
                for axis in steps[0].axes:
                    sliced[row] |= 1 << self._axis_names.index(axis.name)
        shards = np.where(digits >= 0, self._sizes, 1).prod(axis=1)
        return _Routes(ids[index], sliced[index], shards.astype(np.float64))


class _Routes:
    """How every sharding code of one rank becomes every other."""

    def __init__(self, steps: IntArray, sliced: IntArray, shards: FloatArray) -> None:
        self.steps = steps
        self.sliced = sliced
        self.shards = shards


def _patterns(digits: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct patterns of change between shardings, and which one each pair has."""
    count, axes = digits.shape
    before = np.broadcast_to(digits[:, None, :], (count, count, axes))
    after = np.broadcast_to(digits[None, :, :], (count, count, axes))
    pairs = np.stack([before, after], axis=-1).reshape(count * count, 2 * axes)
    used = (pairs[:, :, None] == np.arange(digits.max(initial=0) + 1)).any(axis=1)
    number = used.cumsum(axis=1) - 1
    renamed = np.where(pairs >= 0, np.take_along_axis(number, np.maximum(pairs, 0), axis=1), -1)
    digits_base = 2 * axes + 1
    numbers = ((renamed + 1) * digits_base ** np.arange(2 * axes)).sum(axis=1)
    _, first, index = np.unique(numbers, return_index=True, return_inverse=True)
    return renamed[first], index.reshape(count, count)


@lru_cache(maxsize=256)
def ask_shardy(
    names: tuple[str, ...], sizes: tuple[int, ...], patterns: tuple[Pattern, ...]
) -> tuple[tuple[Step, ...], ...]:
    """The collectives with which Shardy makes each pattern of change, in order."""
    shape = dict(zip(names, sizes, strict=True))
    text = [mesh_text(shape)]
    changes: list[tuple[DimAxes, DimAxes]] = []
    for i, pattern in enumerate(patterns):
        rank = max(pattern, default=-1) + 1
        before = _dim_axes(pattern[0::2], names, rank)
        after = _dim_axes(pattern[1::2], names, rank)
        changes.append((before, after))
        tensor = f"tensor<{''.join(f'{_LARGE_DIM}x' for _ in range(rank))}f32>"
        start, end = sharding_text(before), sharding_text(after)
        text.append(
            f"func.func private @f{i}(%a: {tensor} {{sdy.sharding = #sdy.sharding{start}}})"
            f" -> ({tensor} {{sdy.sharding = #sdy.sharding{end}}}) {{\n"
            f"  %0 = sdy.reshard %a {end} : {tensor}\n  return %0 : {tensor}\n}}"
        )
    answers = []
    with mlir.new_context():
        module = mlir.parse_module("\n".join(text))
        mlir.run_passes(module, mlir.RESHARDS_TO_COLLECTIVES)
        functions = [f for f in module.body.operations if f.operation.name == "func.func"]
        for function, (sharding, _) in zip(functions, changes, strict=True):
            steps = []
            *body, _terminator = mlir.walk_block(mlir.entry_block(function))
            for op in body:
                step, sharding = read_step(op, sharding, shape)
                steps.append(step)
            answers.append(tuple(steps))
    return tuple(answers)


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


def _dim_axes(dims: Pattern, names: tuple[str, ...], rank: int) -> DimAxes:
    return tuple(
        tuple(AxisRef(name) for name, on in zip(names, dims, strict=True) if on == dim)
        for dim in range(rank)
    )
