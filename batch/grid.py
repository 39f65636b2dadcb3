"""A grid of plans: every combination of models, options and slices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shardwright.errors import InputError

_MOST_POINTS = 100_000


class Point(BaseModel):
    """One plan of a sweep.

    Attributes:
      target: a reference model, "module:function" or the path of a program.
      args: "module:name" of a function's arguments.
      donate: positions of its donated arguments.
      options: of a reference model.
      topology: a slice.
      memory_fraction, time_limit_s, seed: as for `plan`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ignored_types=(cached_property,))

    target: str
    args: str | None = None
    donate: tuple[int, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    topology: str
    memory_fraction: float = 0.9
    time_limit_s: float = 12.0
    seed: int = 0

    @cached_property
    def key(self) -> str:
        """Of the point and of the versions that plan it; the same in every run."""
        from shardwright.version import VERSION

        text = json.dumps([VERSION, self.model_dump(mode="json")], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def describe(self) -> str:
        """As people read it: "llama3-8b on v5e:8x8, batch=128"."""
        told = [f"{name}={value}" for name, value in self.options.items()]
        return ", ".join([f"{self.target} on {self.topology}", *told])


def grid(
    targets: Sequence[str],
    topologies: Sequence[str],
    options: Mapping[str, Sequence[Any]] | None = None,
    **every: Any,
) -> list[Point]:
    """Every combination, options of one model together, so that each program is traced once.

    Args:
      targets: reference models or other targets.
      topologies: slices.
      options: name of a model's option -> its values.
      every: further fields of every point.

    Raises:
      InputError: something has no values, or there are too many points.
    """
    options = options or {}
    for name, values in {"models": targets, "topologies": topologies, **options}.items():
        if not values:
            raise InputError(f"{name} has no values", where="sweep", do="Give at least one")
    points = [
        Point(
            target=target,
            topology=topology,
            options=dict(zip(options, chosen, strict=True)),
            **every,
        )
        for target in targets
        for chosen in product(*options.values())
        for topology in topologies
    ]
    if len(points) > _MOST_POINTS:
        raise InputError(
            f"{len(points):,} points are too many", where="sweep", do="Give fewer values"
        )
    return list({point.key: point for point in points}.values())
