"""The shardings through which Shardy changes one into another, for constraints on the way.

XLA's own partitioner takes a change that needs several collectives apart in other ways than
Shardy: it may gather everything and slice. Told every sharding on the way, it makes the
collectives that were priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from shardwright.planner import mlir
from shardwright.planner.collectives import DimAxes, axis_size, read_steps
from shardwright.planner.mlir import ir
from shardwright.planner.reshard_answers import mesh_text, sharding_text

Change = tuple[tuple[int, ...], DimAxes, DimAxes]
"""Shape of a tensor, and its sharding before and after."""

Route = tuple[DimAxes, ...]
"""The sharding after each collective; the last is the one that was asked for."""


def routes(changes: Iterable[Change], mesh_shape: Mapping[str, int]) -> dict[Change, Route]:
    """The route of every change on a mesh.

    Where Shardy's pass fails (on some axes whose sizes are not powers of two), or a dimension has
    fewer elements than parts on the way, the route is the end alone.
    """
    axes = tuple(mesh_shape.items())
    known = _known(axes)
    new = [change for change in dict.fromkeys(changes) if change not in known]
    if new:
        known.update(zip(new, _ask(new, dict(axes)), strict=True))
    return known


@lru_cache(maxsize=64)
def _known(_axes: tuple[tuple[str, int], ...]) -> dict[Change, Route]:
    """The routes that are known on a mesh; `routes` adds to them."""
    return {}


def _ask(changes: list[Change], sizes: dict[str, int]) -> list[Route]:
    text = [mesh_text(sizes)]
    for i, (shape, before, after) in enumerate(changes):
        tensor = f"tensor<{''.join(f'{size}x' for size in shape)}f32>"
        start, end = sharding_text(before), sharding_text(after)
        text.append(
            f"func.func private @f{i}(%a: {tensor} {{sdy.sharding = #sdy.sharding{start}}})"
            f" -> ({tensor} {{sdy.sharding = #sdy.sharding{end}}}) {{\n"
            f"  %0 = sdy.reshard %a {end} : {tensor}\n  return %0 : {tensor}\n}}"
        )
    try:
        with mlir.new_context():
            module = mlir.parse_module("\n".join(text))
            mlir.run_passes(module, mlir.RESHARDS_TO_COLLECTIVES)
            functions = [f for f in module.body.operations if f.operation.name == "func.func"]
            return [
                _read(function, change, sizes)
                for function, change in zip(functions, changes, strict=True)
            ]
    except ir.MLIRError:
        if len(changes) == 1:
            return [(changes[0][2],)]
    half = len(changes) // 2
    return _ask(changes[:half], sizes) + _ask(changes[half:], sizes)


def _read(function: object, change: Change, sizes: dict[str, int]) -> Route:
    shape, before, end = change
    on_the_way = [before]
    *body, _terminator = mlir.walk_block(mlir.entry_block(function))
    for op in body:
        on_the_way += [stop for _, stop in read_steps(op, on_the_way[-1], sizes)]
    if not all(_holds(stop, shape, sizes) for stop in on_the_way):
        return (end,)
    return (*on_the_way[1:-1], end)


def _holds(sharding: DimAxes, shape: tuple[int, ...], sizes: dict[str, int]) -> bool:
    """Whether every shard has an element."""
    for axes, size in zip(sharding, shape, strict=True):
        parts = 1
        for axis in axes:
            parts *= axis_size(axis, sizes)
        if parts > size:
            return False
    return True
