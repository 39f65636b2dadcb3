"""The store of programs, jobs, keys and comparisons, on SQLite and on Postgres."""

import hashlib
import itertools
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from shardwright.api.settings import load_settings
from shardwright.api.store import QueueFullError, QuotaExceededError, Store, tables
from shardwright.api.store.leases import MOST_ATTEMPTS
from shardwright.api.store.process import is_dead, new_holder
from shardwright.api.store.records import Claim
from shardwright.errors import InputError

PLAN = {"model": {"name": "mlp", "options": {"batch": 8, "layers": 2}}, "topology": "v5e:2x4"}
ERROR = {"kind": "crashed", "title": "t", "detail": "d", "what": "w", "where": "x", "do": "y"}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    store = Store.open(load_settings(data_dir=folder, database_url=url, keep_events=5))
    yield store
    store.close()


@pytest.fixture
def store(opened: Store) -> Store:
    """An empty store."""
    with opened.database.write() as session:
        for table in reversed(tables.metadata.sorted_tables):
            session.execute(sa.delete(table))
    return opened


def submit(store: Store, owner: str = "ann", **changes: Any) -> Any:
    job, _ = store.jobs.submit(owner, "plan", PLAN | changes, 100_000)
    return job


def claim(store: Store, holder: str = "here") -> Claim:
    found = store.jobs.claim(holder, 30.0)
    assert found is not None
    return found


# -- asking --------------------------------------------------------------------------------------


def test_the_same_request_of_an_owner_is_the_same_job(store: Store) -> None:
    first, new = store.jobs.submit("ann", "plan", PLAN, 100)
    assert new
    # The order of options means nothing.
    same = {"topology": "v5e:2x4", "model": {"options": {"layers": 2, "batch": 8}, "name": "mlp"}}
    assert store.jobs.submit("ann", "plan", same, 100) == (first, False)
    running = claim(store)
    assert store.jobs.submit("ann", "plan", PLAN, 100)[0].id == first.id
    store.jobs.finish(running, {}, {})
    assert store.jobs.submit("ann", "plan", PLAN, 100)[1] is False


def test_other_owners_seeds_and_orders_of_mesh_axes_are_other_jobs(store: Store) -> None:
    ids = {
        submit(store).id,
        submit(store, "bob").id,
        submit(store, seed=1).id,
        submit(store, mesh={"data": 2, "model": 4}).id,
        submit(store, mesh={"model": 4, "data": 2}).id,
    }
    assert len(ids) == 5


@pytest.mark.parametrize("end", ["fail", "cancel"])
def test_what_failed_or_was_cancelled_is_done_anew(store: Store, end: str) -> None:
    first = submit(store)
    if end == "fail":
        store.jobs.fail(claim(store), ERROR)
    else:
        store.jobs.cancel("ann", first.id)
    again, new = store.jobs.submit("ann", "plan", PLAN, 100)
    assert new
    assert again.id != first.id


def test_requests_keep_the_order_of_mesh_axes_and_patterns(store: Store) -> None:
    mesh = {"z": 2, "a": 4}
    patterns = {"[1]*": "z", "[0]*": "a"}
    job = submit(store, mesh=mesh, in_specs=patterns)
    found = store.jobs.get("ann", job.id)
    assert found is not None
    assert list(found.request["mesh"]) == ["z", "a"]
    assert list(found.request["in_specs"]) == ["[1]*", "[0]*"]


def test_texts_that_databases_refuse_are_stored_without_what_is_refused(store: Store) -> None:
    job = submit(store, note="a\0b\ud800c", ratio=float("nan"))
    found = store.jobs.get("ann", job.id)
    assert found is not None
    assert found.request["note"] == "a\ufffdb?c"
    assert found.request["ratio"] is None


def test_full_queue_takes_nothing_new_and_still_answers_what_it_has(store: Store) -> None:
    first, _ = store.jobs.submit("ann", "plan", PLAN, 2)
    store.jobs.submit("ann", "plan", PLAN | {"seed": 1}, 2)
    with pytest.raises(QueueFullError):
        store.jobs.submit("ann", "plan", PLAN | {"seed": 2}, 2)
    assert store.jobs.submit("ann", "plan", PLAN, 2) == (first, False)
    # A job that runs waits no more.
    claim(store)
    assert store.jobs.submit("ann", "plan", PLAN | {"seed": 2}, 2)[1]


def test_many_threads_never_overfill_the_queue_and_are_never_told_that_it_is_locked(
    store: Store,
) -> None:
    def ask(number: int) -> bool:
        try:
            store.jobs.submit("ann", "plan", PLAN | {"seed": number}, 40)
        except QueueFullError:
            return False
        store.jobs.counts()
        return True

    with ThreadPoolExecutor(32) as pool:
        taken = sum(pool.map(ask, range(200)))
    assert taken == 40
    assert store.jobs.counts() == {"queued": 40, "running": 0}


def test_many_threads_that_ask_for_the_same_get_one_job(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: submit(store).id, range(64)))
    assert len(set(found)) == 1


def test_quota_counts_the_plans_of_a_key_in_a_day(store: Store) -> None:
    def ask(seed: int, key: str = "k1") -> Any:
        request = PLAN | {"seed": seed}
        return store.jobs.submit("ann", "plan", request, 100, key_id=key, quota_per_day=2)

    first, _ = ask(0)
    ask(1)
    with pytest.raises(QuotaExceededError) as refused:
        ask(2)
    assert refused.value.until == first.created_at + timedelta(days=1)
    # What is there already costs nothing, and other keys have their own.
    assert ask(0) == (first, False)
    ask(2, "k2")


# -- looking -------------------------------------------------------------------------------------


def test_nobody_sees_or_cancels_what_is_another_owners(store: Store) -> None:
    job = submit(store, "ann")
    assert store.jobs.get("bob", job.id) is None
    assert store.jobs.cancel("bob", job.id) is None
    assert store.jobs.page("bob") == ([], None)
    assert store.jobs.get("ann", job.id) == job
    assert store.jobs.get(None, job.id) == job


def test_pages_go_through_all_jobs_once_newest_first(store: Store) -> None:
    made = [submit(store, seed=seed).id for seed in range(7)]
    seen: list[str] = []
    cursor = None
    while True:
        page, cursor = store.jobs.page("ann", cursor=cursor, limit=3)
        seen += [job.id for job in page]
        if cursor is None:
            break
        submit(store, seed=100 + len(seen))  # newer than the cursor: no later page has it
    assert seen == made[::-1]


def test_pages_are_filtered(store: Store) -> None:
    mlp, other = submit(store), submit(store, topology="v5e:4x4", model={"name": "llama3-8b"})
    store.jobs.cancel("ann", other.id)

    def ids(**filters: Any) -> list[str]:
        return [job.id for job in store.jobs.page("ann", **filters)[0]]

    assert ids() == [other.id, mlp.id]
    assert ids(topology="v5e:4x4") == [other.id]
    assert ids(model="mlp") == [mlp.id]
    assert ids(status="cancelled") == [other.id]
    assert ids(kind="evaluate") == []


@pytest.mark.parametrize("cursor", ["", "x", "W10", "bnVsbA", "é", "WyJ4IiwgMV0"])
def test_a_cursor_that_no_page_gave_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(InputError, match="cursor"):
        store.jobs.page("ann", cursor=cursor)


# -- running -------------------------------------------------------------------------------------


def test_a_job_is_claimed_once_however_many_ask(store: Store) -> None:
    made = {submit(store, seed=seed).id for seed in range(40)}
    claimed: list[str] = []

    def work(name: int) -> None:
        while (found := store.jobs.claim(f"holder {name}", 30.0)) is not None:
            claimed.append(found.job.id)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(claimed) == 40
    assert set(claimed) == made


def test_owners_take_turns_and_looking_into_programs_comes_first(store: Store) -> None:
    many = [submit(store, "ann", seed=seed).id for seed in range(3)]
    single = submit(store, "bob").id
    look, _ = store.jobs.submit("cem", "inspect", {"program": "0" * 64}, 100)
    order = [claim(store).job.id for _ in range(5)]
    assert order == [look.id, many[0], single, many[1], many[2]]


def test_a_claimed_job_runs_until_it_is_finished_and_then_nothing_changes_it(store: Store) -> None:
    job = submit(store)
    held = claim(store)
    assert (held.job.id, held.job.status, held.job.attempts) == (job.id, "running", 1)
    done = store.jobs.finish(held, {"step_time_s": 0.5}, {"plan.json": "plans/x/plan.json"})
    assert done is not None
    assert (done.status, done.summary) == ("succeeded", {"step_time_s": 0.5})
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.created_at <= done.started_at <= done.finished_at
    assert store.jobs.finish(held, {}, {}) is None
    assert store.jobs.fail(held, ERROR) is None
    assert store.jobs.retry(held, ERROR) is None
    assert not store.jobs.add_event(held, {"stage": "search"})
    assert store.jobs.cancel("ann", job.id) == done


def test_a_cancelled_job_stays_so_whatever_its_runner_says(store: Store) -> None:
    job = submit(store)
    held = claim(store)
    assert store.jobs.held("here") == {held.token}
    cancelled = store.jobs.cancel("ann", job.id)
    assert cancelled is not None
    assert cancelled.status == "cancelled"
    assert store.jobs.held("here") == set()
    assert store.jobs.finish(held, {}, {}) is None
    assert store.jobs.get("ann", job.id) == cancelled


def test_a_job_whose_worker_crashed_twice_fails(store: Store) -> None:
    job = submit(store)
    again = store.jobs.retry(claim(store), ERROR)
    assert again is not None
    assert again.status == "queued"
    failed = store.jobs.retry(claim(store), ERROR)
    assert failed is not None
    assert (failed.id, failed.status, failed.error, failed.attempts) == (job.id, "failed", ERROR, 2)


def test_a_job_given_back_counts_as_never_started(store: Store) -> None:
    submit(store)
    for _ in range(MOST_ATTEMPTS + 1):
        back = store.jobs.release(claim(store))
        assert back is not None
        assert (back.status, back.attempts) == ("queued", 0)


def test_the_jobs_of_a_silent_server_are_queued_again_and_it_can_do_no_more_harm(
    store: Store,
) -> None:
    job = submit(store)
    lost = store.jobs.claim("elsewhere|1|0.0|x", -1.0)
    assert lost is not None
    assert [found.id for found in store.jobs.requeue_lost()] == [job.id]
    second = claim(store)
    assert store.jobs.finish(lost, {"from": "the first"}, {}) is None
    done = store.jobs.finish(second, {"from": "the second"}, {})
    assert done is not None
    assert done.summary == {"from": "the second"}


def test_a_renewed_lease_is_not_lost(store: Store) -> None:
    submit(store)
    assert store.jobs.claim("elsewhere|1|0.0|x", -1.0) is not None
    store.jobs.renew("elsewhere|1|0.0|x", 30.0)
    assert store.jobs.requeue_lost() == []


def test_the_jobs_of_a_dead_process_of_this_machine_are_queued_at_once(store: Store) -> None:
    job = submit(store)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        holder = pool.apply(new_holder)
        assert not is_dead(holder)
        assert store.jobs.claim(holder, 3600.0) is not None
        assert store.jobs.requeue_lost() == []
    assert is_dead(holder)
    assert [found.id for found in store.jobs.requeue_lost()] == [job.id]


def test_of_a_process_on_another_machine_nothing_is_known() -> None:
    _, _, rest = new_holder().partition("|")
    assert not is_dead(f"another machine|{rest}")
    assert not is_dead("")


def test_a_job_whose_servers_die_again_and_again_fails_clearly(store: Store) -> None:
    submit(store)
    for _ in range(MOST_ATTEMPTS):
        assert store.jobs.claim("elsewhere|1|0.0|x", -1.0) is not None
        (job,) = store.jobs.requeue_lost()
    assert job.status == "failed"
    assert job.error is not None
    assert job.error["kind"] == "crashed"
    assert "3 times" in job.error["detail"]
    assert store.jobs.claim("here", 30.0) is None


def test_two_that_recover_at_once_requeue_a_job_once(store: Store) -> None:
    for seed in range(20):
        submit(store, seed=seed)
        assert store.jobs.claim("elsewhere|1|0.0|x", -1.0) is not None
    barrier = threading.Barrier(4)

    def recover(_: int) -> int:
        barrier.wait()
        return len(store.jobs.requeue_lost())

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(recover, range(4))) == 20


# -- events --------------------------------------------------------------------------------------


def test_events_count_up_and_end_with_done(store: Store) -> None:
    job = submit(store)
    held = claim(store)
    store.jobs.add_event(held, {"stage": "trace"})
    store.jobs.add_event(held, {"stage": "search", "meshes": 4})
    store.jobs.finish(held, {}, {})
    events = store.jobs.events(job.id)
    assert [(event.seq, event.name) for event in events] == [
        (1, "progress"), (2, "progress"), (3, "done"),
    ]  # fmt: skip
    assert events[1].data == {"stage": "search", "meshes": 4}
    assert events[2].data == {"status": "succeeded"}
    assert store.jobs.events(job.id, after_seq=2) == events[2:]
    found = store.jobs.get("ann", job.id)
    assert found is not None
    assert found.progress == {"stage": "search", "meshes": 4}


def test_only_the_newest_events_are_kept(store: Store) -> None:
    job = submit(store)
    held = claim(store)
    for number in range(9):
        store.jobs.add_event(held, {"message": str(number)})
    assert [event.seq for event in store.jobs.events(job.id)] == [5, 6, 7, 8, 9]


# -- programs ------------------------------------------------------------------------------------


def upload(store: Store, owner: str, data: bytes = b"module {}") -> Any:
    with store.upload_file() as path:
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        return store.programs.add(owner, digest, path, "stablehlo-text", 100)


def test_an_upload_that_a_dead_server_left_is_deleted_at_the_next_start_and_no_other(
    store: Store,
) -> None:
    folder = store.settings.data_dir / "uploads"
    (folder / "left").write_bytes(b"half of a program")
    with store.upload_file() as path:
        Store.open(store.settings).close()
        assert list(folder.iterdir()) == [path]
    assert list(folder.iterdir()) == []


def test_a_program_is_looked_into_once_for_each_owner_and_stored_once(store: Store) -> None:
    program, new = upload(store, "ann")
    assert new
    assert (program.status, program.nbytes) == ("inspecting", 9)
    assert store.files.read(program.path) == b"module {}"
    assert upload(store, "ann") == (program, False)
    other, new = upload(store, "bob")
    assert new
    assert other.path == program.path
    assert store.programs.get("cem", program.id) is None
    assert store.jobs.counts()["queued"] == 2


def test_what_looking_into_a_program_finds_is_its_facts(store: Store) -> None:
    program, _ = upload(store, "ann")
    store.jobs.finish(claim(store), {"name": "step"}, {})
    found = store.programs.get("ann", program.id)
    assert found is not None
    assert (found.status, found.facts) == ("ready", {"name": "step"})


def test_a_program_that_could_not_be_read_says_why_and_is_tried_again_when_sent_again(
    store: Store,
) -> None:
    program, _ = upload(store, "ann")
    store.jobs.fail(claim(store), ERROR)
    found = store.programs.get("ann", program.id)
    assert found is not None
    assert (found.status, found.error) == ("invalid", ERROR)
    again, new = upload(store, "ann")
    assert (again.status, again.error, new) == ("inspecting", None, False)


def test_a_program_that_the_queue_has_no_room_for_leaves_no_row(store: Store) -> None:
    submit(store)
    with pytest.raises(QueueFullError), store.upload_file() as path:
        path.write_bytes(b"x")
        store.programs.add("ann", hashlib.sha256(b"x").hexdigest(), path, "stablehlo-text", 1)
    assert store.programs.list("ann") == []


def test_many_threads_that_send_one_program_store_it_whole(store: Store) -> None:
    data = bytes(range(256)) * 4096
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: upload(store, f"owner {n % 4}", data), range(24)))
    assert sum(new for _, new in found) == 4
    assert store.files.read(found[0][0].path) == data


def test_an_upload_that_nothing_took_is_deleted(store: Store) -> None:
    with store.upload_file() as path:
        assert path.exists()
    assert not path.exists()


# -- keys ----------------------------------------------------------------------------------------


def test_a_key_is_known_by_its_text_alone_and_its_secret_is_nowhere(store: Store) -> None:
    assert not store.keys.any()
    key, text = store.keys.create("laptop", ["read", "plan"], "team")
    assert store.keys.any()
    assert (key.owner, key.scopes) == ("team", ("read", "plan"))
    found = store.keys.authenticate(text)
    assert found is not None
    assert found.id == key.id
    with store.database.read() as session:
        row = session.execute(sa.select(tables.keys)).mappings().one()
    assert text.rpartition("_")[2] not in str(dict(row))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1] + ("0" if text[-1] != "0" else "1"),
        lambda text: text + "0",
        lambda text: text.upper(),
        lambda text: text.replace("sw_", ""),
        lambda text: "",
        lambda text: "sw_" + "0" * 16 + "_" + "0" * 64,
        lambda text: text + "\n",
    ],
)
def test_another_text_is_no_key(store: Store, change: Callable[[str], str]) -> None:
    _, text = store.keys.create("laptop", ["read"])
    assert store.keys.authenticate(change(text)) is None


def test_keys_without_an_owner_have_one_of_their_own(store: Store) -> None:
    one, _ = store.keys.create("a", ["read"])
    two, _ = store.keys.create("a", ["read"])
    assert one.owner != two.owner


def test_a_revoked_key_is_none_and_stays_in_the_list(store: Store) -> None:
    key, text = store.keys.create("laptop", ["admin"])
    revoked = store.keys.revoke(key.id)
    assert revoked.revoked_at is not None
    assert store.keys.authenticate(text) is None
    assert store.keys.revoke(key.id) == revoked
    assert [k.id for k in store.keys.list()] == [key.id]
    assert store.keys.any()


def test_the_last_use_of_a_key_is_noted(store: Store) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    _, text = store.keys.create("laptop", ["read"])
    store.keys.authenticate(text)
    (key,) = store.keys.list()
    assert key.last_used_at is not None
    assert key.last_used_at > before


def test_wrong_keys_are_refused_by_name(store: Store) -> None:
    with pytest.raises(InputError, match="write"):
        store.keys.create("laptop", ["write"])
    with pytest.raises(InputError, match="scopes"):
        store.keys.create("laptop", [])
    with pytest.raises(InputError, match="characters"):
        store.keys.create("", ["read"])
    with pytest.raises(InputError, match="no key"):
        store.keys.revoke("0" * 16)


# -- comparisons ---------------------------------------------------------------------------------


def compare(store: Store, *topologies: str, limit: int = 100) -> Any:
    plans = {topology: PLAN | {"topology": topology} for topology in topologies}
    request = {"model": PLAN["model"], "topologies": list(topologies)}
    return store.comparisons.create("ann", request, plans, limit)


def test_a_comparison_has_the_plans_of_its_slices_in_order_and_shares_them(store: Store) -> None:
    plan = submit(store, topology="v5e:4x4")
    comparison, new = compare(store, "v5e:4x8", "v5e:4x4")
    assert new
    assert list(comparison.plans) == ["v5e:4x8", "v5e:4x4"]
    assert comparison.plans["v5e:4x4"] == plan.id
    assert store.jobs.counts()["queued"] == 2
    assert compare(store, "v5e:4x8", "v5e:4x4") == (comparison, False)
    assert store.comparisons.get("ann", comparison.id) == comparison
    assert store.comparisons.get("bob", comparison.id) is None
    jobs = store.comparisons.jobs(comparison)
    assert [job.topology for job in jobs.values()] == ["v5e:4x8", "v5e:4x4"]


def test_a_comparison_is_taken_whole_or_not_at_all(store: Store) -> None:
    with pytest.raises(QueueFullError):
        compare(store, "v5e:4x4", "v5e:4x8", limit=1)
    assert store.jobs.counts()["queued"] == 0
    assert store.comparisons.list("ann") == []


# -- opening -------------------------------------------------------------------------------------


_MAKE_KEYS = """
import sys
from shardwright.api.settings import load_settings
from shardwright.api.store import Store
store = Store.open(load_settings(data_dir=sys.argv[1], database_url=sys.argv[2]))
for number in range(20):
    store.keys.create(f"key {number}", ["read"])
store.close()
"""


def test_another_process_may_write_while_threads_of_this_one_do(store: Store) -> None:
    """Such as `shardwright keys create` beside a busy server."""
    place = [str(store.settings.data_dir), store.settings.database_url]
    with subprocess.Popen([sys.executable, "-c", _MAKE_KEYS, *place]) as other:
        seeds = itertools.count()
        with ThreadPoolExecutor(8) as threads:
            while other.poll() is None:
                list(threads.map(lambda seed: submit(store, seed=seed), islice(seeds, 16)))
    assert other.returncode == 0
    assert len(store.keys.list()) == 20


def test_a_database_file_that_is_moved_away_is_noticed(tmp_path: Path) -> None:
    store = Store.open(load_settings(data_dir=tmp_path))
    job = submit(store)
    file = tmp_path / "shardwright.db"
    file.rename(tmp_path / "moved.db")
    for use in (store.ping, lambda: submit(store, seed=1), lambda: store.jobs.get(None, job.id)):
        with pytest.raises(OperationalError, match="was moved away"):
            use()
    assert not file.exists()
    (tmp_path / "moved.db").rename(file)
    assert store.jobs.get(None, job.id) == job
    store.close()
