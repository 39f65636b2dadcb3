"""The MLIR side of a program: contexts, parsing, Shardy passes and inlining.

Everything that touches jaxlib's MLIR bindings in a generic way is here; modules that read
operations import their dialects from here too, so that there is one place that knows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax._src.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from shardwright.errors import InputError

__all__ = ["ir", "sdy"]

# Every pass named here is probed by a test, so that a new jaxlib which lacks one fails loudly.
FLATTEN_CALLS = "sdy-flatten-call-graph"
POPULATE_RULES = "func.func(sdy-populate-op-sharding-rules)"
PROPAGATE = "sdy-propagation-pipeline"
INSERT_RESHARDS = "func.func(sdy-insert-explicit-reshards{enable-full-version=true})"
RESHARDS_TO_COLLECTIVES = "func.func(sdy-reshard-to-collectives)"
REQUIRED_PASSES = (
    FLATTEN_CALLS,
    POPULATE_RULES,
    PROPAGATE,
    INSERT_RESHARDS,
    RESHARDS_TO_COLLECTIVES,
)

PREFETCHABLE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "convert",
        "dynamic_slice",
        "slice",
        "reshape",
        "transpose",
        "optimization_barrier",
    )
)
"""Views and casts: what they make of an argument is known long before it is needed."""

_EFFECTS = frozenset(
    f"stablehlo.{name}" for name in ("while", "infeed", "outfeed", "send", "recv", "if", "case")
)

_COMPUTATIONS = "called_computations"
_FRAME = re.compile(r'"([^"]+)":(\d+)')
_JITTED = re.compile(r"^(jit\([^/]*\)(/|$))+")


def new_context() -> Any:
    """An MLIR context with the dialects that JAX programs use (StableHLO, CHLO, func, sdy).

    What the parser and the passes complain of reaches the user as exceptions, not on stderr.
    """
    context = make_ir_context()
    context.attach_diagnostic_handler(lambda diagnostic: True)
    return context


def parse_module(text_or_bytecode: str | bytes, where: str = "program") -> Any:
    """Parses StableHLO text or bytecode in the current context.

    Raises:
      InputError: the input does not parse; the parser's own message is quoted.
    """
    try:
        return ir.Module.parse(text_or_bytecode)
    except Exception as error:  # the bindings raise several types; all mean the same
        reason = str(error).strip().splitlines()
        raise InputError(
            f"this is not a StableHLO module that parses ({'; '.join(reason[:2])[:300]})",
            where=where,
            do="Pass the text or bytecode of a StableHLO module, or the bytes of a jax.export "
            "artifact",
        ) from None


def run_passes(module: Any, *passes: str) -> None:
    """Runs Shardy passes on a module, in place and in order."""
    pipeline = f"builtin.module({','.join(passes)})"
    passmanager.PassManager.parse(pipeline).run(module.operation)


def main_function(module: Any) -> Any:
    """The entry function of a module.

    Raises:
      InputError: the module has no function called main.
    """
    for op in module.body.operations:
        if op.operation.name == "func.func" and symbol_name(op) == "main":
            return op.operation
    raise InputError(
        "the module has no function called main",
        where="program",
        do="Call the function that is to be planned main",
    )


def check_functions(module: Any) -> None:
    """Checks that a module can be inlined: whole bodies without branches, and no recursion.

    Raises:
      InputError: a function has no body or several blocks, or calls itself.
    """
    callees: dict[str, set[str]] = {}
    for op in module.body.operations:
        if op.operation.name != "func.func":
            continue
        name = symbol_name(op)
        blocks = list(op.operation.regions[0].blocks)
        if len(blocks) != 1:
            raise InputError(
                f"the function {name} has {len(blocks)} blocks in its body, and one is needed",
                where="program",
                do="Pass StableHLO as JAX lowers it, with structured control flow",
            )
        callees[name] = set(_called(blocks[0]))
    while leaves := [name for name, called in callees.items() if not called & callees.keys()]:
        for name in leaves:
            del callees[name]
    if callees:
        raise InputError(
            f"the functions {', '.join(callees)} call each other in a circle",
            where="program",
            do="Write the repetition as a loop",
        )


def _called(block: Any) -> Iterator[str]:
    for op in walk_block(block):
        if op.name == "func.call":
            yield str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
        for region in op.regions:
            for inner in region.blocks:
                yield from _called(inner)


def symbol_name(op: Any) -> str:
    """The symbol that an operation defines."""
    return str(ir.StringAttr(op.operation.attributes["sym_name"]).value)


def entry_block(func: Any) -> Any:
    """The body of a function."""
    return func.operation.regions[0].blocks[0]


def normalize(module: Any) -> None:
    """Brings a module to the form that plans are made on: one function, no dead operations.

    Calls are flattened first (each call gets its own copy of its function), since one function's
    tensors may need different shardings at different calls. Then every body moves to its call.
    """
    check_functions(module)
    run_passes(module, FLATTEN_CALLS)
    functions = {
        symbol_name(op): op for op in module.body.operations if op.operation.name == "func.func"
    }
    main = entry_block(main_function(module))
    _inline_block(main, functions)
    _erase_dead(main)
    named = _named_functions(main, functions)
    for name, function in functions.items():
        if name != "main" and name not in named:
            function.operation.erase()


def _named_functions(block: Any, functions: Mapping[str, Any]) -> set[str]:
    """Functions that operations name besides calling them, as the comparator of an approximate
    top-k, with those that they need."""
    found: set[str] = set()
    for op in walk_block(block):
        names: set[str] = set()
        if op.name == "func.call":
            names.add(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
        if _COMPUTATIONS in op.attributes:
            listed = ir.ArrayAttr(op.attributes[_COMPUTATIONS])
            names.update(ir.FlatSymbolRefAttr(name).value for name in listed)
        for name in names & functions.keys():
            found |= {name} | _named_functions(entry_block(functions[name]), functions)
        for region in op.regions:
            for inner in region.blocks:
                found |= _named_functions(inner, functions)
    return found


def _erase_dead(block: Any) -> None:
    """Erases operations whose results nobody reads, as the compiler will."""
    for op in reversed([o.operation for o in block.operations]):
        for region in op.regions:
            for inner in region.blocks:
                _erase_dead(inner)
        unread = len(op.results) > 0 and all(not any(True for _ in r.uses) for r in op.results)
        if unread and op.name not in _EFFECTS and "has_side_effect" not in op.attributes:
            op.erase()


def _inline_block(block: Any, functions: dict[str, Any]) -> None:
    for op in [o.operation for o in block.operations]:
        if op.name != "func.call":
            for region in op.regions:
                for inner in region.blocks:
                    _inline_block(inner, functions)
            continue
        callee = functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
        body = entry_block(callee)
        _inline_block(body, functions)
        for argument, operand in zip(body.arguments, op.operands, strict=True):
            argument.replace_all_uses_with(operand)
        *inner_ops, terminator = [o.operation for o in body.operations]
        for inner_op in inner_ops:
            inner_op.move_before(op)
        for result, value in zip(op.results, terminator.operands, strict=True):
            result.replace_all_uses_with(value)
        op.erase()
        terminator.erase()


def walk_block(block: Any) -> Iterator[Any]:
    """Yields the operations of a block in order, without entering their regions."""
    for op in block.operations:
        yield op.operation


@dataclass(frozen=True)
class Location:
    """Where an operation comes from.

    Attributes:
      name: that JAX gave it ("bsd,df->bsf/dot_general"), or "". JAX puts "jit(step)/" before it,
        but not where the function was jitted already; that part is left out, so that a plan of
        the one is a plan of the other.
      source: the innermost line of the user's source that made it ("model.py:14"), or "".
    """

    name: str
    source: str


class Locations:
    """Reads locations; those of many operations are equal, and reading one is slow."""

    def __init__(self) -> None:
        self._known: dict[Any, Location] = {}

    def __call__(self, location: Any) -> Location:
        """What an MLIR location tells."""
        key = location.attr
        if key not in self._known:
            name = _JITTED.sub("", str(getattr(location, "name_str", "")))
            self._known[key] = Location(name, source_line(location))
        return self._known[key]


def source_line(location: Any) -> str:
    """The innermost line of the user's source in a location, or ""."""
    match = _FRAME.search(str(location))
    return f"{match.group(1)}:{match.group(2)}" if match else ""


def last_operation(block: Any) -> Any:
    """The terminator of a block."""
    return list(block.operations)[-1].operation
