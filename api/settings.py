"""Settings of the planning service: environment variables that begin with SHARDWRIGHT_."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shardwright.errors import InputError

_PREFIX = "SHARDWRIGHT_"
_GIB = 1 << 30


def default_data_dir() -> Path:
    """Where a program of this user keeps its data on this platform."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "shardwright"
    base = os.environ.get("XDG_DATA_HOME", "")
    # The XDG rules say that a relative path there counts as none.
    return (Path(base) if base.startswith("/") else Path.home() / ".local/share") / "shardwright"


class Settings(BaseSettings):
    """How the service runs; each field is set by SHARDWRIGHT_ and its name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True
    )

    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="folder of the embedded database, of files and of what workers write",
    )
    database_url: str = Field(
        "", description="SQLAlchemy URL (postgresql+psycopg://...); empty: SQLite in data_dir"
    )
    files_url: str = Field(
        "",
        description="fsspec URL of programs and plans (gs://..., s3://...); empty: data_dir/files",
    )
    host: str = Field("127.0.0.1", description="address to bind; others than loopback need keys")
    port: int = Field(8080, ge=0, le=65535, description="port to bind; 0 takes a free one")
    engine: Literal["local", "ray"] = Field(
        "local", description="where jobs run: processes of this machine, or a Ray cluster"
    )
    ray_address: str | None = Field(
        None, description="address of the Ray cluster; empty: as Ray itself decides"
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="jobs that run at once; empty: the cores of this machine, or of the cluster",
    )
    queue_limit: int = Field(1000, ge=1, description="jobs that may wait; more are refused")
    job_memory_bytes: int = Field(
        8 * _GIB, ge=_GIB // 2, description="resident memory of a worker at which its job ends"
    )
    job_seconds: float = Field(
        1800.0, gt=0, description="wall time of a job, in seconds, after which it ends"
    )
    max_upload_bytes: int = Field(256 << 20, ge=1, description="size of the largest program")
    rate_limit_per_minute: int = Field(
        600,
        ge=1,
        description="requests of a key in a minute, where the key has no limit of its own",
    )
    plan_quota_per_day: int = Field(
        1000, ge=1, description="plans of a key in 24 hours, where the key has no quota of its own"
    )
    keep_events: int = Field(
        500, ge=1, description="progress events that are kept of each job, the newest"
    )
    keep_days: float | None = Field(
        None,
        ge=1,
        description="days after which finished plans, evaluations and comparisons are deleted, and "
        "programs that none of them names; empty: never",
    )
    lease_seconds: float = Field(
        30.0,
        gt=0,
        description="seconds after which the jobs of a server that is not heard of are taken over",
    )
    prices_file: Path | None = Field(
        None, description="TOML or JSON file of prices of chips, for costs in comparisons"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the least that is logged"
    )

    @model_validator(mode="before")
    @classmethod
    def _lower_names(cls, values: Any) -> Any:
        """Names of engines and levels are the same in capitals."""
        if isinstance(values, dict):
            for name in ("engine", "log_level"):
                if isinstance(values.get(name), str):
                    values[name] = values[name].lower()
        return values

    @model_validator(mode="after")
    def _absolute(self) -> Self:
        # Workers have other working directories.
        object.__setattr__(self, "data_dir", self.data_dir.expanduser().absolute())
        return self

    @property
    def resolved_database_url(self) -> str:
        """The database's URL with the default filled in."""
        return self.database_url or f"sqlite:///{self.data_dir / 'shardwright.db'}"

    @property
    def resolved_files_url(self) -> str:
        """The URL of programs and plans with the default filled in."""
        return self.files_url or f"file://{self.data_dir / 'files'}"


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment, with overrides.

    Raises:
      InputError: a value is wrong; one line names the variable.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        meaning = Settings.model_fields[name].description if name in Settings.model_fields else ""
        raise InputError(
            f"{first['input']!r} is wrong: {first['msg'][0].lower()}{first['msg'][1:]}",
            where=f"{_PREFIX}{name.upper()}",
            do=f"It is the {meaning}" if meaning else "See docs/service.md for the settings",
        ) from None
