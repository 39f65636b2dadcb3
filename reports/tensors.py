"""Tensors that are sharded alike, told once.

An optimizer's moments have the shape and mostly the sharding of their parameter, and so have the
same parameters of other layers. They differ only in the first part of their path and in the
numbers inside it, which is how they are found here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
      path: of the first of them; "*" where their paths differ by a number, or the numbers, as in
        "block2_{1..5}", where other groups' paths differ from theirs by numbers only.
      also: the other trees that hold them ("mu", "nu").
      first: one of them.
      count: how many they are.
      paths: of those that `path` names, in parts.
    """

    path: str
    also: tuple[str, ...]
    first: TensorModel
    count: int
    paths: tuple[Keys, ...] = field(default=(), repr=False)


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
    return _told_apart([_group(group, tensors, keys, suffixes) for group in ranked])


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
        path=_common_path([keys[i] for i in root], lambda numbers: "*"),
        also=tuple(dict.fromkeys(key.strip(".[]'") for key in also)),
        first=tensors[first],
        count=len(group),
        paths=tuple(keys[i] for i in root),
    )


def _told_apart(groups: Sequence[TensorGroup]) -> list[TensorGroup]:
    """The groups with paths that name no tensor of another group."""
    alike = Counter(_numberless(group.paths[0]) for group in groups)
    found = [
        group
        if alike[_numberless(group.paths[0])] == 1
        else replace(group, path=_common_path(group.paths, _number_set))
        for group in groups
    ]
    called = Counter(group.path for group in found)
    return [
        group if called[group.path] == 1 else replace(group, path=_listed(group)) for group in found
    ]


def _listed(group: TensorGroup) -> str:
    more = f" and {len(group.paths) - 1} more" if group.paths[1:] else ""
    return "".join(group.paths[0]) + more


def _common_path(paths: Sequence[Keys], say: Callable[[Sequence[int]], str]) -> str:
    """One path for several that differ in numbers, with `say` of each number that differs."""
    keys = []
    for alike in zip(*paths, strict=True):
        texts = iter(_NUMBER.split(alike[0]))
        key = next(texts)
        for numbers in zip(*map(_NUMBER.findall, alike), strict=True):
            key += numbers[0] if len(set(numbers)) == 1 else say(sorted(set(map(int, numbers))))
            key += next(texts)
        keys.append(key)
    return "".join(keys)


def _number_set(numbers: Sequence[int]) -> str:
    """Numbers in order, in short: 1, 2, 3, 5 is "{1..3,5}"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    told = [f"{run[0]}..{run[-1]}" if run[2:] else ",".join(map(str, run)) for run in runs]
    return f"{{{','.join(told)}}}"
