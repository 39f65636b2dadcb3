"""Step 6a: let Shardy partition an annotated module, and read what it decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardwright.planner import mlir
from shardwright.planner.annotate import annotate
from shardwright.planner.collectives import KINDS, DimAxes
from shardwright.planner.constraints import ValueConstraint
from shardwright.planner.graph import OpGraph
from shardwright.planner.graph_reader import OP_ID, number_operations, operations_of
from shardwright.planner.mlir import ir
from shardwright.planner.narrowing import Narrowing
from shardwright.planner.nodes import BARRIER
from shardwright.planner.partition_reader import FunctionReader
from shardwright.planner.partitioned import Partitioned
from shardwright.planner.program import Program
from shardwright.planner.rules import write_own_rule


def partition(
    program: Program,
    graph: OpGraph,
    mesh_shape: Mapping[str, int],
    constraints: Sequence[ValueConstraint] = (),
    in_shardings: Sequence[DimAxes | None] | None = None,
    out_shardings: Sequence[DimAxes | None] | None = None,
) -> Partitioned:
    """Runs Shardy on a program with these constraints, in process."""
    with program.module() as module:
        number_operations(module)
        annotate(module, mesh_shape, constraints, in_shardings, out_shardings, to_compile=False)
        main = mlir.main_function(module)
        run_shardy(module, [main], graph)
        reader = FunctionReader(graph, Narrowing(graph), mesh_shape)
        block = mlir.entry_block(main)
        returned = mlir.last_operation(block).operands
        outputs = reader.shardings_of(main, "res_attrs", returned)
        reader.read(main, [(value, True) for value in graph.arguments], [-1] * len(outputs))
        return Partitioned(
            operands=reader.operands,
            results=reader.results,
            values=reader.values,
            inputs=tuple(reader.shardings_of(main, "arg_attrs", block.arguments)),
            outputs=tuple(outputs),
            communications=tuple(reader.communications),
        )


def run_shardy(
    module: Any,
    functions: Iterable[Any],
    graph: OpGraph,
    propagated: Callable[[], None] = lambda: None,
) -> None:
    """Partitions a module whose functions hold numbered operations of a program, in place.

    Args:
      propagated: called once shardings are propagated, before anything is resharded.
    """
    functions = list(functions)
    _write_own_rules(functions, graph)
    mlir.run_passes(module, mlir.PROPAGATE)
    propagated()
    _write_own_rules(functions, graph)  # propagation drops them
    mlir.run_passes(module, mlir.INSERT_RESHARDS, mlir.RESHARDS_TO_COLLECTIVES)
    for function in functions:
        _merge_equal(mlir.entry_block(function))


def _merge_equal(block: Any) -> None:
    """Makes one of equal collectives on one value, as the compiler does.

    A tensor that several operations gather alike is gathered once. MLIR's `cse` leaves them.
    """
    first: dict[tuple[Any, str, str], Any] = {}
    for op in list(mlir.walk_block(block)):
        for region in op.regions:
            for inner in region.blocks:
                _merge_equal(inner)
        if op.name not in KINDS:
            continue
        key = (next(iter(op.operands)), op.name, str(op.attributes["out_sharding"]))
        result = next(iter(op.results))
        kept = first.setdefault(key, result)
        if kept != result:
            result.replace_all_uses_with(kept)
            op.erase()


def _write_own_rules(functions: Iterable[Any], graph: OpGraph) -> None:
    for function in functions:
        for op in operations_of(mlir.entry_block(function)):
            attributes = op.attributes
            if OP_ID not in attributes or op.regions or op.name == BARRIER:
                continue
            known = graph.ops[ir.IntegerAttr(attributes[OP_ID]).value]
            if known.operands and known.results and not known.manual:
                write_own_rule(op, known.rule)
