"""Shardings as people write them: a short form, and patterns of the paths that they are for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from shardwright.errors import InputError

Entry = str | tuple[str, ...] | None
Spec = tuple[Entry, ...]
"""What `jax.sharding.PartitionSpec` is called with."""

SPEC_HELP = (
    'Write one entry a dimension, as in "data,None" or "None,data+model", '
    "or a Python P(None, 'data')"
)


def parse_spec(text: str, where: str) -> Spec:
    """A PartitionSpec in short form.

    One entry a dimension, separated by commas: `None`, an axis, or several joined by "+", major
    to minor. Dimensions left out are not sharded; nothing at all is replicated. Python's own
    form, `P(None, ('data', 'model'))`, is read too.

    Raises:
      InputError: it is neither.
    """
    inner = text.strip()
    if call := re.fullmatch(r"(?:P|PartitionSpec)\((.*)\)", inner):
        try:
            listed = ast.literal_eval(f"[{call[1]}]")
        except (ValueError, SyntaxError):
            listed = [0]
        return _spec_of_list(listed, text, where)
    parts = [part.strip() for part in inner.split(",")] if inner else []
    return _spec_of_list([None if p == "None" else p.split("+") for p in parts], text, where)


def spec_of_data(data: Any, where: str) -> Spec:
    """A PartitionSpec from JSON or TOML.

    Args:
      data: a string as `parse_spec` takes it, or a list with an entry a dimension: null or
        "None", an axis, or a list of axes, which may be empty.

    Raises:
      InputError: it is neither.
    """
    if isinstance(data, str):
        return parse_spec(data, where)
    if isinstance(data, list):
        return _spec_of_list(data, json.dumps(data), where)
    raise InputError(f"{data!r} is not a PartitionSpec", where=where, do=SPEC_HELP)


def _spec_of_list(entries: Sequence[Any], text: str, where: str) -> Spec:
    found: list[Entry] = []
    for entry in entries:
        names = [entry] if isinstance(entry, str) else entry
        if entry is None or entry == "None":
            found.append(None)
        elif isinstance(names, list | tuple) and all(
            isinstance(name, str) and name.strip().isidentifier() for name in names
        ):
            stripped = tuple(name.strip() for name in names)
            found.append(stripped[0] if len(stripped) == 1 else stripped or None)
        else:
            raise InputError(f"{text!r} is not a PartitionSpec", where=where, do=SPEC_HELP)
    return tuple(found)


def match_specs(
    patterns: Mapping[str, Spec], paths: Sequence[str], where: str
) -> list[Spec | None]:
    """The spec of each path: of the first pattern that matches it, or None.

    "*" in a pattern stands for any text, and "?" for one character; all else, brackets too, for
    itself.

    Raises:
      InputError: a pattern matches no path at all.
    """
    compiled = {pattern: _pattern(pattern) for pattern in patterns}
    for pattern, expression in compiled.items():
        if not any(map(expression.fullmatch, paths)):
            near = get_close_matches(pattern, paths, n=3, cutoff=0.3) or paths[:3]
            raise InputError(
                f"no path matches {pattern}", where=where, do=f"Paths look like {', '.join(near)}"
            )
    return [
        next((patterns[p] for p, e in compiled.items() if e.fullmatch(path)), None)
        for path in paths
    ]


def _pattern(text: str) -> re.Pattern[str]:
    wild = {"*": ".*", "?": "."}
    # Many stars in a row mean what one means, and would take very long to match.
    text = re.sub(r"\*+", "*", text)
    return re.compile("".join(wild.get(character) or re.escape(character) for character in text))


def tree_specs(
    patterns: Mapping[str, Spec], paths: Sequence[str], tree: Any, where: str
) -> tuple[Any, list[str]]:
    """PartitionSpecs of the leaves of a pytree, by patterns of their paths.

    Args:
      tree: the structure of the pytree; None where it is not known.

    Returns:
      PartitionSpecs in the pytree (a list where it is not known), and the paths that no pattern
      matches, whose arrays are replicated.

    Raises:
      InputError: a pattern matches no path.
    """
    from jax.sharding import PartitionSpec

    matched = match_specs(patterns, paths, where)
    unmatched = [path for path, spec in zip(paths, matched, strict=True) if spec is None]
    specs = [PartitionSpec(*(spec or ())) for spec in matched]
    return specs if tree is None else tree.unflatten(specs), unmatched
