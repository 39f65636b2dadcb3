"""The jobs that continuous integration plans: `shardwright.toml`."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from shardwright.errors import InputError

CONFIG_NAME = "shardwright.toml"
LOCK_NAME = "shardwright.lock.json"

Part = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[\w.+-]+$")]
SpecEntry = str | list[str]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Budget(_Table):
    """What a job may cost at most; what is not given is not checked.

    Attributes:
      step_time_s: largest step time, seconds.
      memory_fraction: largest part of a device's memory at its fullest moment.
      mfu: least MFU, as a part of 1.
      cost_per_step: most money of a step, in the currency of the prices.
      cost_per_million_tokens: most money of a million tokens.
    """

    step_time_s: PositiveFloat | None = None
    memory_fraction: Part | None = None
    mfu: Part | None = None
    cost_per_step: PositiveFloat | None = None
    cost_per_million_tokens: PositiveFloat | None = None

    @property
    def needs_prices(self) -> bool:
        """Whether it says anything of money."""
        return self.cost_per_step is not None or self.cost_per_million_tokens is not None


class Job(_Table):
    """One program on some slices.

    Attributes:
      target: "pkg.train:step", the path of a jax.export artifact or StableHLO file relative to
        the configuration, or a reference model.
      args: "pkg.train:example_args" of a function.
      donate: positions of arguments whose buffers the results take over.
      options: of a reference model.
      topologies: slices to plan it for.
      mesh: axis -> size, where the mesh must be this one.
      pinned: path of an argument or result, or source line -> its sharding: one entry a dimension
        ("None", an axis or a list of axes, "?" last where more may be added), or all in one text,
        "data,None".
      state: patterns of the paths of saved state ("*" is any text); where empty, the arguments
        whose buffers results take over.
      memory_fraction, time_limit_s, seed: as for `plan`.
      tokens_per_step: of a program that is not a reference model.
      tolerance: a step may be slower than the locked one by this part of it.
      allow_resharding: lets shardings of saved state change.
    """

    target: Annotated[str, Field(min_length=1)]
    args: str | None = None
    donate: tuple[Annotated[int, Field(ge=0)], ...] = ()
    options: dict[str, Any] = {}
    topologies: Annotated[tuple[str, ...], Field(min_length=1)]
    mesh: dict[str, PositiveInt] | None = None
    pinned: dict[str, str | list[SpecEntry]] = {}
    state: tuple[str, ...] = ()
    memory_fraction: Part = 0.9
    time_limit_s: PositiveFloat = 12.0
    seed: Annotated[int, Field(ge=0)] = 0
    tokens_per_step: PositiveInt | None = None
    tolerance: Annotated[float, Field(ge=0)] = 0.05
    allow_resharding: bool = False
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _pins_have_a_mesh(self) -> Self:
        if self.pinned and self.mesh is None:
            raise ValueError("pinned shardings name mesh axes: give mesh too")
        return self


class Config(_Table):
    """The whole file.

    Attributes:
      prices: path of a prices file, relative to the configuration.
      defaults: values of jobs that do not give their own.
      jobs: by name.
    """

    prices: str | None = None
    defaults: dict[str, Any] = {}
    jobs: Annotated[dict[Name, Job], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _defaults_go_to_every_job(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        defaults, jobs = raw.get("defaults", {}), raw.get("jobs", {})
        if not isinstance(defaults, dict) or not isinstance(jobs, dict):
            return raw
        unknown = defaults.keys() - Job.model_fields.keys()
        if unknown:
            raise ValueError(f"defaults: no job has {', '.join(sorted(unknown))}")
        filled = {
            name: {**defaults, **job} if isinstance(job, dict) else job
            for name, job in jobs.items()
        }
        return {**raw, "jobs": filled} if filled else raw

    @model_validator(mode="after")
    def _money_has_prices(self) -> Self:
        for name, job in self.jobs.items():
            if job.budget.needs_prices and self.prices is None:
                raise ValueError(f"jobs.{name}.budget is of money: give prices, a file's path")
        return self


def load_config(path: Path) -> Config:
    """Reads the jobs.

    Raises:
      InputError: the file is missing or not TOML, or a key or value in it is wrong; says which.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"the jobs cannot be read ({error.strerror})",
            where=str(path),
            do=f"Write {CONFIG_NAME} with a table [jobs.NAME], or give --config",
        ) from None
    except ValueError as error:
        raise InputError(f"this is not TOML ({error})", where=str(path), do="Correct it") from None
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise InputError(
            "; ".join(
                _fault(fault["loc"], fault["msg"], fault["type"]) for fault in error.errors()
            ),
            where=str(path),
            do="Correct these keys; docs/ci.md lists all",
        ) from None


def _fault(location: tuple[int | str, ...], message: str, kind: str) -> str:
    key = ".".join(str(part) for part in location if part != "[key]")
    if kind == "extra_forbidden":
        known = _keys_at(location[:-1])
        near = get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return f"{key}: there is no such key; {hint}"
    if kind in ("missing", "too_short"):
        return f"{key}: {'it is not given' if kind == 'missing' else 'there is none'}"
    reason = message.removeprefix("Value error, ")
    return f"{key}: {reason[:1].lower()}{reason[1:]}" if key else reason


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    if location[-1:] == ("budget",):
        return [*Budget.model_fields]
    return [*(Job if location[:1] == ("jobs",) else Config).model_fields]
