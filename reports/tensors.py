"""Tensors that are sharded alike, told once.

An optimizer's moments have the shape and mostly the sharding of their parameter, and so have the
same parameters of other layers. They differ only in the first part of their path and in the
numbers inside it, which is how they are found here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.planner.plan_schema import ProgramModel, TensorModel

_KEY = re.compile(r"\['(?:[^'\\]|\\.)*'\]|\[\d+\]|\.\w+|[^\[.]+|.")
_NUMBER = re.compile(r"\d+")

Keys = tuple[str, ...]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape and one sharding.

    Attributes:
      path: of the first of them; "*" where their paths differ only by a number.
      also: the other trees that hold them ("mu", "nu").
      first: one of them.
      count: how many they are.
    """

    path: str
    also: tuple[str, ...]
    first: TensorModel
    count: int


def group_inputs(program: ProgramModel) -> list[TensorGroup]:
    """Groups a program's inputs: state that is updated first, then by size.

    Size is of the whole group, so that what fills the memory comes first.
    """
    tensors = program.inputs
    keys = [path_keys(tensor.path) for tensor in tensors]
    suffixes = _shared_suffixes(tensors, keys)
    members: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, (tensor, suffix) in enumerate(zip(tensors, suffixes, strict=True)):
        spec = tuple(map(tuple, tensor.spec))
        members[tuple(tensor.shape), spec, _numberless(suffix)].append(index)
    updated = {given for _, given in program.aliases}
    ranked = sorted(
        members.values(),
        key=lambda group: (
            group[0] not in updated,
            -sum(prod(tensors[i].shape) for i in group),
        ),
    )
    return [_group(group, tensors, keys, suffixes) for group in ranked]


def path_keys(path: str) -> Keys:
    """The parts of a pytree path: "[0]['w'].mu" is ("[0]", "['w']", ".mu")."""
    return tuple(_KEY.findall(path))


def ungrouped(program: ProgramModel) -> list[TensorGroup]:
    """Every input by itself, in order."""
    return [TensorGroup(tensor.path, (), tensor, 1) for tensor in program.inputs]


def _shared_suffixes(tensors: Sequence[TensorModel], keys: Sequence[Keys]) -> list[Keys]:
    """For each tensor, the longest end of its path that another of its shape has too."""
    owners: dict[tuple[object, ...], int] = defaultdict(int)
    for tensor, path in zip(tensors, keys, strict=True):
        for start in range(1, len(path)):
            owners[tuple(tensor.shape), path[start:]] += 1
    found = []
    for tensor, path in zip(tensors, keys, strict=True):
        shared = (
            path[s:] for s in range(1, len(path)) if owners[tuple(tensor.shape), path[s:]] > 1
        )
        found.append(next(shared, path))
    return found


def _numberless(path: Keys) -> Keys:
    return tuple(_NUMBER.sub("*", key) for key in path)


def _group(
    group: Sequence[int],
    tensors: Sequence[TensorModel],
    keys: Sequence[Keys],
    suffixes: Sequence[Keys],
) -> TensorGroup:
    first = min(group, key=lambda i: (len(keys[i]), "param" not in tensors[i].path))
    prefixes: dict[Keys, list[int]] = defaultdict(list)
    for index in group:
        prefix = keys[index][: len(keys[index]) - len(suffixes[index])]
        prefixes[_numberless(prefix)].append(index)
    root = next(alike for alike in prefixes.values() if first in alike)
    also = [prefix[-1] for prefix, alike in prefixes.items() if alike is not root and prefix]
    return TensorGroup(
        path=_common_path([keys[i] for i in root]),
        also=tuple(dict.fromkeys(key.strip(".[]'") for key in also)),
        first=tensors[first],
        count=len(group),
    )


def _common_path(paths: Sequence[Keys]) -> str:
    """One path for several that differ in numbers: "*" in place of each number that differs."""
    keys = []
    for alike in zip(*paths, strict=True):
        keys.append(alike[0] if len(set(alike)) == 1 else _NUMBER.sub("*", alike[0]))
    return "".join(keys)
