"""Step 3: the sharding problem of a program on one logical mesh.

Every node of the program gets its strategies with their compute seconds; every value that runs
between nodes gets an edge whose table prices the reshard from the produced to the demanded
sharding. Where several nodes demand one value, a copy node stands between: the value is
resharded to the copy once, and each reader reshards from there if it still has to.

What is alike in the program (see `skeleton`) is priced once and shares its arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models.memory import Buffer, PeakMemory, peak_memory
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.collectives import DimAxes
from shardwright.planner.feeding import Feeding
from shardwright.planner.holds import Copy
from shardwright.planner.nodes import NodeGraph
from shardwright.planner.rules import DimFactors
from shardwright.planner.solver import Edge, MemoryTerm, Problem
from shardwright.planner.strategies import (
    Allowed,
    IntArray,
)

FloatArray = NDArray[np.float64]
Fixed = Mapping[int, Allowed]
"""Node id -> what its strategies may be, where something is given."""


LEAST_WEIGHT = 1e-3
"""Of gathers against the compute that they hide behind: among plans of equal steps, that with less
to gather is taken, and a bound of the integer program is at most this much below the step."""


@dataclass(frozen=True)
class Transfer:
    """Seconds to bring a value from one node's sharding to another's, for the whole program.

    Attributes:
      gathers: seconds of all-gathers that can run ahead of their use and hide behind compute.
      exposed: seconds of everything else.
      loop: the loop behind whose compute they hide, or -1 for the program outside loops.
      compute: seconds that kernels of the loop take longer for how the value comes.
    """

    a: int
    b: int
    gathers: FloatArray | None
    exposed: FloatArray
    loop: int = -1
    compute: FloatArray | None = None


@dataclass(frozen=True)
class ShardingProblem:
    """Strategies and costs of a program on one mesh, before they are weighed together.

    Attributes:
      alike: for every node a class of nodes that choose alike (see `repeats`), or None.
      layout_names: logical names whose nodes come last (see `named_layout`).
      feeding: what feeding arguments counts; it hides behind the step and is no part of it.
    """

    mesh: LogicalMesh
    node_graph: NodeGraph = field(repr=False)
    strategies: tuple[IntArray, ...] = field(repr=False)
    copies: tuple[Copy, ...] = field(repr=False)
    compute: tuple[FloatArray, ...] = field(repr=False)
    exposed: tuple[FloatArray, ...] = field(repr=False)
    transfers: tuple[Transfer, ...] = field(repr=False)
    memory: tuple[MemoryTerm, ...] = field(repr=False)
    loop_of: tuple[int, ...] = field(repr=False)
    alike: tuple[int, ...] | None = field(default=None, repr=False)
    layout_names: tuple[str, ...] = ()
    feeding: Feeding = field(default_factory=Feeding, repr=False)

    def weighed(self, hiding: float | Mapping[int, float], memory_limit: float | None) -> Problem:
        """The integer program for one weight of what hides against what it hides behind.

        In a loop, or outside of all loops, a step takes max(compute, gathers) + exposed seconds.
        For any weights in [0, 1], (1 - weight) * compute + weight * gathers + exposed is a lower
        bound of that, and for the right weights its optimum is the best step (Lagrangian duality).

        Args:
          hiding: the weight, or one for each loop (-1: outside of loops).
          memory_limit: bytes of one device that the program may use.
        """

        def weight(loop: int) -> float:
            return hiding[loop] if isinstance(hiding, Mapping) else hiding

        share = _Shared()
        costs = [
            share.node(compute, exposed, rows, weight(loop))
            for compute, exposed, rows, loop in zip(
                self.compute, self.exposed, self.strategies, self.loop_of, strict=True
            )
        ]
        for node, seconds in self.feeding.seconds.items():
            costs[node] = costs[node] + seconds
        edges = [Edge(t.a, t.b, share.edge(t, weight(t.loop))) for t in self.transfers]
        names = [node.label for node in self.node_graph.nodes]
        names += [f"copy of value {copy.value}" for copy in self.copies]
        names += [f"mesh axes of {name}" for name in self.layout_names]
        return Problem(
            costs=tuple(costs),
            edges=tuple(edges),
            memory=self.memory,
            memory_limit=memory_limit,
            names=tuple(names),
        )

    def exposing(self, share: float) -> ShardingProblem:
        """The same problem where a part of every gather that can hide is exposed after all.

        What a schedule hides depends on where a gather stands; the integer program does not know.
        """
        return replace(
            self,
            transfers=tuple(
                t
                if t.gathers is None
                else replace(
                    t, gathers=(1.0 - share) * t.gathers, exposed=t.exposed + share * t.gathers
                )
                for t in self.transfers
            ),
        )

    def peak_memory(self, choices: Sequence[int]) -> PeakMemory:
        """The memory of a choice of strategies as the integer program counts it."""
        names = [node.label for node in self.node_graph.nodes]
        names += ["a gathered copy"] * len(self.copies)
        return peak_memory(
            [
                Buffer(names[m.node], m.start, m.end, float(m.usage[choices[m.node]]))
                for m in self.memory
            ]
        )

    def seconds(self, choices: Sequence[int]) -> tuple[float, float, float]:
        """Compute, gather and exposed seconds of a choice of strategies."""
        compute, gathers, exposed = self.seconds_by_loop(choices)
        return sum(compute.values()), sum(gathers.values()), exposed

    def seconds_by_loop(
        self, choices: Sequence[int]
    ) -> tuple[dict[int, float], dict[int, float], float]:
        """Compute and gather seconds by loop (-1: outside of loops), and all exposed seconds."""
        compute: dict[int, float] = {}
        gathers: dict[int, float] = {}
        exposed = 0.0
        for choice, c, e, loop in zip(
            choices, self.compute, self.exposed, self.loop_of, strict=True
        ):
            compute[loop] = compute.get(loop, 0.0) + float(c[choice])
            exposed += float(e[choice])
        for t in self.transfers:
            at = (choices[t.a], choices[t.b])
            exposed += float(t.exposed[at])
            if t.gathers is not None:
                gathers[t.loop] = gathers.get(t.loop, 0.0) + float(t.gathers[at])
            if t.compute is not None:
                compute[t.loop] = compute.get(t.loop, 0.0) + float(t.compute[at])
        return compute, gathers, exposed

    def step_bound(self, bound: float) -> float:
        """What no step takes less than, where nothing costs less than `bound` as `weighed`."""
        return bound - self.feeding.most

    def step_seconds(self, choices: Sequence[int]) -> float:
        """Seconds of a step: gathers hide behind the compute of their loop as far as it lasts."""
        compute, gathers, exposed = self.seconds_by_loop(choices)
        loops = compute.keys() | gathers.keys()
        return exposed + sum(max(compute.get(x, 0.0), gathers.get(x, 0.0)) for x in loops)

    @property
    def loops(self) -> tuple[int, ...]:
        """The loops in which something runs; -1 is the program outside of loops."""
        return tuple(sorted({*self.loop_of, *(t.loop for t in self.transfers)}))


_SIMPLER = 1e-10
"""Seconds for each factor number in a strategy: among equals the one that shards least, and
leading dimensions, is taken."""


class _Shared:
    """Weighed arrays, made once for all nodes and edges that share what they are made of."""

    def __init__(self) -> None:
        self._made: dict[tuple[int | float, ...], FloatArray] = {}

    def node(
        self, compute: FloatArray, exposed: FloatArray, rows: IntArray, weight: float
    ) -> FloatArray:
        key = (id(compute), id(exposed), id(rows), weight)
        if key not in self._made:
            simplest = _SIMPLER * (rows + 1).sum(axis=1)
            self._made[key] = (1.0 - weight) * compute + exposed + simplest
        return self._made[key]

    def edge(self, transfer: Transfer, weight: float) -> FloatArray:
        gathers, compute = transfer.gathers, transfer.compute
        if gathers is None and compute is None:
            return transfer.exposed
        key = (id(gathers), id(compute), id(transfer.exposed), weight)
        if key not in self._made:
            seconds = transfer.exposed
            if gathers is not None:
                seconds = seconds + weight * gathers
            if compute is not None:
                seconds = seconds + (1.0 - weight) * compute
            self._made[key] = seconds
        return self._made[key]


def sharding_of(row: Sequence[int], dims: DimFactors, names: Sequence[str]) -> DimAxes:
    """The mesh axes on each dimension of a value under one strategy."""
    return tuple(
        tuple(
            AxisRef(names[axis])
            for factor in dim
            for axis in range(len(names))
            if row[axis] == factor
        )
        for dim in dims
    )
