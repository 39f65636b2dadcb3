"""The dispatcher: every accepted job ends exactly once, whatever dies in between."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from programs_that_harm import FINE, nested_too_deeply
from service_fixtures import child
from sqlalchemy.exc import OperationalError

from shardwright.api.jobs import Dispatcher, Observation, make_dispatcher
from shardwright.api.jobs.engine import Failed, JobFailure, Progressed, Report, Succeeded, Task
from shardwright.api.settings import load_settings
from shardwright.api.store import Job, Store, tables

PLAN = {"model": {"name": "mlp", "options": {}}, "topology": "v5e:2x4"}


@dataclass
class ScriptedEngine:
    """An engine that does what its test says."""

    script: Callable[[Task], list[Report]]
    slots: int = 2
    tasks: dict[str, Task] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    fails_to_start: int = 0

    def start(self) -> None:
        if self.fails_to_start:
            self.fails_to_start -= 1
            raise RuntimeError("no cluster")

    def free(self) -> int:
        return self.slots - len(self.tasks)

    def submit(self, task: Task) -> None:
        self.tasks[task.id] = task
        self.reports += self.script(task)

    def cancel(self, task_id: str) -> None:
        self.cancelled.append(task_id)
        self.tasks.pop(task_id, None)

    def poll(self, timeout_s: float) -> list[Report]:
        time.sleep(0.01)
        found, self.reports = self.reports, []
        for report in found:
            if not isinstance(report, Progressed):
                self.tasks.pop(report.task_id, None)
        return found

    def wake(self) -> None: ...

    def stop(self) -> None: ...

    def trouble(self) -> str:
        return ""


def succeed(task: Task) -> list[Report]:
    (task.out / "plan.json").write_text(f"made by {task.id}")
    return [Succeeded(task.id, {"step_time_s": 1.0}, ("plan.json",), {"search": 2.0})]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(load_settings(data_dir=tmp_path, lease_seconds=3.0, workers=1))
    yield store
    store.close()


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[Callable[..., Dispatcher]]:
    started: list[Dispatcher] = []

    def start(engine: ScriptedEngine, **options: Any) -> Dispatcher:
        scratch = tmp_path / f"scratch{len(started)}"
        scratch.mkdir()
        started.append(Dispatcher(store, engine, scratch, **options))
        started[-1].start()
        return started[-1]

    yield start
    for dispatcher in started:
        dispatcher.stop()


def submit(store: Store, **changes: Any) -> Job:
    job, _ = store.jobs.submit("ann", "plan", PLAN | changes, 1000)
    return job


def wait(store: Store, job: Job, status: str, seconds: float = 60.0) -> Job:
    deadline = time.monotonic() + seconds
    while (found := store.jobs.get(None, job.id)) is None or found.status != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_a_result_is_files_and_a_row_and_is_observed(
    store: Store, start: Callable[..., Dispatcher]
) -> None:
    seen: list[Observation] = []
    engine = ScriptedEngine(succeed)
    job = submit(store)
    start(engine, observe=seen.append)
    done = wait(store, job, "succeeded")
    assert done.summary == {"step_time_s": 1.0}
    content = store.read_result(done, "plan.json")
    assert content is not None
    assert content.startswith(b"made by ")
    assert store.read_result(done, "other") is None
    while len(seen) < 2:
        time.sleep(0.01)
    assert [observation.what for observation in seen] == ["started", "succeeded"]
    assert seen[0].waited_s >= 0
    assert seen[1].stage_seconds == {"search": 2.0}


@pytest.mark.parametrize("kind", ["crashed", "lost"])
def test_a_job_whose_worker_dies_is_tried_twice(
    store: Store, start: Callable[..., Dispatcher], kind: Any
) -> None:
    tries: list[str] = []

    def crash(task: Task) -> list[Report]:
        tries.append(task.id)
        return [Failed(task.id, JobFailure(kind, "it died", "job", "Look"))]

    job = submit(store)
    start(ScriptedEngine(crash))
    failed = wait(store, job, "failed")
    assert len(set(tries)) == 2
    assert failed.error is not None
    assert failed.error["what"] == "it died"
    assert failed.error["kind"] == kind


@pytest.mark.parametrize(
    "kind", ["input", "does-not-fit", "out-of-memory", "time-limit", "internal"]
)
def test_what_would_fail_again_is_tried_once(
    store: Store, start: Callable[..., Dispatcher], kind: Any
) -> None:
    job = submit(store)
    start(ScriptedEngine(lambda task: [Failed(task.id, JobFailure(kind, "no", "x", "y"))]))
    failed = wait(store, job, "failed")
    assert failed.attempts == 1
    assert failed.error is not None
    told = {"kind": kind, "detail": "x: no. y.", "what": "no", "where": "x", "do": "y"}
    assert told.items() <= failed.error.items()


def test_a_cancelled_job_is_ended_in_the_engine(
    store: Store, start: Callable[..., Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is told, and does not come upon it by itself.
    monkeypatch.setattr("shardwright.api.jobs.dispatcher._LOOK_SECONDS", 600.0)
    engine = ScriptedEngine(lambda task: [])
    job = submit(store)
    dispatcher = start(engine)
    wait(store, job, "running")
    while not engine.tasks:
        time.sleep(0.01)
    (token,) = engine.tasks
    store.jobs.cancel("ann", job.id)
    dispatcher.wake()
    deadline = time.monotonic() + 20.0
    while engine.cancelled != [token]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert wait(store, job, "cancelled").summary is None


def test_progress_is_written_twice_a_second_at_most_and_the_last_always(
    store: Store, start: Callable[..., Dispatcher]
) -> None:
    def chatty(task: Task) -> list[Report]:
        told: list[Report] = [
            Progressed(task.id, {"stage": "search", "meshes_tried": number})
            for number in range(1000)
        ]
        return told + succeed(task)

    job = submit(store)
    start(ScriptedEngine(chatty))
    done = wait(store, job, "succeeded")
    assert done.progress == {"stage": "search", "meshes_tried": 999}
    names = [event.name for event in store.jobs.events(job.id)]
    assert names[-1] == "done"
    assert len(names) <= 4


def test_a_store_that_is_away_for_a_while_loses_nothing(
    store: Store, start: Callable[..., Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = iter([True] * 3)
    finish = store.jobs.finish

    def sometimes(*args: Any) -> Any:
        if next(away, False):
            raise OperationalError("UPDATE", {}, Exception("the server closed the connection"))
        return finish(*args)

    monkeypatch.setattr(store.jobs, "finish", sometimes)
    monkeypatch.setattr("shardwright.api.jobs.dispatcher._LOOK_SECONDS", 0.05)
    job = submit(store)
    start(ScriptedEngine(succeed))
    done = wait(store, job, "succeeded")
    assert done.attempts == 1
    assert store.read_result(done, "plan.json") is not None


def test_a_result_that_cannot_be_kept_fails_its_job_and_no_other(
    store: Store, start: Callable[..., Dispatcher]
) -> None:
    def odd(task: Task) -> list[Report]:
        if task.request.get("seed") == 1:
            return [Succeeded(task.id, {"number": 1j}, (), {})]
        return succeed(task)

    bad, good = submit(store, seed=1), submit(store, seed=2)
    start(ScriptedEngine(odd))
    failed = wait(store, bad, "failed")
    assert failed.error is not None
    assert "cannot be kept" in failed.error["what"]
    wait(store, good, "succeeded")


def test_a_program_whose_file_is_gone_fails_its_job(
    store: Store, start: Callable[..., Dispatcher]
) -> None:
    job, _ = store.jobs.submit("ann", "plan", {"program": "0" * 64, "topology": "v5e:2x4"}, 10)
    start(ScriptedEngine(succeed))
    failed = wait(store, job, "failed")
    assert failed.error is not None
    assert failed.error["do"] == "Upload the program again"


def test_an_engine_that_does_not_start_is_told_and_started_again(
    store: Store, start: Callable[..., Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.api.jobs.dispatcher._START_AGAIN_SECONDS", 0.3)
    job = submit(store)
    dispatcher = start(ScriptedEngine(succeed, fails_to_start=2))
    deadline = time.monotonic() + 5
    while "no cluster" not in dispatcher.trouble():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    wait(store, job, "succeeded")
    assert dispatcher.trouble() == ""


def test_stopping_gives_running_jobs_back_unharmed(
    store: Store, start: Callable[..., Dispatcher]
) -> None:
    job = submit(store)
    dispatcher = start(ScriptedEngine(lambda task: []))
    wait(store, job, "running")
    dispatcher.stop()
    back = wait(store, job, "queued")
    assert back.attempts == 0
    last = store.jobs.events(job.id)[-1]
    assert last.data["message"] == "its server stops; the next one goes on with it"


def test_a_slow_server_that_was_taken_for_dead_leaves_no_files(
    store: Store, start: Callable[..., Dispatcher]
) -> None:
    """Its job went to another, which finished first."""
    engine = ScriptedEngine(lambda task: [])
    job = submit(store)
    start(engine)
    wait(store, job, "running")
    while not engine.tasks:
        time.sleep(0.01)
    (task,) = engine.tasks.values()
    with store.database.write() as session:
        session.execute(sa.update(tables.jobs).values(lease_until=None))
    (again,) = store.jobs.requeue_lost()
    other = store.jobs.claim("another server", 30.0)
    assert other is not None
    engine.reports += succeed(task)
    time.sleep(0.3)
    store.files.write("plans/x/plan.json", b"theirs")
    done = store.jobs.finish(other, {"of": "the other"}, {"plan.json": "plans/x/plan.json"})
    assert done is not None
    assert again.id == job.id
    assert wait(store, job, "succeeded").summary == {"of": "the other"}
    assert store.files.folders(f"plans/{job.id}") == []


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_many_dispatchers_end_hundreds_of_jobs_once_each(
    request: pytest.FixtureRequest, tmp_path: Path, database: str
) -> None:
    url = request.getfixturevalue("postgres_url") if database == "postgres" else ""
    store = Store.open(load_settings(data_dir=tmp_path, database_url=url))
    runs: Counter[str] = Counter()
    ended: Counter[str] = Counter()

    def sometimes_lost(task: Task) -> list[Report]:
        seed = int(task.request["seed"])
        runs[str(seed)] += 1
        if seed % 10 == 0 and runs[str(seed)] == 1:
            return [Failed(task.id, JobFailure("lost", "it is gone", "job", "Look"))]
        return succeed(task)

    def observe(seen: Observation) -> None:
        if seen.job.is_final:
            ended[seen.job.id] += 1

    jobs = [submit(store, seed=seed) for seed in range(200)]
    dispatchers = []
    for number in range(3):
        scratch = tmp_path / f"scratch{number}"
        scratch.mkdir()
        engine = ScriptedEngine(sometimes_lost, slots=4)
        dispatchers.append(Dispatcher(store, engine, scratch, observe))
        dispatchers[-1].start()
    deadline = time.monotonic() + 60.0
    while store.jobs.counts() != {"queued": 0, "running": 0}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for dispatcher in dispatchers:
        dispatcher.stop()
    found = [store.jobs.get("ann", job.id) for job in jobs]
    store.close()
    assert {job.status for job in found if job} == {"succeeded"}
    assert ended == {job.id: 1 for job in jobs}
    assert Counter(runs.values()) == {1: 180, 2: 20}


# -- the real thing ------------------------------------------------------------------------------

_SERVER = """
import logging, os, sys, time
from shardwright.api.jobs import make_dispatcher
from shardwright.api.settings import load_settings
from shardwright.api.store import Store
store = Store.open(load_settings(data_dir=sys.argv[1], database_url=sys.argv[2], workers=1,
                                 lease_seconds=3.0))
ends = open(sys.argv[3], "a", buffering=1)
def observe(seen):
    if seen.what in ("succeeded", "failed"):
        ends.write(f"{seen.job.id}\\n")
finish, calls = store.jobs.finish, []
def finish_or_die(*args):
    calls.append(1)
    if len(calls) == int(sys.argv[4]):
        os.kill(os.getpid(), 9)
    return finish(*args)
store.jobs.finish = finish_or_die
dispatcher = make_dispatcher(store, observe)
dispatcher.start()
while True:
    time.sleep(1.0)
"""

TINY = {"features": 8, "hidden": 16, "layers": 1, "classes": 8, "batch": 8}


def server(store: Store, ends: Path, kill_at_finish: int = 0) -> subprocess.Popen[bytes]:
    """A server in a process of its own, which writes the ids of jobs that it ended to a file."""
    settings = store.settings
    place = [str(settings.data_dir), settings.database_url, str(ends), str(kill_at_finish)]
    return subprocess.Popen(child(sys.executable, "-c", _SERVER, *place))


def submit_many(store: Store, count: int, owner: str = "ann") -> list[Job]:
    request = {"topology": "v5e:2x2", "mesh": {"data": 4}, "time_limit_s": 0.1}
    model = {"model": {"name": "mlp", "options": TINY}}
    return [
        store.jobs.submit(owner, "plan", request | model | {"seed": seed}, 1000)[0]
        for seed in range(count)
    ]


def wait_all(store: Store, count: int, seconds: float = 120.0, owner: str = "ann") -> list[Job]:
    deadline = time.monotonic() + seconds
    while True:
        jobs, _ = store.jobs.page(owner, limit=1000)
        if sum(job.is_final for job in jobs) >= count:
            return jobs
        assert time.monotonic() < deadline, Counter(job.status for job in jobs)
        time.sleep(0.1)


@pytest.mark.parametrize("moment", ["in the middle of a job", "between files and row"])
def test_after_kill_9_every_job_ends_exactly_once(
    store: Store, tmp_path: Path, moment: str
) -> None:
    ends = tmp_path / "ends"
    submit_many(store, 5)
    if moment == "between files and row":
        first = server(store, ends, kill_at_finish=2)
        assert first.wait(120) == -signal.SIGKILL
        jobs, _ = store.jobs.page("ann", status="running")
        assert [len(store.files.folders(f"plans/{job.id}")) for job in jobs] == [1]
    else:
        first = server(store, ends)
        wait_all(store, 1)
        while not store.jobs.counts()["running"]:
            time.sleep(0.005)
        first.kill()
        first.wait()
    second = server(store, ends)
    try:
        jobs = wait_all(store, 5)
    finally:
        second.kill()
        second.wait()
    assert Counter(job.status for job in jobs) == {"succeeded": 5}
    # At most one was started twice, and of every job there is one result, whole.
    assert sum(job.attempts for job in jobs) <= 6
    for job in jobs:
        assert len(store.files.folders(f"plans/{job.id}")) == 1
        plan = store.read_result(job, "plan.json")
        assert plan is not None
        assert plan.rstrip().endswith(b"}")
        finals = [event for event in store.jobs.events(job.id) if event.name == "done"]
        assert len(finals) == 1
    assert len(ends.read_text().split()) == len(set(ends.read_text().split()))
    # What the first left in its scratch folder is gone with the second's start.
    assert len(list((store.settings.data_dir / "scratch").iterdir())) <= 1


def test_two_servers_on_one_postgres_share_the_work_and_one_outlives_the_other(
    postgres_url: str, tmp_path: Path
) -> None:
    settings = load_settings(
        data_dir=tmp_path / "one", database_url=postgres_url, files_url=f"file://{tmp_path}/files"
    )
    store = Store.open(settings)
    owner = "both"  # other tests have left jobs in the database
    ends = tmp_path / "ends"
    code = _SERVER.replace("workers=1,", f'workers=1, files_url="file://{tmp_path}/files",')
    servers = [
        subprocess.Popen(
            child(sys.executable, "-c", code, tmp_path / name, postgres_url, ends, "0")
        )
        for name in ("one", "two")
    ]
    try:
        submitted = 0
        holders: set[Any] = set()
        deadline = time.monotonic() + 120.0
        while len(holders) < 2:
            assert time.monotonic() < deadline, "one server does all the work"
            if not store.jobs.counts()["queued"]:
                submitted += 1
                submit_many(store, submitted, owner)
            with store.database.read() as session:
                holder = sa.select(tables.jobs.c.lease_holder)
                running = holder.where(tables.jobs.c.status == "running")
                holders |= set(session.execute(running).scalars())
            time.sleep(0.01)
        submitted += 4
        submit_many(store, submitted, owner)
        while (counts := store.jobs.counts())["running"] < 2:
            assert time.monotonic() < deadline, "one server is idle"
            if not counts["queued"]:
                submitted += 1
                submit_many(store, submitted, owner)
            time.sleep(0.005)
        servers[0].kill()
        jobs = wait_all(store, submitted, owner=owner)
    finally:
        for process in servers:
            process.kill()
            process.wait()
    store.close()
    assert Counter(job.status for job in jobs) == {"succeeded": submitted}
    assert sum(job.attempts for job in jobs) <= submitted + 1
    assert len(ends.read_text().split()) == len(set(ends.read_text().split()))


def test_harmful_programs_fail_clearly_and_jobs_beside_them_go_on(
    store: Store, tmp_path: Path
) -> None:
    import hashlib

    def upload(text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()
        with store.upload_file() as path:
            path.write_text(text)
            store.programs.add("ann", digest, path, "stablehlo-text", 100)
        return digest

    dispatcher = make_dispatcher(store)
    dispatcher.start()
    try:
        harmful, fine = upload(nested_too_deeply()), upload(FINE)
        deadline = time.monotonic() + 120.0

        def status(program: str) -> Mapping[str, Any]:
            found = store.programs.get("ann", program)
            assert found is not None
            return {"status": found.status, "error": found.error}

        while status(harmful)["status"] == "inspecting" or status(fine)["status"] == "inspecting":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert status(harmful)["error"]["kind"] == "crashed"
        assert "SIGSEGV" in status(harmful)["error"]["what"]
        assert status(fine)["status"] == "ready"
        (crashed,) = (
            job for job in store.jobs.page("ann", kind="inspect")[0] if job.program == harmful
        )
        assert crashed.attempts == 2
    finally:
        dispatcher.stop()
