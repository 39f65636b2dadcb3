"""Shardings as people write them: a short form, and patterns of the paths that they are for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from shardwright.axis_names import AXIS_NAME_HELP, is_axis_name
from shardwright.errors import InputError

Entry = str | tuple[str, ...] | None
Spec = tuple[Entry, ...]
"""What `jax.sharding.PartitionSpec` is called with."""

OPEN = "?"
"""Stands last in a dimension that more axes may shard, as in Shardy."""
PartialSpec = tuple[tuple[str, ...], ...]
"""For each dimension its mesh axes, major to minor, and `OPEN` last where more may be added."""

_UNCONSTRAINED = re.compile(r"\b(?:P|PartitionSpec)\.UNCONSTRAINED\b")
_LINE = re.compile(r"[^\[\]']+:\d+(#\d+)?")
SPEC_HELP = (
    'Write one entry a dimension, as in "data,None" or "None,data+model", '
    "or a Python P(None, 'data')"
)


def parse_spec(text: str, where: str, *, partial: bool = False) -> Spec:
    """A PartitionSpec in short form.

    One entry a dimension, separated by commas: `None`, an axis, or several joined by "+", major
    to minor. Dimensions left out are not sharded; nothing at all is replicated. Python's own
    form, `P(None, ('data', 'model'))`, is read too.

    Args:
      partial: "?" is an entry too, an open dimension, and may end one, as in "data+?".

    Raises:
      InputError: it is neither.
    """
    inner = text.strip()
    if call := re.fullmatch(r"(?:P|PartitionSpec)\((.*)\)", inner):
        try:
            listed = ast.literal_eval(f"[{_UNCONSTRAINED.sub(repr(OPEN), call[1])}]")
        except (ValueError, SyntaxError):
            listed = [0]
        return _spec_of_list(listed, text, where, partial)
    parts = [part.strip() for part in inner.split(",")] if inner else []
    entries = [None if p == "None" else p.split("+") for p in parts]
    return _spec_of_list(entries, text, where, partial)


def spec_of_data(data: Any, where: str, *, partial: bool = False) -> Spec:
    """A PartitionSpec from JSON or TOML.

    Args:
      data: a string as `parse_spec` takes it, or a list with an entry a dimension: null or
        "None", an axis, or a list of axes, which may be empty.
      partial: as for `parse_spec`.

    Raises:
      InputError: it is neither.
    """
    if isinstance(data, str):
        return parse_spec(data, where, partial=partial)
    if isinstance(data, list):
        return _spec_of_list(data, json.dumps(data), where, partial)
    raise InputError(f"{data!r} is not a PartitionSpec", where=where, do=SPEC_HELP)


def partial_spec(given: Any, where: str) -> PartialSpec:
    """A sharding that may leave dimensions open, however it is written.

    Args:
      given: a PartitionSpec, where `P.UNCONSTRAINED` is open, or data as for `spec_of_data`.

    Raises:
      InputError: it is neither, or "?" stands before an axis.
    """
    if isinstance(given, str | list):
        return _whole(spec_of_data(given, where, partial=True), where)
    if getattr(given, "unreduced", None) or getattr(given, "reduced", None):
        raise InputError(
            f"{given} has unreduced axes, and a plan says where sums are added up",
            where=where,
            do="Leave them out",
        )
    try:
        entries = [_entry_of(entry) for entry in given]
    except TypeError:
        raise InputError(f"{given!r} is not a PartitionSpec", where=where, do=SPEC_HELP) from None
    return _whole(_spec_of_list(entries, str(given), where, partial=True), where)


def is_source_line(name: str) -> bool:
    """Whether a name has the form of a source line, "train.py:33" or "train.py:33#2"."""
    return _LINE.fullmatch(name) is not None


def spec_text(spec: Sequence[Sequence[str]]) -> str:
    """A sharding in short form, as `parse_spec` reads it."""
    return ",".join("+".join(dim) or "None" for dim in spec) or "replicated"


def _entry_of(entry: Any) -> Any:
    """An entry of a PartitionSpec as in data."""
    if isinstance(entry, tuple):
        return [_entry_of(name) for name in entry]
    # Told by its name, so that JAX need not be loaded.
    return OPEN if repr(entry) == "UNCONSTRAINED" else entry


def _whole(spec: Spec, where: str) -> PartialSpec:
    dims = tuple(
        () if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec
    )
    if any(OPEN in dim[:-1] for dim in dims):
        raise InputError(
            "? stands for what may be added, and comes last in a dimension",
            where=where,
            do='Write "data+?"',
        )
    return dims


def _spec_of_list(entries: Sequence[Any], text: str, where: str, partial: bool) -> Spec:
    found: list[Entry] = []
    for entry in entries:
        names = [entry] if isinstance(entry, str) else entry
        if entry is None or entry == "None":
            found.append(None)
        elif isinstance(names, list | tuple) and all(
            isinstance(name, str) and (is_axis_name(name.strip()) or _is_open(name, partial))
            for name in names
        ):
            stripped = tuple(name.strip() for name in names)
            found.append(stripped[0] if len(stripped) == 1 else stripped or None)
        else:
            raise InputError(
                f"{text!r} is not a PartitionSpec",
                where=where,
                do=f"{SPEC_HELP}; names of axes are of {AXIS_NAME_HELP}",
            )
    return tuple(found)


def _is_open(name: str, partial: bool) -> bool:
    return partial and name.strip() == OPEN


def match_specs(
    patterns: Mapping[str, Spec], paths: Sequence[str], where: str
) -> list[Spec | None]:
    """The spec of each path: of the first pattern that matches it, or None.

    "*" in a pattern stands for any text, and "?" for one character; all else, brackets too, for
    itself.

    Raises:
      InputError: a pattern matches no path at all.
    """
    compiled = {pattern: path_pattern(pattern) for pattern in patterns}
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


def path_pattern(text: str) -> re.Pattern[str]:
    """What finds the paths of a pattern: "*" is any text, "?" one character."""
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
