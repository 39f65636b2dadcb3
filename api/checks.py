"""Requests that are sound: checked as far as can be before anything is queued."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from math import prod
from typing import Any

from shardwright.api.catalog import (
    Catalog,
    Inputs,
    checked_chip,
    checked_options,
)
from shardwright.api.schemas import (
    ComparisonRequest,
    EvaluationRequest,
    ModelChoice,
    PlanRequest,
)
from shardwright.api.store import Store
from shardwright.errors import InputError
from shardwright.hardware_profiles import Slice, meshes_for_shape, parse_slice
from shardwright.models.choices import combinations
from shardwright.planner.spec_patterns import OPEN, is_source_line

_MOST_REAL_AXES = 4
_MOST_PATTERNS = 200
_MOST_COMPARED = 1000
_LONGEST_COMPARED = 200
_LONGEST_PATH = 1024
_PATTERN_SECONDS = 1.0
Request = dict[str, Any]


class Checker:
    """Checks requests against what the service knows."""

    def __init__(self, store: Store, catalog: Catalog, job_seconds: float) -> None:
        self._store = store
        self._catalog = catalog
        self._job_seconds = job_seconds

    def plan(self, owner: str, body: PlanRequest) -> Request:
        """A plan's request with names in one form and defaults filled in.

        Raises:
          InputError: the slice, the model, its options, the program, the mesh or a pin is wrong.
        """
        chip = None if body.chip is None else checked_chip(body.chip)
        on = parse_slice(body.topology, chip)
        self._check_time(body.time_limit_s)
        if body.mesh is not None:
            check_mesh(on, body.mesh)
        target = self._target(owner, body.model, body.program)
        if body.pinned:
            self._check_pins(owner, target, body)
        if body.choices:
            if body.model is None:
                raise InputError(
                    "options can be chosen of reference models alone",
                    where="choices",
                    do="Leave them out, or plan each form of the program and compare",
                )
            combinations(body.model.name, body.model.options, body.choices)
        return target | {
            "choices": dict(body.choices),
            "topology": on.name,
            "mesh": None if body.mesh is None else dict(body.mesh),
            "pinned": dict(body.pinned),
            "memory_fraction": body.memory_fraction,
            "time_limit_s": body.time_limit_s,
            "seed": body.seed,
            "model_flops": body.model_flops,
            "chip": None if chip is None else chip.model_dump(mode="json"),
            **_layout(body),
        }

    def _check_pins(self, owner: str, target: Request, body: PlanRequest) -> None:
        mesh: Mapping[str, int] | None = body.mesh
        facts = None if target["program"] is None else self._facts(owner, target["program"])
        if mesh is None:
            # A program whose own shardings name a mesh is planned on that.
            mesh = None if facts is None else facts["mesh"]
            known = facts is not None or target["program"] is None
            if mesh is None and known and any(map(_axes, body.pinned.values())):
                raise InputError(
                    "pinned shardings name mesh axes, and no mesh is given",
                    where="pinned",
                    do='Give "mesh": {"data": 16, "model": 16} with the axes that the pins name',
                )
        if mesh is None and any(map(_axes, body.pinned.values())):
            return
        mesh = mesh or {}
        for path, spec in body.pinned.items():
            check_axes(spec, mesh, f"pinned {path}")
        inputs = self._inputs(owner, target)
        if inputs is not None:
            check_pins(body.pinned, inputs, mesh)

    def comparison(self, owner: str, body: ComparisonRequest) -> tuple[Request, dict[str, Request]]:
        """A comparison's request, and the request of each of its plans by topology.

        Raises:
          InputError: a slice, the model, its options or the program is wrong, or a slice is
            there twice.
        """
        self._check_time(body.time_limit_s)
        target = self._target(owner, body.model, body.program)
        search = {
            "memory_fraction": body.memory_fraction,
            "time_limit_s": body.time_limit_s,
            "seed": body.seed,
        }
        plans: dict[str, Request] = {}
        for topology in body.topologies:
            name = parse_slice(topology).name
            if name in plans:
                raise InputError(
                    f"{name} is there twice", where="topologies", do="Name each slice once"
                )
            fixed: Request = {
                "choices": {},
                "mesh": None,
                "pinned": {},
                "model_flops": None,
                "chip": None,
            }
            plans[name] = target | {"topology": name} | fixed | search
        return target | {"topologies": list(plans)} | search, plans

    def evaluation(self, owner: str, body: EvaluationRequest) -> Request:
        """An evaluation's request with names in one form.

        Raises:
          InputError: the slice, the model, its options, the program, the mesh or a sharding is
            wrong, or a pattern matches no argument.
        """
        chip = None if body.chip is None else checked_chip(body.chip)
        on = parse_slice(body.topology, chip)
        check_mesh(on, body.mesh)
        target = self._target(owner, body.model, body.program)
        for where, specs in (("in_specs", body.in_specs), ("out_specs", body.out_specs or {})):
            for path, spec in specs.items():
                check_axes(spec, body.mesh, f"{where} {path}")
        if body.in_specs:
            inputs = self._inputs(owner, target)
            if inputs is not None:
                check_patterns(body.in_specs, inputs, body.mesh)
        return target | {
            "topology": on.name,
            "mesh": dict(body.mesh),
            "in_specs": dict(body.in_specs),
            "out_specs": None if body.out_specs is None else dict(body.out_specs),
            "model_flops": body.model_flops,
            "chip": None if chip is None else chip.model_dump(mode="json"),
        }

    def _check_time(self, time_limit_s: float) -> None:
        if time_limit_s >= self._job_seconds:
            raise InputError(
                f"{time_limit_s:g} s of search would outlast the {self._job_seconds:g} s that a "
                "job may take here",
                where="time_limit_s",
                do="Give less",
            )

    def _target(self, owner: str, model: ModelChoice | None, program: str | None) -> Request:
        if model is not None:
            options = checked_options(model.name, model.options)
            return {"model": {"name": model.name, "options": options}, "program": None}
        found = self._store.programs.get(owner, program or "")
        if found is None:
            raise InputError(
                f"there is no program {program}",
                where="program",
                do="Upload it with POST /v1/programs first, with a key of the same owner",
            )
        if found.status == "invalid":
            error = found.error or {}
            raise InputError(
                f"the program cannot be planned: {error.get('what') or error.get('detail', '')}",
                where="program",
                do=str(error.get("do") or "Upload a jax.export artifact or StableHLO"),
            )
        return {"model": None, "program": program}

    def _inputs(self, owner: str, target: Request) -> Inputs | None:
        """The arguments of what is planned; None while a program is still looked into."""
        if target["model"] is not None:
            return self._catalog.inputs(target["model"]["name"], target["model"]["options"])
        facts = self._facts(owner, target["program"])
        if facts is None:
            return None
        return [(one["path"], one["shape"]) for one in facts["inputs"]]

    def _facts(self, owner: str, program: str) -> Mapping[str, Any] | None:
        found = self._store.programs.get(owner, program)
        return None if found is None else found.facts


def _layout(body: PlanRequest) -> Request:
    """A named layout; a free one is not told, so that what was planned before is found."""
    if body.layout == "free":
        return {}
    axes = body.logical_axes
    named = None if axes is None else {path: list(names) for path, names in axes.items()}
    return {"layout": body.layout, "logical_axes": named}


def check_mesh(on: Slice, mesh: Mapping[str, int]) -> None:
    """Refuses a mesh that cannot be laid on a slice.

    Raises:
      InputError: its sizes do not make the slice's devices, or it has too many axes.
    """
    # Layouts are found by trying, and their number grows fast with the axes.
    if sum(size > 1 for size in mesh.values()) > _MOST_REAL_AXES:
        raise InputError(
            f"the mesh has more than {_MOST_REAL_AXES} axes above size 1",
            where="mesh",
            do="Join some of its axes",
        )
    meshes_for_shape(on, mesh, limit=1)


def check_axes(spec: Sequence[Sequence[str]], mesh: Mapping[str, int], where: str) -> None:
    """Refuses a sharding that names axes wrongly.

    Raises:
      InputError: an axis is not in the mesh, is used twice, or the axes of one dimension are in
        another order than in the mesh.
    """
    order = list(mesh)
    seen: set[str] = set()
    for dim in spec:
        axes = [axis for axis in dim if axis != OPEN]
        for axis in axes:
            if axis not in mesh or axis in seen:
                problem = "is used twice" if axis in seen else "is not in the mesh"
                raise InputError(
                    f"axis {axis!r} {problem}",
                    where=where,
                    do=f"Use each of {', '.join(order)} once at most",
                )
            seen.add(axis)
        if list(axes) != sorted(axes, key=order.index):
            raise InputError(
                f"the axes {', '.join(axes)} of one dimension are in another order than the mesh",
                where=where,
                do=f"Name them in the order of the mesh: {', '.join(order)}",
            )


def check_pins(
    pinned: Mapping[str, Sequence[Sequence[str]]], inputs: Inputs, mesh: Mapping[str, int]
) -> None:
    """Refuses pins of arguments that are not there or that do not divide.

    Patterns, results and source lines are looked up by the job, which has the program.

    Raises:
      InputError: no argument has the path, or its shape does not suit the sharding.
    """
    shapes = dict(inputs)
    for path, spec in pinned.items():
        if path not in shapes:
            if "*" in path or path.startswith("result") or is_source_line(path):
                continue
            raise InputError(
                f"the program has no argument {path}",
                where="pinned",
                do=f"Use the path of one: {_near(path, shapes)}; or a source line, train.py:33",
            )
        _check_shape(spec, shapes[path], mesh, f"pinned {path}")


def check_patterns(
    specs: Mapping[str, Sequence[Sequence[str]]], inputs: Inputs, mesh: Mapping[str, int]
) -> None:
    """Refuses patterns that match no argument, and shardings that an argument cannot have.

    What takes longer than a moment is left to the job, which has a process and limits of its own.

    Raises:
      InputError: as said.
    """
    wild = [pattern for pattern in specs if "*" in pattern or "?" in pattern]
    if len(wild) > _MOST_PATTERNS:
        raise InputError(
            f"{len(wild)} patterns have * or ?",
            where="in_specs",
            do=f"Give at most {_MOST_PATTERNS} such patterns; paths written out are not counted",
        )
    order = {pattern: place for place, pattern in enumerate(specs)}
    matched: set[str] = set()
    until = time.monotonic() + _PATTERN_SECONDS
    for path, shape in inputs:
        if time.monotonic() > until or len(path) > _LONGEST_PATH:
            return
        matching = [pattern for pattern in wild if matches(pattern, path)]
        if path in specs and path not in wild:
            matching = sorted([*matching, path], key=order.__getitem__)
        matched.update(matching)
        if matching:
            _check_shape(specs[matching[0]], shape, mesh, f"in_specs {path}")
    for pattern in specs:
        if pattern not in matched:
            raise InputError(
                f"no argument's path matches {pattern}",
                where="in_specs",
                do=f"Paths look like {_near(pattern, [path for path, _ in inputs])}",
            )


def matches(pattern: str, text: str) -> bool:
    """Whether a text has the form of a pattern: * is any text, ? one character.

    Takes time in proportion to the product of both lengths, whatever the pattern, which a regular
    expression would not.
    """
    first, *later = pattern.split("*")
    if not later:
        return len(first) == len(text) and _find(first, text, 0) == 0
    *middle, last = later
    end = len(text) - len(last)
    if _find(first, text[: len(first)], 0) != 0 or _find(last, text[max(end, 0) :], 0) != 0:
        return False
    at = len(first)
    for piece in middle:
        found = _find(piece, text[:end], at)
        if found < 0:
            return False
        at = found + len(piece)
    return at <= end


def _find(piece: str, text: str, start: int) -> int:
    """Where a piece begins in a text, from a start on; ? is any character. -1: nowhere."""
    if "?" not in piece:
        return text.find(piece, start)
    for at in range(start, len(text) - len(piece) + 1):
        window = text[at : at + len(piece)]
        if all(wanted in ("?", given) for wanted, given in zip(piece, window, strict=True)):
            return at
    return -1


def _check_shape(
    spec: Sequence[Sequence[str]], shape: Sequence[int], mesh: Mapping[str, int], where: str
) -> None:
    if len(spec) > len(shape):
        raise InputError(
            f"the sharding has {len(spec)} entries and the tensor {len(shape)} dimensions",
            where=where,
            do="Give at most one entry a dimension",
        )
    for axes, size in zip(spec, shape, strict=False):
        parts = prod(mesh[axis] for axis in axes if axis != OPEN)
        if size % parts:
            raise InputError(
                f"a dimension of {size} is cut in {parts} parts, which does not divide",
                where=where,
                do="Use axes whose sizes divide the dimension",
            )


def _axes(spec: Sequence[Sequence[str]]) -> set[str]:
    return {axis for dim in spec for axis in dim if axis != OPEN}


def _near(text: str, known: Iterable[str]) -> str:
    paths = list(islice(known, _MOST_COMPARED))
    if len(text) > _LONGEST_COMPARED:  # comparing takes time by the square of it, or more
        return ", ".join(paths[:3])
    return ", ".join(get_close_matches(text, paths, n=3, cutoff=0.3) or paths[:3])
