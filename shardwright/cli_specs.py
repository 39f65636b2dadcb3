"""Meshes, shardings and model options as the command line writes them."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.errors import InputError

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardwright.cli_inputs import Target

Entry = str | tuple[str, ...] | None
Spec = tuple[Entry, ...]

_SPEC_HELP = (
    'Write one entry a dimension, as in "data,None" or "None,data+model", '
    "or a Python P(None, 'data')"
)


def parse_setting(text: str) -> tuple[str, Any]:
    """An option of a model, "key=value"; the value is JSON, or else a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"{text!r} is not key=value", where="--set", do="Write --set d_ff=14336")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value.strip()


def parse_mesh(text: str) -> dict[str, int]:
    """A logical mesh, "data=16,model=16", major to minor."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name.isidentifier() or not size.isdecimal() or name in mesh:
            problem = "names an axis twice" if name in mesh else "is not a list of axis=size"
            raise InputError(f"{text!r} {problem}", where="--mesh", do="Write data=16,model=16")
        mesh[name] = int(size)
    return mesh


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
            found.append(stripped[0] if len(stripped) == 1 else stripped)
        else:
            raise InputError(f"{text!r} is not a PartitionSpec", where=where, do=_SPEC_HELP)
    return tuple(found)


def parse_pin(text: str) -> tuple[str, Spec]:
    """A pinned sharding, "PATH=SPEC"; see `parse_spec`."""
    path, equals, spec = text.rpartition("=")
    if not equals or not path:
        raise InputError(
            f"{text!r} is not PATH=SPEC",
            where="--pin",
            do="Write --pin \"[0]['params']['embedding']=model,None\"",
        )
    return path.strip(), parse_spec(spec, where=f"--pin {path}")


def parse_pins(texts: Sequence[str]) -> dict[str, Spec]:
    """Every --pin, by path.

    Raises:
      InputError: one is malformed, or two give one path different shardings.
    """
    pins: dict[str, Spec] = {}
    for text in texts:
        path, spec = parse_pin(text)
        if pins.setdefault(path, spec) != spec:
            raise InputError(
                f"{path} is pinned to two shardings", where="--pin", do="Give each path once"
            )
    return pins


def partition_spec(spec: Spec) -> PartitionSpec:
    """A spec for JAX."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*spec)


def read_spec_file(path: Path) -> dict[str, Spec]:
    """Specs by path pattern, from a TOML or JSON file, in the order of the file.

    A spec is a string as `parse_spec` takes it, or a list of entries (null or "None", an axis, a
    list of axes).

    Raises:
      InputError: the file cannot be read, is neither, or has something else in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the specs cannot be read ({error})", where=str(path), do="Give a TOML or JSON file"
        ) from None
    is_json = path.suffix == ".json" or text.lstrip().startswith("{")
    try:
        raw = json.loads(text) if is_json else tomllib.loads(text)
    except ValueError as error:
        raise InputError(
            f"this is not {'JSON' if is_json else 'TOML'} ({error})",
            where=str(path),
            do='Write lines such as "[0]*[\'w_up\']" = ["None", "data", "model"]',
        ) from None
    if not isinstance(raw, dict):
        raise InputError("this is not a table of patterns", where=str(path), do=_SPEC_HELP)
    found = {}
    for pattern, spec in raw.items():
        where = f"{path} {pattern}"
        if isinstance(spec, str):
            found[pattern] = parse_spec(spec, where)
        elif isinstance(spec, list):
            found[pattern] = _spec_of_list(spec, json.dumps(spec), where)
        else:
            raise InputError(f"{spec!r} is not a PartitionSpec", where=where, do=_SPEC_HELP)
    return found


def match_specs(patterns: Mapping[str, Spec], paths: Sequence[str]) -> list[Spec | None]:
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
                f"no argument's path matches {pattern}",
                where="--spec",
                do=f"Paths look like {', '.join(near)}",
            )
    return [
        next((patterns[p] for p, e in compiled.items() if e.fullmatch(path)), None)
        for path in paths
    ]


def _pattern(text: str) -> re.Pattern[str]:
    wild = {"*": ".*", "?": "."}
    return re.compile("".join(wild.get(character) or re.escape(character) for character in text))


def argument_specs(target: Target, patterns: Mapping[str, Spec]) -> tuple[Any, list[str]]:
    """The specs of a target's arguments by patterns of their paths.

    Returns:
      PartitionSpecs in the pytree of the arguments (a list where it is not known), and the paths
      that no pattern matches, whose arguments are replicated.

    Raises:
      InputError: a pattern matches no path.
    """
    import jax

    if callable(target.program):
        leaves = jax.tree_util.tree_leaves_with_path(target.args)
        paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        tree = jax.tree.structure(target.args)
    else:
        paths = [tensor.path for tensor in target.program.inputs]
        tree = target.program.in_tree
    matched = match_specs(patterns, paths)
    unmatched = [path for path, spec in zip(paths, matched, strict=True) if spec is None]
    specs = [partition_spec(spec or ()) for spec in matched]
    return specs if tree is None else tree.unflatten(specs), unmatched
