"""What a name means in a plan: an argument by its path, or an operation by its source line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from shardwright.errors import InputError
from shardwright.planner.constraints import ValueConstraint
from shardwright.planner.plan_schema import PlanModel


@dataclass(frozen=True)
class Target:
    """What is explained: an argument by its position, or the value of a constraint.

    Attributes:
      index: position of an argument; None for the result of an operation.
      place: position of its constraint in the plan; None where it has none.
    """

    name: str
    index: int | None
    place: int | None


def find_targets(
    name: str, plan: PlanModel, constraints: Sequence[ValueConstraint]
) -> list[Target]:
    """What a name means: arguments by path, else results of operations by source line.

    Raises:
      InputError: nothing has it; says what is near.
    """
    inputs = plan.program.inputs
    places = {c.site.index: i for i, c in enumerate(constraints) if c.site.kind == "argument"}
    paths = [tensor.path for tensor in inputs]
    wanted = _parts(name)
    exact = [i for i, path in enumerate(paths) if path == name]
    ending = [
        i for i, path in enumerate(paths) if wanted and _parts(path)[-len(wanted) :] == wanted
    ]
    if found := exact or sorted(ending, key=lambda i: ("param" not in paths[i], i)):
        return [Target(paths[i], i, places.get(i)) for i in found]
    line, _, number = name.partition("#")
    results = [
        Target(_op_name(c), None, place)
        for place, c in enumerate(constraints)
        if c.site.kind == "result" and c.site.key is not None and _at_line(line.strip(), c)
    ]
    results = [replace(t, name=f"{t.name}#{n}") for n, t in enumerate(results, start=1)]
    if number.isdecimal() and 1 <= int(number) <= len(results):
        return [results[int(number) - 1]]
    if results and not number:
        return results
    lines = list(dict.fromkeys(c.source for c in constraints if c.source))
    near = get_close_matches(name, [*paths, *lines], n=3, cutoff=0.4) or paths[:3]
    raise InputError(
        "the plan has no argument and no operation of this name",
        where=name,
        do=f"Give a path or a source line, such as {', '.join(near)}",
    )


def _op_name(constraint: ValueConstraint) -> str:
    key = constraint.site.key
    return f"{key.op.removeprefix('stablehlo.') if key else ''} at {constraint.source}"


def _at_line(name: str, constraint: ValueConstraint) -> bool:
    """Whether a name is the end of a constraint's source line, after its operation or not."""
    op, _, line = name.rpartition(" at ")
    at_end = ":" in line and f"/{constraint.source}".endswith(("/" + line.lstrip("/"), line))
    return at_end and (not op or _op_name(constraint).startswith(f"{op} at "))


def _parts(path: str) -> list[str]:
    """The keys of a path, however it is written: "[0]['w'].mu" and "0/w/mu" are alike."""
    return re.findall(r"[^\[\]'\"./\s]+", path)
