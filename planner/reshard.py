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
    lowered_collective,
    splits_lane_tiles,
)
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.collectives import Step
from shardwright.planner.reshard_answers import Dims, axis_names
from shardwright.planner.reshard_kernels import add_steps, pick_reductions
from shardwright.planner.reshard_patterns import Changes, changes, sharding_digits
from shardwright.planner.strategies import IntArray

FloatArray = NDArray[np.float64]


class ReshardCosts:
    """Seconds to change shardings on one mesh, as tables over sharding codes."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self._axis_names = tuple(mesh.shape)
        self._sizes = tuple(mesh.shape.values())
        self._changes: Changes = changes(self._sizes)
        self._steps: list[Step] = []
        self._by_step: dict[float, FloatArray] = {}
        self._reduced: dict[tuple[Collective, int], dict[float, FloatArray]] = {}
        self._splits: dict[tuple[int, int, float, int], NDArray[np.bool_]] = {}

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
        answers = self._changes.answers(shape, before, after)
        by_step = self._step_seconds([nbytes])[nbytes]
        gathers, rest = np.zeros((2, len(before), len(after)))
        add_steps(answers, before, after, self._changes.step_rows(), by_step, gathers, rest)
        return gathers, rest

    def partial_seconds(
        self, shape: Dims, nbytes: float, masks: IntArray, before: IntArray, after: IntArray
    ) -> FloatArray:
        """Extra seconds where the tensor starts as partial sums over mesh axes.

        An all-reduce, or a reduce-scatter where the change then slices over all those axes.

        Args:
          masks: bit masks of the axes, one for each code before; 0 for none.

        Returns: seconds, shape (before, after).
        """
        extra = np.zeros((len(before), len(after)))
        digits = sharding_digits(len(self._sizes), len(shape))[before]
        shards = (digits >= 0) @ (1 << np.arange(len(self._sizes)))
        splits = np.zeros((1 << len(self._sizes), (len(shape) + 1) ** len(self._sizes)), dtype=bool)
        reduce, scatter = np.zeros((2, len(before)))
        for mask in np.unique(masks[masks > 0]).tolist():
            at = masks == mask
            reduce[at] = self._reductions("all_reduce", mask, nbytes)[shards[at]]
            scatter[at] = self._reductions("reduce_scatter", mask, nbytes)[shards[at]]
            splits[mask] = self._splits_tiles(shape, nbytes, mask)
        answers, sliced = self._changes.answers(shape, before, after), self._changes.sliced()
        pick_reductions(answers, before, after, sliced, masks, reduce, scatter, splits, extra)
        return extra

    def _splits_tiles(self, shape: Dims, nbytes: float, mask: int) -> NDArray[np.bool_]:
        """Whether a scatter over the axes in `mask` becomes an all-reduce, by sharding code."""
        axes = range(len(self._sizes))
        digits = sharding_digits(len(axes), len(shape))
        if not shape:
            return np.zeros(len(digits), dtype=bool)
        itemsize = nbytes / prod(shape)
        key = (len(shape), shape[-1], itemsize, mask)
        if key not in self._splits:
            last = digits == len(shape) - 1
            width = np.ceil(shape[-1] / np.where(last, self._sizes, 1).prod(axis=1))
            splits = splits_lane_tiles(width, itemsize, self.mesh.slice.chip)
            self._splits[key] = splits & last[:, [a for a in axes if mask >> a & 1]].any(axis=1)
        return self._splits[key]

    def _reductions(self, kind: Collective, mask: int, nbytes: float) -> FloatArray:
        """Seconds to add up partial sums over the axes in `mask`, by the mask of axes that cut.

        All tensors at once take little longer than one.
        """
        key = (kind, mask)
        if nbytes not in self._reduced.get(key, {}):
            axes = tuple(AxisRef(n) for a, n in enumerate(self._axis_names) if mask >> a & 1)
            cuts = np.arange(1 << len(self._sizes))[:, None] >> np.arange(len(self._sizes)) & 1
            tensors = list(dict.fromkeys([*self._by_step, nbytes]))
            sizes = np.array(tensors)[:, None] / np.where(cuts, self._sizes, 1).prod(axis=1)
            seconds = np.zeros(sizes.shape)
            for _, where, took in self._compiled(kind, axes, sizes):
                seconds = np.where(where, took, seconds)
            self._reduced[key] = dict(zip(tensors, seconds, strict=True))
        return self._reduced[key][nbytes]

    def steps_between(self, shape: Dims, before: int, after: int) -> tuple[Step, ...]:
        """The collectives that change one sharding code of a tensor to another."""
        number = self._changes.numbers(shape, np.array([before]), np.array([after]))[0, 0]
        ids = self._changes.step_rows()[number].tolist()
        self._name_steps()
        return tuple(self._steps[i] for i in ids if i >= 0)

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
            for made, where, seconds in self._compiled(kind, axes, sizes):
                into = gathers if made == "all_gather" else rest
                into[:, ids] = np.where(where, seconds, into[:, ids])
        self._by_step.update(zip(new, np.stack([gathers, rest], axis=1), strict=True))
        return self._by_step

    def _compiled(
        self, kind: Collective, axes: tuple[AxisRef, ...], sizes: FloatArray
    ) -> list[tuple[Collective, NDArray[np.bool_], FloatArray]]:
        """What the compiler makes of a collective, for which of some sizes it does, and seconds."""
        small = lowered_collective(kind, 0.0, axes, self.mesh)
        seconds = collective_seconds(small, sizes, axes, self.mesh)
        if small == lowered_collective(kind, np.inf, axes, self.mesh):
            return [(small, np.ones(sizes.shape, dtype=bool), seconds)]
        made = [lowered_collective(kind, n, axes, self.mesh) for n in sizes.ravel().tolist()]
        as_is = np.array([m == kind for m in made]).reshape(sizes.shape)
        return [
            (kind, as_is, collective_seconds(kind, sizes, axes, self.mesh)),
            (small, ~as_is, seconds),
        ]

    def _name_steps(self) -> None:
        """Gives the steps that became known the names of this mesh's axes."""
        if len(self._steps) == len(self._changes.steps):
            return
        names = dict(zip(axis_names(len(self._sizes)), self._axis_names, strict=True))
        for step in self._changes.steps[len(self._steps) :]:
            axes = tuple(replace(axis, name=names[axis.name]) for axis in step.axes)
            self._steps.append(replace(step, axes=axes))
