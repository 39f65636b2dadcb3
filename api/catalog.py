"""What the service knows by name: reference models and slices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shardwright.errors import InputError
from shardwright.hardware_profiles import ChipProfile, Slice, parse_slice
from shardwright.hardware_profiles.chip import parse_chip
from shardwright.models import registry

_DESCRIBE_SECONDS = 60.0
_MOST_DESCRIBED = 256
_MOST_SLICES = 256
_MOST_SHAPES = 1000
_MOST_CUBES = 1000
_MOST_CHIPS = 1 << 16

Inputs = Sequence[tuple[str, Sequence[int]]]
"""Path and shape of each argument of a program."""


def checked_slice(topology: str, chip: ChipProfile | None = None) -> Slice:
    """A slice that people can have.

    Args:
      chip: a profile of the user's own, instead of the bundled one.

    Raises:
      InputError: it is not one; lists the legal ones, nearest first.
    """
    on = parse_slice(topology, chip)
    if on.count > _MOST_SLICES:
        raise InputError(
            f"{on.count} slices are more than a plan is made for",
            where="topology",
            do=f"Give at most {_MOST_SLICES}",
        )
    return on


def checked_chip(profile: dict[str, Any]) -> ChipProfile:
    """A user's own chip profile.

    Raises:
      InputError: it is malformed, or has slices out of all proportion.
    """
    chip = parse_chip(profile, where="chip")
    rule = chip.slices.value
    cubes = (rule.largest_cube_slice_chips or 0) / (rule.cube_edge or 1) ** 3
    largest = max(map(prod, rule.shapes), default=rule.largest_cube_slice_chips or 0)
    if len(rule.shapes) > _MOST_SHAPES or cubes > _MOST_CUBES or largest > _MOST_CHIPS:
        raise InputError(
            "the profile has slices out of all proportion",
            where="chip.slices",
            do=f"List at most {_MOST_SHAPES} shapes of at most {_MOST_CHIPS} chips, and slices of "
            f"at most {_MOST_CUBES} cubes",
        )
    return chip


def checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given of a model, as its own types.

    Raises:
      InputError: an unknown model or option, a wrong value, or sizes that disagree.
    """
    parsed = registry.checked_options(name, dict(options))
    return parsed.model_dump(mode="json", include=set(options))


class Catalog:
    """The reference models, each traced once for what only tracing tells."""

    def __init__(self) -> None:
        self._described: OrderedDict[str, dict[str, Any]] = OrderedDict()
        # One child at a time: it is short-lived, and requests must not multiply processes.
        self._lock = threading.Lock()

    def models(self) -> list[dict[str, Any]]:
        """Every reference model with its default options."""
        return self._describe([(name, {}) for name in registry.model_names()])

    def inputs(self, name: str, options: Mapping[str, Any]) -> Inputs:
        """Paths and shapes of the arguments of a model's train step.

        Raises:
          InputError: the model takes too long or too much memory to trace.
        """
        (found,) = self._describe([(name, dict(options))])
        return [(path, shape) for path, shape in found["inputs"]]

    def _describe(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        names = [json.dumps(one, sort_keys=True) for one in asked]
        with self._lock:
            if any(name not in self._described for name in names):
                made = _in_child([{"name": name, "options": options} for name, options in asked])
                self._described.update(zip(names, made, strict=True))
            found = [self._described[name] for name in names]
            while len(self._described) > _MOST_DESCRIBED:
                self._described.popitem(last=False)
        return found


def _in_child(asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("XLA_FLAGS", None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "shardwright.api.describe"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_DESCRIBE_SECONDS,
            env=environment,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        raise InputError(
            "a model of these sizes takes too long or too much memory to trace",
            where="model.options",
            do="Take fewer layers, or plan it without pins",
        ) from None
    return list(json.loads(done.stdout))
