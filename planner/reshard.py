"""What it costs to change a tensor's sharding.

Shardy decides with which collectives (see `reshard_patterns`); prices come from the cost model of
the slice's torus.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models.collectives import Collective, compiled_collective
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.collectives import Step, compiled_step, whole_axes
from shardwright.planner.reshard_patterns import Dims, axis_names, changes, sharding_digits
from shardwright.planner.strategies import IntArray

FloatArray = NDArray[np.float64]
_REDUCTIONS: tuple[Collective, Collective] = ("all_reduce", "reduce_scatter")


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
        self._routes: dict[Dims, _Routes] = {}
        self._seconds: dict[float, tuple[FloatArray, FloatArray]] = {}
        self._tables: dict[tuple[Dims, float], tuple[FloatArray, FloatArray]] = {}
        self._partial: dict[tuple[Dims, float, int], FloatArray] = {}

    def tables(self, shape: Dims, nbytes: float) -> tuple[FloatArray, FloatArray]:
        """Seconds from every sharding code to every other.

        Args:
          shape: shape of the tensor.
          nbytes: size of the whole tensor.

        Returns:
          Two tables of shape (codes, codes): seconds of the all-gathers that the compiler runs
          asynchronously, and of all the rest.
        """
        key = (shape, nbytes)
        if key not in self._tables:
            routes = self._routes_of(shape)
            gathers, rest = self._step_seconds(nbytes)
            self._tables[key] = (
                gathers[routes.steps].sum(axis=-1),
                rest[routes.steps].sum(axis=-1),
            )
        return self._tables[key]

    def partial_table(self, shape: Dims, nbytes: float, mask: int) -> FloatArray:
        """Extra seconds where the tensor starts as partial sums over the axes in `mask`.

        An all-reduce, or a reduce-scatter where the change then slices over all those axes.
        Shape (codes, codes).
        """
        key = (shape, nbytes, mask)
        if key not in self._partial:
            routes = self._routes_of(shape)
            axes = tuple(AxisRef(n) for a, n in enumerate(self._axis_names) if mask >> a & 1)
            sizes, inverse = np.unique(nbytes / routes.shards, return_inverse=True)
            reduce, scatter = (
                np.array([compiled_collective(kind, n, axes, self.mesh)[1] for n in sizes])[inverse]
                for kind in _REDUCTIONS
            )
            scatters = (routes.sliced & mask) == mask
            self._partial[key] = np.where(scatters, scatter[:, None], reduce[:, None])
        return self._partial[key]

    def steps_between(self, shape: Dims, before: int, after: int) -> tuple[Step, ...]:
        """The collectives that change one sharding code of a tensor to another."""
        ids = self._routes_of(shape).steps[before, after]
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

    def _routes_of(self, shape: Dims) -> _Routes:
        if shape not in self._routes:
            self._routes[shape] = self._find_routes(shape)
        return self._routes[shape]

    def _find_routes(self, shape: Dims) -> _Routes:
        lists, index = changes(self._sizes, shape)
        answers = [self._named(steps) for steps in lists]
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
                for name in whole_axes(steps[0].axes, self.mesh.shape):
                    sliced[row] |= 1 << self._axis_names.index(name)
        digits = sharding_digits(len(self._sizes), len(shape))
        shards = np.where(digits >= 0, self._sizes, 1).prod(axis=1)
        return _Routes(ids[index], sliced[index], shards.astype(np.float64))

    def _named(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Collectives of a pattern with the names of this mesh's axes."""
        names = dict(zip(axis_names(len(self._sizes)), self._axis_names, strict=True))
        return tuple(
            replace(step, axes=tuple(replace(a, name=names[a.name]) for a in step.axes))
            for step in steps
        )


class _Routes:
    """How every sharding code of one shape becomes every other."""

    def __init__(self, steps: IntArray, sliced: IntArray, shards: FloatArray) -> None:
        self.steps = steps
        self.sliced = sliced
        self.shards = shards
