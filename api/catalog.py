"""What the service knows by name: reference models and slices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shardwright.api.problems import problem
from shardwright.errors import InputError
from shardwright.hardware_profiles import ChipProfile
from shardwright.hardware_profiles.chip import parse_chip
from shardwright.models import registry

_DESCRIBE_SECONDS = 60.0
_MOST_DESCRIBED = 256
_REFUSED_SECONDS = 600.0
"""How long it is remembered that a model could not be traced: the machine may have been busy."""
_MOST_WAITING = 8
_RETRY_S = 10
_MOST_SHAPES = 1000
_MOST_CUBES = 1000
_MOST_CHIPS = 1 << 16

Inputs = Sequence[tuple[str, Sequence[int]]]
"""Path and shape of each argument of a program."""


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
        self._refused: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()
        # One child at a time: it is short-lived, and requests must not multiply processes. Few may
        # wait for their turn, as each holds a thread that other requests need.
        self._turn = threading.Lock()
        self._room = threading.BoundedSemaphore(_MOST_WAITING)

    def models(self) -> list[dict[str, Any]]:
        """Every reference model with its default options."""
        return self._describe([(name, {}) for name in registry.model_names()])

    def inputs(self, name: str, options: Mapping[str, Any]) -> Inputs:
        """Paths and shapes of the arguments of a model's train step.

        Raises:
          InputError: the model takes too long or too much memory to trace.
          Problem: others are being traced; it may be asked again later.
        """
        (found,) = self._describe([(name, dict(options))])
        return [(path, shape) for path, shape in found["inputs"]]

    def _describe(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        names = [json.dumps(one, sort_keys=True) for one in asked]
        if (known := self._known(names)) is not None:
            return known
        if not self._room.acquire(blocking=False):
            raise problem(
                "unavailable",
                "other models are being traced",
                where="model",
                do="Try again in some seconds, or plan it without pins",
                headers={"Retry-After": str(_RETRY_S)},
            )
        try:
            with self._turn:
                # Whoever had the turn before may have asked for the same.
                return self._known(names) or self._trace(names, asked)
        finally:
            self._room.release()

    def _known(self, names: Sequence[str]) -> list[dict[str, Any]] | None:
        """What is remembered of all of them; None where of one nothing is.

        Raises:
          InputError: one was refused not long ago.
        """
        with self._lock:
            if any(self._refused.get(name, 0.0) > time.monotonic() for name in names):
                raise _too_large()
            if not all(name in self._described for name in names):
                return None
            return [self._described[name] for name in names]

    def _trace(
        self, names: Sequence[str], asked: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        try:
            made = _in_child([{"name": name, "options": options} for name, options in asked])
        except InputError:
            with self._lock:
                if len(names) == 1:
                    self._refused[names[0]] = time.monotonic() + _REFUSED_SECONDS
                    _bound(self._refused)
            raise
        with self._lock:
            self._described.update(zip(names, made, strict=True))
            _bound(self._described)
        return made


def _bound(remembered: OrderedDict[str, Any]) -> None:
    while len(remembered) > _MOST_DESCRIBED:
        remembered.popitem(last=False)


def _in_child(asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("XLA_FLAGS", None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "shardwright.api.describe", str(os.getpid())],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_DESCRIBE_SECONDS,
            env=environment,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        raise _too_large() from None
    return list(json.loads(done.stdout))


def _too_large() -> InputError:
    return InputError(
        "a model of these sizes takes too long or too much memory to trace",
        where="model.options",
        do="Take fewer layers, or plan it without pins",
    )
