"""Sizes that would be faster: what a step takes with a dimension that the mesh divides.

A vocabulary of 50257 is sharded over nothing, or padded; at 50304 it may be cut. What that saves
is what the cost model says of the same program at the other size, planned on the same mesh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import combinations
from math import inf, lcm, prod

from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.graph import OpGraph
from shardwright.planner.mesh_solution import Estimate, estimate_mesh
from shardwright.planner.nodes import NodeGraph
from shardwright.planner.plan_schema import SizeAdviceModel
from shardwright.planner.prepared import Prepared, prepare_graph
from shardwright.planner.problem import Fixed
from shardwright.planner.sizes import Place, Sizes, program_sizes, resized

_MOST_DIMENSIONS = 4
_MOST_SIZES = 3
_MOST_GROWTH = 1.1
_MOST_GROWTH_SMALL = 1.34
_SMALL = 64
"""Below this a size may grow by a third: 12 heads to 16."""
_TILE = 128
"""Lanes of a TPU; a dimension of whole tiles has no padding in memory."""
_WORTH_TELLING = 0.005
"""Part of a step that must be saved."""
_GAP = 0.001


def size_advice(
    prepared: Prepared,
    mesh: LogicalMesh,
    memory_limit: float,
    fixed_on: Callable[[NodeGraph, LogicalMesh], Fixed],
    seconds: float,
    seed: int,
) -> list[SizeAdviceModel]:
    """Dimensions that the mesh does not divide, of which a larger size takes less time.

    Args:
      mesh: that of the plan.
      fixed_on: what pins and the program give, of nodes on a mesh.
      seconds: after which no more are tried.
    """
    graph = prepared.graph
    if prepared.large or any(op.manual for op in graph.ops):
        return []
    until = time.monotonic() + seconds
    sizes = program_sizes(graph)
    places = _uneven(graph, sizes, mesh)
    if not places:
        return []

    def step_seconds(of: Prepared, cutoff: float = inf) -> float | None:
        fixed = fixed_on(of.nodes, mesh)
        if cutoff < inf and of.quick_bound(mesh, fixed, cutoff) >= cutoff:
            return None
        problem = of.problem(mesh, fixed)
        left = max(1.0, until - time.monotonic())
        found = estimate_mesh(problem, memory_limit, left, seed, _GAP, cutoff)
        return found.step_s if isinstance(found, Estimate) else None

    now = step_seconds(prepared)
    advice: list[SizeAdviceModel] = []
    if now is None:
        return advice
    for place in places:
        best: tuple[float, int] | None = None
        for size in _sizes_to_try(sizes.size_of[place], mesh):
            other = resized(graph, sizes, place, size)
            if other is None or time.monotonic() > until:
                break
            worth = now * (1 - _WORTH_TELLING) if best is None else best[0]
            taken = step_seconds(prepare_graph(prepared.program, other), worth)
            if taken is not None and (best is None or taken < best[0]):
                best = taken, size
        if best is not None and now - best[0] > _WORTH_TELLING * now:
            advice.append(_told(prepared, sizes, place, best[1], now - best[0], now))
    return sorted(advice, key=lambda one: -one.saved_s)


def _uneven(graph: OpGraph, sizes: Sizes, mesh: LogicalMesh) -> list[Place]:
    """Dimensions that some axes of the mesh would cut but do not divide, the largest first.

    Only those of arguments, or of which such are made: what people choose.
    """
    arguments = set(graph.arguments)
    chosen = {root for root, dims in sizes.dims.items() if any(v in arguments for v, _ in dims)}
    chosen |= {part for whole, parts in sizes.products if whole in chosen for part in parts}
    found = [
        root
        for root in chosen - sizes.bound
        if any(p <= sizes.size_of.get(root, 1) and sizes.size_of[root] % p for p in _parts(mesh))
    ]

    def moved(root: Place) -> float:
        values = {value for value, _ in sizes.dims[root]}
        return sum(graph.values[value].nbytes * graph.value_trips(value) for value in values)

    return sorted(found, key=lambda root: (-moved(root), root))[:_MOST_DIMENSIONS]


def _parts(mesh: LogicalMesh) -> Iterator[int]:
    """In how many parts axes of a mesh can cut a dimension."""
    counts = [size for size in mesh.shape.values() if size > 1]
    for number in range(1, len(counts) + 1):
        yield from (prod(some) for some in combinations(counts, number))


def _sizes_to_try(size: int, mesh: LogicalMesh) -> list[int]:
    """Sizes not much larger that axes of the mesh divide, in whole tiles too."""
    steps = {p for p in _parts(mesh) if p <= size}
    steps |= {lcm(p, _TILE) for p in steps}
    most = size * (_MOST_GROWTH_SMALL if size < _SMALL else _MOST_GROWTH)
    rounded = {-(-size // step) * step for step in steps}
    return sorted(one for one in rounded if size < one <= most)[-_MOST_SIZES:]


def _told(
    prepared: Prepared, sizes: Sizes, place: Place, size: int, saved_s: float, step_s: float
) -> SizeAdviceModel:
    graph = prepared.graph
    names = dict(zip(graph.arguments, graph.argument_names, strict=True))
    mine = [(value, dim) for value, dim in sizes.dims[place] if value in names]
    largest = max(mine, key=lambda one: graph.values[one[0]].nbytes, default=None)
    return SizeAdviceModel(
        argument="" if largest is None else names[largest[0]],
        dimension=None if largest is None else largest[1],
        also=max(0, len({value for value, _ in mine}) - 1),
        size=sizes.size_of[place],
        better=size,
        saved_s=saved_s,
        saved_part=saved_s / step_s,
    )
