"""Step 7: put a plan's shardings on a module.

Only `sdy.sharding_constraint` operations and the shardings of main's arguments and results are
used: compilation ignores sharding attributes on other operations, and one on a loop ends the
process.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jaxlib.mlir.dialects import stablehlo

from shardwright.errors import InputError
from shardwright.planner import mlir
from shardwright.planner.collectives import DimAxes
from shardwright.planner.constraints import Demand, Site, ValueConstraint
from shardwright.planner.graph import OpKey
from shardwright.planner.graph_reader import operation_keys
from shardwright.planner.mlir import ir, sdy
from shardwright.planner.reshard_route import Change, Route, routes

_PRODUCT = "stablehlo.dot_general"
_CONVERT = "stablehlo.convert"
_TRANSPOSE = "stablehlo.transpose"


def annotate(
    module: Any,
    mesh_shape: Mapping[str, int],
    constraints: Sequence[ValueConstraint],
    in_shardings: Sequence[DimAxes | None] | None = None,
    out_shardings: Sequence[DimAxes | None] | None = None,
    same_platform: bool = True,
    to_compile: bool = True,
) -> None:
    """Constrains a normalised module, in place; its context must be current.

    Args:
      mesh_shape: mesh axis name -> size, major to minor.
      in_shardings: for each argument of main; None (for one or all) keeps what the module has.
      out_shardings: the same for the results of main.
      same_platform: the module was lowered for the platform that was planned for. On another,
        JAX may lower a few functions to other operations; their constraints are left out.
      to_compile: XLA takes the module, not Shardy's passes alone.

    A constraint only ever replaces a reader's operand by the same value in another sharding, so
    that whatever program this is, it computes what it did.

    Raises:
      InputError: a constraint's value or reader is not in the module: it is another program.
    """
    mesh = mesh_symbol(module, mesh_shape)
    set_shardings(mlir.main_function(module), mesh, in_shardings, out_shardings)
    places = _places(module, constraints, skip_missing=not same_platform)
    constrain(_after_transposes(places) if to_compile else places, mesh, mesh_shape)


def check_program(module: Any, constraints: Sequence[ValueConstraint]) -> None:
    """Raises InputError where a normalised module is not the one that was planned."""
    _places(module, constraints, skip_missing=False)


Place = tuple[ValueConstraint, Any, list[tuple[Demand, Any, int]]]
"""A constraint, its value in a module, and for each demand the operation and which operand."""


def constrain(places: Sequence[Place], mesh: str, mesh_shape: Mapping[str, int]) -> None:
    """Puts constraints on values of a module whose mesh has that symbol."""
    known = routes(_changes(places), mesh_shape)
    for constraint, value, uses in places:
        _constrain(_Constrainer(mesh, known), constraint, value, uses)


def _after_transposes(places: Sequence[Place]) -> list[Place]:
    """The places, with those of products that are only transposed told of what is transposed.

    XLA makes a product whose result is transposed in the other order of its operands. A constraint
    in between keeps it from that: a gradient so made has another layout than its weight, which is
    copied to that layout for the update, and back (scheduled programs of libtpu 0.0.42.1). Scores
    of attention stay as they are: made straight in the order in which a softmax reads them, their
    exponentials are written in f32.
    """
    by_value = {place[1]: place for place in places}
    for place in places:
        product = place[1]
        transposed = _transposed(place, by_value)
        turned = None if transposed is None else _turned(place, transposed, by_value)
        if turned is not None:
            del by_value[product]
            by_value[transposed] = turned
    return list(by_value.values())


def _transposed(place: Place, constrained: Container[Any]) -> Any | None:
    """What a product is only transposed to, cast before or not, or None."""
    constraint, value, uses = place
    if constraint.site.kind != "result" or value.owner.name != _PRODUCT:
        return None
    if constraint.copy is not None or len(uses) != 1:
        return None
    if _are_scores(value.owner):
        return None
    while True:
        readers = [use.owner.operation for use in value.uses]
        if len(readers) != 1 or readers[0].name not in (_CONVERT, _TRANSPOSE):
            return None
        value = readers[0].results[0]
        if readers[0].name == _TRANSPOSE:
            return value
        if value in constrained:
            return None


def _are_scores(product: Any) -> bool:
    """Whether a product is as the scores of attention: batched, and larger than its operands."""
    dims = stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    made, *read = (prod(value.type.shape) for value in (product.results[0], *product.operands))
    return bool(dims.lhs_batching_dimensions) and made > max(read)


def _turned(place: Place, transposed: Any, by_value: Mapping[Any, Place]) -> Place | None:
    """What constrains a transposed product instead of the product; None where nothing can."""
    constraint, _, ((demand, _, _),) = place
    order = list(ir.DenseI64ArrayAttr(transposed.owner.attributes["permutation"]))
    read = demand.sharding or constraint.made
    made, wanted = (tuple(sharding[dim] for dim in order) for sharding in (constraint.made, read))
    if transposed not in by_value:
        told = replace(demand, sharding=wanted if wanted != made else None)
        uses = [(told, use.owner.operation, use.operand_number) for use in transposed.uses]
        return replace(constraint, made=made, demands=(told,) * len(uses)), transposed, uses
    own, _, uses = by_value[transposed]
    if wanted == made:
        return own, transposed, uses
    if own.copy is not None or own.made != wanted:
        return None
    return replace(own, made=made, copy=wanted), transposed, uses


def _places(
    module: Any, constraints: Sequence[ValueConstraint], *, skip_missing: bool
) -> list[Place]:
    """The value of each constraint and the operands that read it, before anything moves."""
    finder = _Finder(module, mlir.main_function(module))
    places: list[Place] = []
    for constraint in constraints:
        try:
            value = finder.value(constraint.site)
            uses = [(d, *finder.use(d.site)) for d in constraint.demands]
            told = [constraint.made, constraint.copy, *(d.sharding for d in constraint.demands)]
            rank = len(value.type.shape)
            fits = all(sharding is None or len(sharding) == rank for sharding in told)
            if not fits or any(op.operands[operand] != value for _, op, operand in uses):
                raise KeyError(constraint.site.key)
        except (KeyError, IndexError):
            if not skip_missing:
                raise _another_program(constraint.site.key) from None
            continue
        places.append((constraint, value, uses))
    return places


def _changes(places: Sequence[Place]) -> Iterator[Change]:
    """Every change of sharding that constraints ask for."""
    for constraint, value, uses in places:
        shape = tuple(value.type.shape)
        given = constraint.made
        if constraint.copy is not None:
            yield shape, given, constraint.copy
            given = constraint.copy
        for demand, _, _ in uses:
            if demand.sharding not in (None, constraint.made):
                yield shape, given, demand.sharding


def sharding_attribute(mesh: str, sharding: DimAxes) -> Any:
    """A closed sharding as an MLIR attribute."""
    dims = [
        sdy.DimensionShardingAttr.get(
            [
                sdy.AxisRefAttr.get(axis.name)
                if axis.size is None
                else sdy.AxisRefAttr.get(
                    axis.name, sdy.SubAxisInfoAttr.get(axis.pre_size, axis.size)
                )
                for axis in dim
            ],
            is_closed=True,
        )
        for dim in sharding
    ]
    return sdy.TensorShardingAttr.get(mesh, dims)


def mesh_symbol(module: Any, shape: Mapping[str, int]) -> str:
    """The module's mesh with these axes, added where there is none."""
    wanted = list(shape.items())
    names = set()
    for op in module.body.operations:
        if op.operation.name != "sdy.mesh":
            continue
        name = mlir.symbol_name(op)
        names.add(name)
        axes = sdy.MeshAttr(op.operation.attributes["mesh"]).axes
        if [(a.name, a.size) for a in map(sdy.MeshAxisAttr, axes)] == wanted:
            return name
    name = next(
        n for n in ("mesh", *(f"mesh_{i}" for i in range(len(names) + 1))) if n not in names
    )
    attribute = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(n, size) for n, size in wanted])
    with ir.InsertionPoint.at_block_begin(module.body), ir.Location.unknown():
        sdy.MeshOp(name, attribute)
    return name


def set_shardings(
    function: Any,
    mesh: str,
    in_shardings: Sequence[DimAxes | None] | None,
    out_shardings: Sequence[DimAxes | None] | None,
) -> None:
    """Shards the arguments and results of a function; None keeps what they have."""
    for kind, shardings in (("arg_attrs", in_shardings), ("res_attrs", out_shardings)):
        if shardings is None:
            continue
        current = (
            [dict(_named(ir.DictAttr(a))) for a in function.attributes[kind]]
            if kind in function.attributes
            else [{} for _ in shardings]
        )
        for attributes, sharding in zip(current, shardings, strict=True):
            if sharding is not None:
                attributes["sdy.sharding"] = sharding_attribute(mesh, sharding)
        function.attributes[kind] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in current])


def _named(attributes: Any) -> list[tuple[str, Any]]:
    return [(a.name, a.attr) for a in attributes]


class _Finder:
    """Finds the sites of constraints in a module."""

    def __init__(self, module: Any, main: Any) -> None:
        self._block = mlir.entry_block(main)
        self._ops = operation_keys(module)
        self._terminators: dict[Any, Any] = {}

    def value(self, site: Site) -> Any:
        if site.kind == "argument":
            return self._block.arguments[site.index]
        op = self._op(site.key)
        if site.kind == "carry":
            return op.regions[1].blocks[0].arguments[site.index]
        return op.results[site.index]

    def use(self, site: Site) -> tuple[Any, int]:
        """The operation that reads, and which of its operands."""
        op = self._terminator(self._block) if site.kind == "return" else self._op(site.key)
        if site.kind == "yield":
            op = self._terminator(op.regions[site.branch].blocks[0])
        if site.index >= len(op.operands):
            raise KeyError(site.key)
        return op, site.index

    def _terminator(self, block: Any) -> Any:
        """The last operation of a block; finding it walks the block, so it is kept."""
        if block not in self._terminators:
            self._terminators[block] = mlir.last_operation(block)
        return self._terminators[block]

    def _op(self, key: OpKey | None) -> Any:
        if key not in self._ops:
            raise KeyError(key)
        return self._ops[key]


def _another_program(key: OpKey | None) -> InputError:
    where = "an argument" if key is None else f"{key.op} number {key.ordinal} at {key.location!r}"
    return InputError(
        f"the plan constrains {where}, which this program does not have or uses otherwise",
        where="annotation",
        do="Plan this program again: it is not the one that was planned",
    )


def _constrain(
    constrainer: _Constrainer,
    constraint: ValueConstraint,
    value: Any,
    uses: Sequence[tuple[Demand, Any, int]],
) -> None:
    # Results of main are constrained by its result shardings; a lone argument needs nothing.
    made = value
    if constraint.site.kind != "argument":
        made = constrainer.constrain(value, constraint.made, _after(value))
        value.replace_all_uses_except(made, made.owner.operation)
    given, sharding = made, constraint.made
    if constraint.copy is not None:
        given = constrainer.reshard(made, sharding, constraint.copy, _after(made))
        sharding = constraint.copy
    # Readers that need the same sharding in the same block share one reshard.
    shared: dict[tuple[Any, DimAxes], Any] = {}
    for demand, op, operand in uses:
        wanted = given
        if demand.sharding == constraint.made:
            wanted = made  # needs no copy, so that none is kept for it
        elif demand.sharding is not None:
            place = (op.block, demand.sharding)
            if place not in shared:
                insert = _before_readers(given, op.block)
                shared[place] = constrainer.reshard(given, sharding, demand.sharding, insert)
            wanted = shared[place]
        if wanted is not made:
            op.operands[operand] = wanted


class _Constrainer:
    """Puts constraints on values of one mesh."""

    def __init__(self, mesh: str, known: Mapping[Change, Route]) -> None:
        self._mesh = mesh
        self._routes = known

    def constrain(self, value: Any, sharding: DimAxes, insert: Callable[[], Any]) -> Any:
        """The value with a constraint."""
        with insert(), value.location:
            attribute = sharding_attribute(self._mesh, sharding)
            return sdy.ShardingConstraintOp(value, attribute).result

    def reshard(
        self, value: Any, before: DimAxes, after: DimAxes, insert: Callable[[], Any]
    ) -> Any:
        """The value in another sharding, with a constraint after each collective on the way."""
        route = self._routes[tuple(value.type.shape), before, after]
        for stop in route:
            value = self.constrain(value, stop, insert)
            insert = _after(value)
        return value


def _before_readers(value: Any, block: Any) -> Callable[[], Any]:
    """Makes an insertion point before everything in a block that can read a value."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.operation.block != block:
        return lambda: ir.InsertionPoint.at_block_begin(block)
    return _after(value)


def _after(value: Any) -> Callable[[], Any]:
    """Makes an insertion point right after a value is defined."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return lambda: ir.InsertionPoint.at_block_begin(owner)
    return lambda: ir.InsertionPoint.after(owner.operation)
