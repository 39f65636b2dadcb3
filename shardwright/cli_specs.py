"""Meshes, shardings and model options as the command line writes them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.axis_names import AXIS_NAME_HELP, is_axis_name
from shardwright.errors import InputError
from shardwright.planner.spec_patterns import (
    SPEC_HELP,
    PartialSpec,
    Spec,
    partial_spec,
    spec_of_data,
    tree_specs,
)

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardwright.cli_inputs import Target


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
        if not is_axis_name(name) or not size.isdecimal() or name in mesh:
            problem = "names an axis twice" if name in mesh else "is not a list of axis=size"
            raise InputError(
                f"{text!r} {problem}",
                where="--mesh",
                do=f"Write data=16,model=16, names of {AXIS_NAME_HELP}",
            )
        mesh[name] = int(size)
    return mesh


def parse_pin(text: str) -> tuple[str, PartialSpec]:
    """A pinned sharding, "PATH=SPEC" or "FILE:LINE=SPEC"; see `partial_spec`."""
    path, equals, spec = text.rpartition("=")
    if not equals or not path:
        raise InputError(
            f"{text!r} is not PATH=SPEC",
            where="--pin",
            do="Write --pin \"[0]['params']['embedding']=model,None\" or --pin train.py:33=data,?",
        )
    return path.strip(), partial_spec(spec, where=f"--pin {path}")


def parse_pins(texts: Sequence[str]) -> dict[str, PartialSpec]:
    """Every --pin, by path or source line.

    Raises:
      InputError: one is malformed, or two give one path different shardings.
    """
    pins: dict[str, PartialSpec] = {}
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
        raise InputError("this is not a table of patterns", where=str(path), do=SPEC_HELP)
    return {pattern: spec_of_data(spec, f"{path} {pattern}") for pattern, spec in raw.items()}


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
    return tree_specs(patterns, paths, tree, "--spec")
