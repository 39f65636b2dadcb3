"""Prints and debugging callbacks in programs: each is one operation without a result.

JAX lowers them for the platform of this process alone. For planning they become a custom call that
keeps what they print alive; a plan says nothing of how they read it, so that the program that runs,
where they are what JAX makes of them, is constrained alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax._src.debugging import debug_callback_p, debug_print_p
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir.dialects import stablehlo

from shardwright.planner import mlir
from shardwright.planner.mlir import ir

_TARGET = "shardwright_print"
PRINT = f"custom_call:{_TARGET}"
"""What the operation is called in an op graph."""


@contextmanager
def prints_for_planning(platform: str) -> Iterator[None]:
    """Lowers prints and debugging callbacks without order as one operation each.

    Those in order thread tokens through the program, and are lowered as JAX does.
    """
    table = jax_mlir._platform_specific_lowerings[platform]
    kept = {p: table[p] for p in (debug_print_p, debug_callback_p) if p in table}
    for primitive, entry in kept.items():
        jax_mlir.register_lowering(primitive, _rule(entry.rule), platform=platform)
    try:
        yield
    finally:
        table.update(kept)


def erase_prints(block: Any) -> None:
    """Takes the prints out of a block and of all inside it."""
    for op in list(mlir.walk_block(block)):
        if op.name == "stablehlo.custom_call" and (
            ir.StringAttr(op.attributes["call_target_name"]).value == _TARGET
        ):
            op.erase()
            continue
        for region in op.regions:
            for inner in region.blocks:
                erase_prints(inner)


def _rule(real: Any) -> Any:
    def lower(context: Any, *args: Any, **params: Any) -> Any:
        if params.get("ordered") or "Ordered" in str(params.get("effect", "")):
            return real(context, *args, **params)
        stablehlo.custom_call([], list(args), _TARGET, has_side_effect=True)
        return []

    return lower
