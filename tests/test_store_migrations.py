"""The schema moves up and down, is what the code thinks it is, and is not touched by old code."""

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from shardwright.api.settings import load_settings
from shardwright.api.store import Store
from shardwright.api.store.database import Database
from shardwright.api.store.migrate import current_revision, downgrade, migrate
from shardwright.api.store.tables import metadata
from shardwright.errors import InputError


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        found: str = request.getfixturevalue("postgres_url")
        engine = sa.create_engine(found)
        with engine.begin() as connection:
            connection.execute(sa.text("DROP SCHEMA public CASCADE"))
            connection.execute(sa.text("CREATE SCHEMA public"))
        engine.dispose()
        return found
    return f"sqlite:///{tmp_path / 'store.db'}"


def tables_of(database: Database) -> set[str]:
    return set(sa.inspect(database.engine).get_table_names())


def test_migrating_an_empty_database_makes_the_schema_of_the_code(url: str) -> None:
    database = Database(url)
    assert current_revision(database.engine) is None
    migrate(database.engine)
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    # What the comparison does not see: the index that keeps equal requests one job.
    (unique,) = (
        index
        for index in sa.inspect(database.engine).get_indexes("jobs")
        if index["name"] == "uq_jobs_owner_digest_wanted"
    )
    assert unique["unique"]
    database.close()


def test_migrations_go_down_to_nothing_and_up_again(url: str) -> None:
    database = Database(url)
    migrate(database.engine)
    everything = tables_of(database)
    assert {"jobs", "programs", "keys", "comparisons", "job_events"} < everything
    downgrade(database.engine, "base")
    assert tables_of(database) == {"alembic_version"}
    migrate(database.engine)
    migrate(database.engine)  # a second time changes nothing
    assert tables_of(database) == everything
    database.close()


def test_a_database_of_a_newer_version_is_refused_and_left_alone(url: str, tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, database_url=url)
    store = Store.open(settings)
    with store.database.write() as session:
        session.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(InputError, match=r"revision 9999, which Shardwright .* does not know"):
        Store.open(settings)
    assert current_revision(store.database.engine) == "9999"
    store.close()


def test_a_migration_that_fails_leaves_the_database_as_it_was(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(url)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("the power went out")

    # The last of the tables that the first migration makes.
    monkeypatch.setattr("alembic.op.create_index", fail)
    with pytest.raises(RuntimeError, match="the power went out"):
        migrate(database.engine)
    assert tables_of(database) <= {"alembic_version"}
    monkeypatch.undo()
    migrate(database.engine)
    assert "jobs" in tables_of(database)
    database.close()


def test_servers_that_start_together_migrate_once(url: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from shardwright.api.settings import load_settings\n"
        "from shardwright.api.store import Store\n"
        "Store.open(load_settings(data_dir=sys.argv[1], database_url=sys.argv[2])).close()\n"
    )
    starting = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), url]) for _ in range(3)
    ]
    assert [process.wait(60) for process in starting] == [0, 0, 0]


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_url_of_postgres_needs_no_driver(postgres_url: str, tmp_path: Path, scheme: str) -> None:
    url = postgres_url.replace("postgresql+psycopg", scheme)
    Store.open(load_settings(data_dir=tmp_path, database_url=url)).close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("mysql://host/name", "neither Postgres nor a file of SQLite"),
        ("sqlite://", "neither Postgres nor a file of SQLite"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/name", "cannot be opened"),
        ("sqlite:////proc/no/such/folder.db", "cannot be opened"),
        ("nonsense", "cannot be used"),
        ("postgresql+nothing://host/name", "cannot be used"),
    ],
)
def test_a_database_that_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, wrong: str, says: str
) -> None:
    with pytest.raises(InputError, match=says) as refused:
        Store.open(load_settings(data_dir=tmp_path, database_url=wrong))
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)
