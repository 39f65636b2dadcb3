"""Logical names of dimensions that the arguments of a function carry with them.

Flax keeps them beside parameters: `flax.linen.Partitioned` and `LogicallyPartitioned` boxes have
`names`, and variables of `flax.nnx` a metadata `out_sharding` (`sharding_names` or `sharding` in
older versions). They are known by what they have, so that Flax need not be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

_NNX_KEYS = ("out_sharding", "sharding_names", "sharding")


def logical_names_of(args: Sequence[Any]) -> dict[str, tuple[str | None, ...]]:
    """Path of an argument -> its names, for every array whose container names its dimensions."""
    found = {}
    boxes, _ = jax.tree_util.tree_flatten_with_path(tuple(args), is_leaf=_is_named)
    for path, box in boxes:
        names = _names(box)
        if names is None:
            continue
        for inner, leaf in jax.tree_util.tree_flatten_with_path(box)[0]:
            if len(getattr(leaf, "shape", ())) == len(names):
                found[jax.tree_util.keystr((*path, *inner))] = names
    return found


def _is_named(node: Any) -> bool:
    return _names(node) is not None


def _names(node: Any) -> tuple[str | None, ...] | None:
    if isinstance(node, jax.Array | jax.ShapeDtypeStruct | dict | list | tuple):
        return None
    given = getattr(node, "names", None) if hasattr(node, "unbox") else None
    if given is None and hasattr(node, "get_metadata"):
        metadata = node.get_metadata()
        given = next((metadata[key] for key in _NNX_KEYS if metadata.get(key)), None)
    if not isinstance(given, Sequence) or isinstance(given, str):
        return None
    return tuple(name if isinstance(name, str) else None for name in given)
