"""Brings a database to the schema of this version."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from shardwright.errors import InputError
from shardwright.version import VERSION

_SCRIPTS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x5348_5245
_WRITES = {"shardwright_writes": True}


def migrate(engine: sa.Engine, revision: str = "head") -> None:
    """Moves the schema up to a revision, in one transaction that servers take turns in.

    Raises:
      InputError: the database was written by a newer version.
    """
    with engine.connect().execution_options(**_WRITES) as connection, connection.begin():
        _lock(connection)
        config = _config(connection)
        _refuse_newer(connection, config)
        command.upgrade(config, revision)


def downgrade(engine: sa.Engine, revision: str) -> None:
    """Moves the schema down to a revision ("base" is an empty database)."""
    with engine.connect().execution_options(**_WRITES) as connection, connection.begin():
        _lock(connection)
        command.downgrade(_config(connection), revision)


def current_revision(engine: sa.Engine) -> str | None:
    """The revision of a database; None where it is empty."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def _config(connection: sa.Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _lock(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))


def _refuse_newer(connection: sa.Connection, config: Config) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    for found in MigrationContext.configure(connection).get_current_heads():
        if found not in known:
            raise InputError(
                f"its schema has revision {found}, which Shardwright {VERSION} does not know",
                where="database",
                do="Run the version that wrote it, or a newer one, or restore a backup",
            )
