"""The database: sessions that read, sessions that write, and the time that all servers share."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import (
    ArgumentError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.orm import Session

from shardwright.errors import InputError

_SQLITE_WAIT_MS = 30_000
_POSTGRES_PATIENCE = {"connect_timeout": 10}
"""Seconds after which a machine that does not answer counts as away."""
_WRITES = "shardwright_writes"
_SUBMIT_LOCK = 0x5348_5244
"""Key of the advisory lock under which Postgres bounds the queue ("SHRD")."""


class Database:
    """Connections to SQLite or Postgres.

    SQLite has one writer at a time. Threads of this process take turns by a lock, for SQLite's own
    waiting is a lottery that some thread loses; other processes are waited for by SQLite.
    """

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self._writers = threading.Lock()

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:
        """A session for reading."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that writes: committed at the end, undone by any exception."""
        turn = self._writers if self.is_sqlite else contextlib.nullcontext()
        with turn, self.engine.connect() as connection:
            writing = connection.execution_options(**{_WRITES: True})
            with writing.begin(), Session(writing) as session:
                yield session

    def now(self, session: Session) -> datetime:
        """The time by one clock: the database's, which all servers share."""
        if self.is_sqlite:
            return datetime.now(UTC)
        told: datetime = session.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        return told.astimezone(UTC)

    def lock_submissions(self, session: Session) -> None:
        """Lets one transaction at a time count the queue and add to it."""
        if not self.is_sqlite:
            session.execute(sa.select(sa.func.pg_advisory_xact_lock(_SUBMIT_LOCK)))

    def close(self) -> None:
        """Closes every connection."""
        self.engine.dispose()


def _engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "postgresql":
            # Three servers fit in the 100 connections that Postgres takes by default.
            patience = {} if "connect_timeout" in parsed.query else _POSTGRES_PATIENCE
            return sa.create_engine(
                parsed, pool_size=8, max_overflow=24, pool_pre_ping=True, connect_args=patience
            )
        if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
            engine = sa.create_engine(
                parsed, pool_size=16, max_overflow=48, connect_args={"check_same_thread": False}
            )
            _watch_file(engine, Path(parsed.database))
            sa.event.listen(engine, "connect", _on_sqlite_connect)
            sa.event.listen(engine, "begin", _on_sqlite_begin)
            return engine
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise InputError(
            f"the database's URL cannot be used ({error})",
            where="SHARDWRIGHT_DATABASE_URL",
            do="Write postgresql+psycopg://user@host/name (with the extra postgres installed), "
            "or sqlite:////path/to/file",
        ) from None
    raise InputError(
        f"{parsed.render_as_string(hide_password=True)} is neither Postgres nor a file of SQLite",
        where="SHARDWRIGHT_DATABASE_URL",
        do="Write postgresql+psycopg://user@host/name or sqlite:////path/to/file",
    )


def _watch_file(engine: sa.Engine, path: Path) -> None:
    """Refuses to go on where the file of the first connection is not there any more.

    Its connections would write to a file that nobody finds, and new ones to an empty one.
    """
    first: list[int] = []

    def check(*_: Any) -> None:
        if first and _inode(path) != first[0]:
            reason = sqlite3.OperationalError(f"the database {path} was moved away or replaced")
            raise OperationalError("", None, reason)

    def note(*_: Any) -> None:
        if not first:
            first.append(_inode(path))

    sa.event.listen(engine, "do_connect", check)
    sa.event.listen(engine, "connect", note)
    sa.event.listen(engine, "checkout", check)


def _inode(path: Path) -> int:
    """The number of a file; 0 where there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _on_sqlite_connect(connection: Any, _record: Any) -> None:
    # The driver must not begin transactions by itself: see _on_sqlite_begin.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout={_SQLITE_WAIT_MS}",
        "journal_mode=WAL",
        # An accepted job must outlive a loss of power too.
        "synchronous=FULL",
        "foreign_keys=ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _on_sqlite_begin(connection: sa.Connection) -> None:
    # A transaction that reads first and writes later fails at once where another has written in
    # between, however long it may wait: one that will write takes the lock at its start.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def ping(database: Database) -> None:
    """Asks the database for an answer.

    Raises:
      SQLAlchemyError: it gives none.
    """
    with database.read() as session:
        session.execute(sa.select(1))


def unreachable(url: str, error: SQLAlchemyError) -> InputError:
    """A database that cannot be opened, as an error for the operator."""
    reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
    shown = sa.make_url(url).render_as_string(hide_password=True)
    return InputError(
        f"the database cannot be opened ({reason})",
        where=shown,
        do="Start it, or correct SHARDWRIGHT_DATABASE_URL",
    )
