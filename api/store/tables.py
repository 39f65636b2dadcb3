"""The tables, the same on SQLite and Postgres."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)


class Instant(TypeDecorator[datetime]):
    """A moment in UTC; SQLite keeps no time zones, so that reading puts it back."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Every moment as UTC."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Moments with their zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Data(TypeDecorator[Any]):
    """JSON that keeps the order of its keys, for that of mesh axes means something.

    Names in a program may hold characters that Postgres refuses.
    """

    impl = sa.JSON(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        """The value without NULs, lone surrogates and numbers that are none in JSON."""
        return None if value is None else storable(value)


def storable(value: Any) -> Any:
    """JSON data that every database takes."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {storable(str(key)): storable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [storable(inner) for inner in value]
    return value


keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("secret_sha256", sa.String(64), nullable=False),
    sa.Column("scopes", Data, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("revoked_at", Instant),
    sa.Column("last_used_at", Instant),
    sa.Column("rate_limit_per_minute", sa.Integer),
    sa.Column("plan_quota_per_day", sa.Integer),
)

programs = sa.Table(
    "programs",
    metadata,
    sa.Column("owner", sa.String(200), primary_key=True),
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("nbytes", sa.BigInteger, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("facts", Data),
    sa.Column("error", Data),
    sa.Column("path", sa.String(200), nullable=False),
    sa.Index(None, "owner", "created_at", "id"),
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("key_id", sa.String(32)),
    sa.Column("request", Data, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("topology", sa.String(100)),
    sa.Column("model", sa.String(100)),
    sa.Column("program", sa.String(64)),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("started_at", Instant),
    sa.Column("finished_at", Instant),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("crashes", sa.Integer, nullable=False),
    sa.Column("lease_token", sa.String(64)),
    sa.Column("lease_holder", sa.String(200)),
    sa.Column("lease_until", Instant),
    sa.Column("events", sa.Integer, nullable=False),
    sa.Column("progress", Data, nullable=False),
    sa.Column("error", Data),
    sa.Column("summary", Data),
    sa.Column("files", Data, nullable=False),
    sa.Index(None, "status", "created_at"),
    sa.Index(None, "owner", "kind", "created_at", "id"),
    sa.Index(None, "kind", "created_at", "id"),
    sa.Index(None, "key_id", "created_at"),
    # The same work of the same owner is done once; what failed or was cancelled may be done anew.
    sa.Index(
        "uq_jobs_owner_digest_wanted",
        "owner",
        "digest",
        unique=True,
        sqlite_where=sa.text("status IN ('queued', 'running', 'succeeded')"),
        postgresql_where=sa.text("status IN ('queued', 'running', 'succeeded')"),
    ),
)

job_events = sa.Table(
    "job_events",
    metadata,
    sa.Column(
        "job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    ),
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("at", Instant, nullable=False),
    sa.Column("name", sa.String(16), nullable=False),
    sa.Column("data", Data, nullable=False),
)

comparisons = sa.Table(
    "comparisons",
    metadata,
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("request", Data, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("plans", Data, nullable=False),
    sa.Index(None, "owner", "created_at", "id"),
)
