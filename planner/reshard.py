"""What it costs to change a tensor's sharding.

Shardy decides with which collectives (see `reshard_patterns`); prices come from the cost model of
the slice's torus.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models.collectives import (
    Collective,
    collective_seconds,
    compiled_collective,
    lowered_collective,
    splits_lane_tiles,
)
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.collectives import Step
from shardwright.planner.reshard_answers import Dims, axis_names
from shardwright.planner.reshard_patterns import Changes, changes, sharding_digits
from shardwright.planner.strategies import IntArray

FloatArray = NDArray[np.float64]
_REDUCTIONS: tuple[Collective, Collective] = ("all_reduce", "reduce_scatter")


class ReshardCosts:
    """Seconds to change shardings on one mesh, as tables over sharding codes."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self._axis_names = tuple(mesh.shape)
        self._sizes = tuple(mesh.shape.values())
        self._changes: Changes = changes(self._sizes)
        self._steps: list[Step] = []
        self._by_step: dict[float, FloatArray] = {}
        self._seconds: dict[float, FloatArray] = {}
        self._reduction_s: dict[tuple[Collective, float, tuple[AxisRef, ...]], float] = {}
        self._reduced: dict[tuple[object, ...], FloatArray] = {}

    def ask(
        self, wanted: Iterable[tuple[Dims, IntArray, IntArray]], tensors: Iterable[float] = ()
    ) -> None:
        """Prepares for changes of tensors from each of some sharding codes to each of others.

        Args:
          wanted: shapes, and sharding codes before and after.
          tensors: bytes of the tensors, where they are known already.
        """
        self._changes.ask(wanted)
        self._step_seconds(dict.fromkeys(tensors))

    def seconds(
        self, shape: Dims, nbytes: float, before: IntArray, after: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds from each of some sharding codes to each of some others.

        Args:
          shape: shape of the tensor.
          nbytes: size of the whole tensor.
          before, after: sharding codes.

        Returns:
          Two tables of shape (before, after): seconds of the all-gathers that the compiler runs
          asynchronously, and of all the rest.
        """
        numbers = self._changes.numbers(shape, before, after)
        gathers, rest = self._answer_seconds(nbytes, numbers)
        return gathers[numbers], rest[numbers]

    def partial_seconds(
        self, shape: Dims, nbytes: float, mask: int, before: IntArray, after: IntArray
    ) -> FloatArray:
        """Extra seconds where the tensor starts as partial sums over the axes in `mask`.

        An all-reduce, or a reduce-scatter where the change then slices over all those axes.
        Shape (before, after).
        """
        axes = tuple(AxisRef(n) for a, n in enumerate(self._axis_names) if mask >> a & 1)
        reduce, scatter = (self._reductions(kind, shape, nbytes, axes) for kind in _REDUCTIONS)
        numbers = self._changes.numbers(shape, before, after)
        scatters = (self._changes.sliced()[numbers] & mask) == mask
        scatters &= ~self._splits_tiles(shape, nbytes, mask)[after]
        return np.where(scatters, scatter[before, None], reduce[before, None])

    def _splits_tiles(self, shape: Dims, nbytes: float, mask: int) -> NDArray[np.bool_]:
        """Whether a scatter over the axes in `mask` becomes an all-reduce, by sharding code."""
        digits = sharding_digits(len(self._sizes), len(shape))
        if not shape:
            return np.zeros(len(digits), dtype=bool)
        last = digits == len(shape) - 1
        width = np.ceil(shape[-1] / np.where(last, self._sizes, 1).prod(axis=1))
        scattered = [a for a in range(len(self._sizes)) if mask >> a & 1]
        splits = splits_lane_tiles(width, nbytes / prod(shape), self.mesh.slice.chip)
        return splits & last[:, scattered].any(axis=1)

    def _reductions(
        self, kind: Collective, shape: Dims, nbytes: float, axes: tuple[AxisRef, ...]
    ) -> FloatArray:
        """Seconds to add up partial sums, by the sharding code of the tensor."""
        key = (kind, shape, nbytes, axes)
        if key not in self._reduced:
            digits = sharding_digits(len(self._sizes), len(shape))
            shards = np.where(digits >= 0, self._sizes, 1).prod(axis=1)
            sizes, inverse = np.unique(nbytes / shards, return_inverse=True)
            seconds = [self._reduction(kind, size, axes) for size in sizes.tolist()]
            self._reduced[key] = np.array(seconds)[inverse]
        return self._reduced[key]

    def _reduction(self, kind: Collective, nbytes: float, axes: tuple[AxisRef, ...]) -> float:
        key = (kind, nbytes, axes)
        if key not in self._reduction_s:
            self._reduction_s[key] = compiled_collective(kind, nbytes, axes, self.mesh)[1]
        return self._reduction_s[key]

    def steps_between(self, shape: Dims, before: int, after: int) -> tuple[Step, ...]:
        """The collectives that change one sharding code of a tensor to another."""
        number = self._changes.numbers(shape, np.array([before]), np.array([after]))[0, 0]
        ids = self._changes.step_rows()[number].tolist()
        self._name_steps()
        return tuple(self._steps[i] for i in ids if i >= 0)

    def _answer_seconds(self, nbytes: float, numbers: IntArray) -> tuple[FloatArray, FloatArray]:
        """Seconds of the answers in `numbers`, asynchronous gathers and the rest apart.

        Each by the number of the answer; NaN for answers that were not asked for yet.
        """
        rows = self._changes.step_rows()
        known = self._seconds.get(nbytes, np.zeros((2, 0)))
        if known.shape[1] < len(rows):
            unknown = np.full((2, len(rows) - known.shape[1]), np.nan)
            known = self._seconds[nbytes] = np.concatenate([known, unknown], axis=1)
        wanted = np.zeros(len(rows), dtype=bool)
        wanted[numbers] = True
        new = np.flatnonzero(wanted & np.isnan(known[0]))
        if len(new):
            by_step = self._step_seconds([nbytes])[nbytes]
            known[:, new] = 0.0
            for column in rows[new].T:
                known[:, new] += by_step[:, column]
        gathers, rest = known
        return gathers, rest

    def _step_seconds(self, tensors: Iterable[float]) -> dict[float, FloatArray]:
        """Seconds of every known step for tensors of some bytes; gathers, and the rest.

        Each array ends with a 0 that stands for no step. All tensors at once take little longer
        than one.
        """
        self._name_steps()
        count = len(self._steps) + 1
        new = [n for n in tensors if n not in self._by_step or self._by_step[n].shape[1] < count]
        if not new:
            return self._by_step
        gathers, rest = np.zeros((2, len(new), count))
        alike: dict[tuple[Collective, tuple[AxisRef, ...]], list[int]] = {}
        for i, step in enumerate(self._steps):
            if step.kind != "all_slice":
                alike.setdefault((step.kind, step.axes), []).append(i)
        divisors = np.array([step.divisor for step in self._steps])
        for (kind, axes), ids in alike.items():
            sizes = np.array(new)[:, None] / divisors[ids]
            for made, where in self._lowered(kind, axes, sizes):
                seconds = collective_seconds(made, sizes, axes, self.mesh)
                into = gathers if made == "all_gather" else rest
                into[:, ids] = np.where(where, seconds, into[:, ids])
        self._by_step.update(zip(new, np.stack([gathers, rest], axis=1), strict=True))
        return self._by_step

    def _lowered(
        self, kind: Collective, axes: tuple[AxisRef, ...], sizes: FloatArray
    ) -> list[tuple[Collective, NDArray[np.bool_]]]:
        """What the compiler makes of a collective, and for which of some sizes it does."""
        small = lowered_collective(kind, 0.0, axes, self.mesh)
        if small == lowered_collective(kind, np.inf, axes, self.mesh):
            return [(small, np.ones(sizes.shape, dtype=bool))]
        made = [lowered_collective(kind, n, axes, self.mesh) for n in sizes.ravel().tolist()]
        as_is = np.array([m == kind for m in made]).reshape(sizes.shape)
        return [(kind, as_is), (small, ~as_is)]

    def _name_steps(self) -> None:
        """Gives the steps that became known the names of this mesh's axes."""
        names = dict(zip(axis_names(len(self._sizes)), self._axis_names, strict=True))
        for step in self._changes.steps[len(self._steps) :]:
            axes = tuple(replace(axis, name=names[axis.name]) for axis in step.axes)
            self._steps.append(replace(step, axes=axes))
