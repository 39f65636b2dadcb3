"""What a store forgets, and when."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from shardwright.api.settings import load_settings
from shardwright.api.store import Job, Store, tables
from shardwright.errors import InputError

PLAN = {"model": {"name": "mlp", "options": {}}, "topology": "v5e:2x4"}
LONG_AGO = datetime.now(UTC) - timedelta(days=31)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(load_settings(data_dir=tmp_path, keep_days=30))
    yield store
    store.close()


def planned(store: Store, **changes: Any) -> Job:
    """A plan that is done, with its file."""
    store.jobs.submit("ann", "plan", PLAN | changes, 1000)
    claim = store.jobs.claim("here", 30.0)
    assert claim is not None
    path = f"{claim.job.home}/{claim.token}/plan.json"
    store.files.write(path, b"{}")
    done = store.jobs.finish(claim, {}, {"plan.json": path})
    assert done is not None
    return done


def uploaded(store: Store, tmp_path: Path, name: str, owner: str = "ann") -> str:
    program = name * 64
    upload = tmp_path / f"upload-{name}-{owner}"
    upload.write_bytes(name.encode())
    store.programs.add(owner, program, upload, "exported", 1000)
    claim = store.jobs.claim("here", 30.0)
    if claim is not None:
        store.jobs.finish(claim, {"name": name}, {})
    return program


def age(store: Store, *named: sa.Table) -> None:
    with store.database.write() as session:
        for table in named:
            old = {
                column: LONG_AGO for column in ("created_at", "finished_at") if column in table.c
            }
            session.execute(sa.update(table).values(old))


def expire(store: Store) -> int:
    return sum(iter(store.expire, 0))


def test_old_results_go_with_their_files_and_events(store: Store) -> None:
    old = planned(store)
    age(store, tables.jobs)
    new = planned(store, seed=1)
    assert expire(store) == 1
    assert store.jobs.get(None, old.id) is None
    assert store.jobs.events(old.id) == []
    assert store.read_result(old, "plan.json") is None
    assert store.files.folders("plans") == [new.id]
    assert store.read_result(new, "plan.json") == b"{}"


def test_what_waits_or_runs_stays_however_old(store: Store) -> None:
    waiting, _ = store.jobs.submit("ann", "plan", PLAN, 1000)
    age(store, tables.jobs)
    assert expire(store) == 0
    assert store.jobs.get(None, waiting.id) is not None


def test_the_plans_of_a_comparison_stay_as_long_as_it_does(store: Store) -> None:
    plan = planned(store)
    age(store, tables.jobs)
    comparison, _ = store.comparisons.create("ann", {}, {"v5e:2x4": PLAN}, 1000)
    assert expire(store) == 0
    age(store, tables.comparisons)
    assert expire(store) == 1
    assert store.comparisons.get(None, comparison.id) is None
    assert store.jobs.get(None, plan.id) is None


def test_an_old_program_goes_once_no_job_names_it(store: Store, tmp_path: Path) -> None:
    program = uploaded(store, tmp_path, "a")
    age(store, tables.jobs, tables.programs)
    store.jobs.submit("ann", "plan", PLAN | {"program": program}, 1000)
    expire(store)
    assert store.programs.get("ann", program) is not None
    with store.database.write() as session:
        session.execute(sa.delete(tables.jobs))
    assert expire(store) == 1
    assert store.programs.get("ann", program) is None


def test_the_file_of_a_program_stays_while_another_owner_has_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.files, "modified", lambda path: LONG_AGO)
    program = uploaded(store, tmp_path, "b")
    age(store, tables.jobs, tables.programs)
    uploaded(store, tmp_path, "b", owner="bob")
    path = f"programs/{program[:2]}/{program}"
    expire(store)
    assert store.programs.get("ann", program) is None
    assert store.files.exists(path)
    age(store, tables.jobs, tables.programs)
    expire(store)
    assert not store.files.exists(path)


def test_a_file_that_was_just_uploaded_again_stays(store: Store, tmp_path: Path) -> None:
    program = uploaded(store, tmp_path, "c")
    age(store, tables.jobs, tables.programs)
    expire(store)
    assert store.programs.get("ann", program) is None
    assert store.files.exists(f"programs/{program[:2]}/{program}")


def test_without_a_term_nothing_goes(tmp_path: Path) -> None:
    store = Store.open(load_settings(data_dir=tmp_path))
    planned(store)
    age(store, tables.jobs)
    assert expire(store) == 0
    store.close()


def test_a_term_of_less_than_a_day_is_refused() -> None:
    with pytest.raises(InputError, match="SHARDWRIGHT_KEEP_DAYS"):
        load_settings(keep_days=0.1)
