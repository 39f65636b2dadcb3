"""The form that asks for plans, read into the bodies that /v1 takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shardwright.api.problems import invalid
from shardwright.api.schemas import ComparisonRequest, PlanRequest
from shardwright.axis_names import is_axis_name
from shardwright.errors import InputError

_COUNTS = ("batch", "sequence", "layers")
DEFAULTS: dict[str, str] = {
    "model": "llama3-8b",
    "slices": "",
    "batch": "",
    "sequence": "",
    "layers": "",
    "remat": "",
    "options": "",
    "mesh": "",
    "memory_fraction": "0.9",
    "time_limit_s": "12",
    "seed": "0",
}
"""What the fields hold at first."""
_WHERE_EMPTY = DEFAULTS | {"model": "", "slices": ""}


def fields_of(request: Mapping[str, Any]) -> dict[str, str]:
    """The fields that would ask for the same again, where the form can; those left alone, not."""
    model = request.get("model") or {}
    options = dict(model.get("options") or {})
    mesh = request.get("mesh") or {}
    fields = {
        "model": str(model.get("name", "")),
        "slices": str(request.get("topology", "")),
        "mesh": ",".join(f"{axis}={size}" for axis, size in mesh.items()),
    }
    fields |= {name: str(options.pop(name)) for name in (*_COUNTS, "remat") if name in options}
    fields["options"] = "\n".join(f"{name}={json.dumps(value)}" for name, value in options.items())
    for name in ("memory_fraction", "time_limit_s", "seed"):
        if name in request:
            fields[name] = f"{request[name]:g}"
    return {name: value for name, value in fields.items() if value != DEFAULTS[name]}


def read_request(fields: Mapping[str, str]) -> PlanRequest | ComparisonRequest:
    """What a form asks for: one slice is a plan, several are a comparison.

    Raises:
      InputError, Problem: a field is wrong; says which.
    """
    given = {name: fields.get(name, "").strip() or empty for name, empty in _WHERE_EMPTY.items()}
    slices = [name for name in re.split(r"[,\s]+", given["slices"]) if name]
    if not slices:
        raise InputError(
            "no slice is given", where="slices", do="Name one such as v5e:16x16, or several"
        )
    body: dict[str, Any] = {
        "model": {"name": given["model"], "options": _options(given)},
        "memory_fraction": _number(given, "memory_fraction", float),
        "time_limit_s": _number(given, "time_limit_s", float),
        "seed": _number(given, "seed", int),
    }
    try:
        if len(slices) > 1:
            if given["mesh"]:
                raise InputError(
                    "a mesh is of one slice, and several are given",
                    where="mesh",
                    do="Leave it empty, or name one slice",
                )
            return ComparisonRequest.model_validate(body | {"topologies": slices})
        mesh = _mesh(given["mesh"]) if given["mesh"] else None
        return PlanRequest.model_validate(body | {"topology": slices[0], "mesh": mesh})
    except ValidationError as error:
        raise invalid(error.errors(), "Correct it and send the form again") from None


def _options(given: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for line in given["options"].splitlines():
        name, equals, text = (part.strip() for part in line.partition("="))
        if not line.strip():
            continue
        if not equals or not name:
            raise InputError(
                f"{line.strip()!r} is not name=value",
                where="more options",
                do="Write one option a line, such as d_ff=14336",
            )
        options[name] = _value(text)
    for name in _COUNTS:
        if given[name]:
            options[name] = _number(given, name, int)
    if given["remat"]:
        options["remat"] = given["remat"]
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _number(given: Mapping[str, str], name: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(given[name].replace(",", ""))
    except ValueError:
        raise InputError(
            f"{given[name]!r} is not a {'whole ' if kind is int else ''}number",
            where=name.replace("_", " ").removesuffix(" s"),
            do="Write it in digits",
        ) from None


def _mesh(text: str) -> dict[str, int]:
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not is_axis_name(name) or not size.isdecimal() or name in mesh:
            raise InputError(
                f"{text!r} is not a list of axis=size",
                where="mesh",
                do="Write it like data=16,model=16, each axis once",
            )
        mesh[name] = int(size)
    return mesh
