"""Which dimensions of a program have one size for one reason, and the program with another size.

Dimensions that an operation maps to the same factor have the same size, whatever it is: what a
vocabulary is to an embedding it is to logits, losses and optimizer states. Changing all of them
together gives the op graph of the same program at another size, which is priced as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.nodes import BARRIER

if TYPE_CHECKING:
    from networkx.utils import UnionFind

_LOOKUPS = ("stablehlo.gather", "stablehlo.scatter", "stablehlo.dynamic_gather")
"""They may leave a dimension that they look up in out of their rule."""
_ROUNDS = 8

_RESIZING = tuple(
    f"stablehlo.{name}"
    for name in (
        "concatenate", "convolution", "dynamic_slice", "dynamic_update_slice", "pad",
        "reduce_window", "select_and_scatter", "slice",
    )
)  # fmt: skip
"""Operations that make a dimension of another size."""

Place = tuple[str, int, int]
"""("dim", value, dimension) or ("factor", operation, factor)."""


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a program by what makes their size.

    Attributes:
      size_of: class -> its size.
      dims: class -> (value, dimension) pairs that have it.
      factors: class -> (operation, factor) pairs that have it.
      products: dimensions that are made of several others: class -> their classes.
      bound: classes whose size also follows from something else, and cannot change.
    """

    size_of: dict[Place, int] = field(repr=False)
    dims: dict[Place, list[tuple[int, int]]] = field(repr=False)
    factors: dict[Place, list[tuple[int, int]]] = field(repr=False)
    products: tuple[tuple[Place, tuple[Place, ...]], ...] = field(repr=False)
    bound: frozenset[Place] = field(repr=False)


def program_sizes(graph: OpGraph) -> Sizes:
    """Finds which dimensions of a program go together."""
    from networkx.utils import UnionFind  # a quarter of a second, which other commands do without

    union: UnionFind[Place] = UnionFind()
    bound: set[Place] = set()
    products: list[tuple[Place, tuple[Place, ...]]] = []
    for value in graph.values:
        for dim in range(len(value.shape)):
            union[("dim", value.id, dim)]
    # What loops and branches take and make, their parts say.
    structured = {loop.first_op - 1 for loop in graph.loops} | {join.op for join in graph.joins}
    for op in graph.ops:
        if op.id not in structured and op.name != BARRIER:
            _join_op(op, graph, union, bound, products)
    for a, b in _same_values(graph):
        for dim in range(len(graph.values[a].shape)):
            union.union(("dim", a, dim), ("dim", b, dim))
    size_of: dict[Place, int] = {}
    dims: dict[Place, list[tuple[int, int]]] = {}
    factors: dict[Place, list[tuple[int, int]]] = {}
    for place in list(union.parents):
        kind, owner, number = place
        root = union[place]
        if kind == "dim":
            dims.setdefault(root, []).append((owner, number))
            size_of[root] = graph.values[owner].shape[number]
        else:
            factors.setdefault(root, []).append((owner, number))
    return Sizes(
        size_of,
        dims,
        factors,
        tuple((union[whole], tuple(union[part] for part in parts)) for whole, parts in products),
        frozenset(union[place] for place in bound),
    )


def resized(graph: OpGraph, sizes: Sizes, which: Place, size: int) -> OpGraph | None:
    """The op graph with another size of one class of dimensions, and of what is made of it.

    None where something that is bound would change too.
    """
    new = {which: size}
    for _ in range(_ROUNDS):
        before = dict(new)
        for whole, parts in sizes.products:
            if not any(part in new for part in parts):
                continue
            product = prod(new.get(part, sizes.size_of.get(part, 1)) for part in parts)
            if new.setdefault(whole, product) != product:
                return None
        if new == before:
            break
    if new.keys() & sizes.bound:
        return None
    shapes = {value.id: list(value.shape) for value in graph.values}
    rules = {op.id: list(op.rule.sizes) for op in graph.ops if op.rule is not None}
    for root, changed in new.items():
        for value, dim in sizes.dims.get(root, ()):
            shapes[value][dim] = changed
        for op, factor in sizes.factors.get(root, ()):
            rules[op][factor] = changed
    # Operations share equal rules, and what is looked at once for each must stay so.
    shared: dict[tuple[int, tuple[int, ...]], object] = {}

    def rule_of(op: Op) -> object:
        if op.rule is None:
            return None
        key = (id(op.rule), tuple(rules[op.id]))
        if key not in shared:
            same = key[1] == op.rule.sizes
            shared[key] = op.rule if same else replace(op.rule, sizes=key[1])
        return shared[key]

    return replace(
        graph,
        values=tuple(replace(v, shape=tuple(shapes[v.id])) for v in graph.values),
        ops=tuple(replace(op, rule=rule_of(op)) for op in graph.ops),  # type: ignore[arg-type]
    )


def _join_op(
    op: Op,
    graph: OpGraph,
    union: UnionFind[Place],
    bound: set[Place],
    products: list[tuple[Place, tuple[Place, ...]]],
) -> None:

    def size_at(place: Place) -> int:
        return graph.values[place[1]].shape[place[2]]

    places: list[list[Place]] = [
        [("dim", value, dim) for dim in range(len(graph.values[value].shape))]
        for value in (*op.operands, *op.results)
    ]
    if op.rule is None:
        if op.operands:
            bound.update(place for one in places for place in one)
        return
    if op.name in _RESIZING:
        # Where a part begins, or how often a loop takes one, follows from the size.
        for one, other in combinations(places, 2):
            if len(one) == len(other):
                pairs = zip(one, other, strict=True)
                bound.update(p for pair in pairs if len(set(map(size_at, pair))) > 1 for p in pair)
    for one, mapping in zip(places, (*op.rule.operands, *op.rule.results), strict=True):
        for place, factors in zip(one, mapping, strict=True):
            mine = tuple(("factor", op.id, f) for f in factors)
            if size_at(place) != prod(op.rule.sizes[f] for f in factors):
                if factors or not op.name.startswith(_LOOKUPS):
                    bound.add(place)
            elif len(mine) == 1:
                union.union(place, mine[0])
            elif mine:
                products.append((place, mine))


def _same_values(graph: OpGraph) -> Iterator[tuple[int, int]]:
    """Values of one shape because loops, branches, barriers or donation make them so."""
    for loop in graph.loops:
        for carry in loop.carries:
            yield carry.init, carry.argument
            yield carry.init, carry.yielded
            yield carry.init, carry.result
    for join in graph.joins:
        for value in join.yields:
            yield join.result, value
    for result, argument in graph.aliases.items():
        yield graph.results[result], graph.arguments[argument]
    for op in graph.ops:
        if op.name == BARRIER:
            yield from zip(op.operands, op.results, strict=True)
