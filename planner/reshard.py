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
        self._seconds: dict[float, tuple[FloatArray, FloatArray]] = {}
        self._reduced: dict[tuple[object, ...], FloatArray] = {}

    def ask(self, wanted: Iterable[tuple[Dims, IntArray, IntArray]]) -> None:
        """Prepares for changes of tensors from each of some sharding codes to each of others."""
        self._changes.ask(wanted)

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
        gathers, rest = self._answer_seconds(nbytes)
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
        return np.where(scatters, scatter[before, None], reduce[before, None])

    def _reductions(
        self, kind: Collective, shape: Dims, nbytes: float, axes: tuple[AxisRef, ...]
    ) -> FloatArray:
        """Seconds to add up partial sums, by the sharding code of the tensor."""
        key = (kind, shape, nbytes, axes)
        if key not in self._reduced:
            digits = sharding_digits(len(self._sizes), len(shape))
            shards = np.where(digits >= 0, self._sizes, 1).prod(axis=1)
            sizes, inverse = np.unique(nbytes / shards, return_inverse=True)
            seconds = [compiled_collective(kind, n, axes, self.mesh)[1] for n in sizes]
            self._reduced[key] = np.array(seconds)[inverse]
        return self._reduced[key]

    def steps_between(self, shape: Dims, before: int, after: int) -> tuple[Step, ...]:
        """The collectives that change one sharding code of a tensor to another."""
        number = self._changes.numbers(shape, np.array([before]), np.array([after]))[0, 0]
        ids = self._changes.step_rows()[number].tolist()
        self._name_steps()
        return tuple(self._steps[i] for i in ids if i >= 0)

    def _answer_seconds(self, nbytes: float) -> tuple[FloatArray, FloatArray]:
        """Seconds of every known answer, asynchronous gathers and the rest apart."""
        rows = self._changes.step_rows()
        known = self._seconds.get(nbytes)
        if known is None or len(known[0]) != len(rows):
            gathers, rest = self._step_seconds(nbytes)
            known = gathers[rows].sum(axis=1), rest[rows].sum(axis=1)
            self._seconds[nbytes] = known
        return known

    def _step_seconds(self, nbytes: float) -> tuple[FloatArray, FloatArray]:
        """Seconds of every known step; each array ends with a 0 that stands for no step."""
        self._name_steps()
        gathers, rest = np.zeros((2, len(self._steps) + 1))
        alike: dict[tuple[Collective, tuple[AxisRef, ...]], list[int]] = {}
        for i, step in enumerate(self._steps):
            if step.kind != "all_slice":
                alike.setdefault((step.kind, step.axes), []).append(i)
        divisors = np.array([step.divisor for step in self._steps])
        devices = self.mesh.slice.devices
        for (kind, axes), ids in alike.items():
            sizes = nbytes / divisors[ids]
            if prod(segment.size for segment in self.mesh.segments(axes)) < devices:
                # Over part of the mesh the compiler keeps the kind.
                seconds = collective_seconds(kind, sizes, axes, self.mesh)
                (gathers if kind == "all_gather" else rest)[ids] = seconds
                continue
            for i, size in zip(ids, sizes.tolist(), strict=True):
                made = lowered_collective(kind, size, axes, self.mesh)
                seconds_of_one = collective_seconds(made, size, axes, self.mesh)
                (gathers if made == "all_gather" else rest)[i] = seconds_of_one
        return gathers, rest

    def _name_steps(self) -> None:
        """Gives the steps that became known the names of this mesh's axes."""
        names = dict(zip(axis_names(len(self._sizes)), self._axis_names, strict=True))
        for step in self._changes.steps[len(self._steps) :]:
            axes = tuple(replace(axis, name=names[axis.name]) for axis in step.axes)
            self._steps.append(replace(step, axes=axes))
