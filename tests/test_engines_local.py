"""The engine of local processes: whatever a job does, only that job suffers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from programs_that_harm import FINE, endless, huge_constant, nested_too_deeply

from shardwright.api.jobs.engine import (
    Failed,
    JobFailure,
    Limits,
    Progressed,
    Report,
    Succeeded,
    Task,
)
from shardwright.api.jobs.local import LocalEngine, outcome
from shardwright.api.jobs.worker_process import WorkerProcess

MEMORY = 768 << 20
"""A worker that has imported everything takes 0.3 GB."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    engine = LocalEngine(1, Limits(MEMORY, 60.0), tmp_path_factory.mktemp("scratch"))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Task]:
    def make(text: str, task_id: str = "t", kind: str = "inspect", **request: Any) -> Task:
        folder = tmp_path / task_id
        (folder / "out").mkdir(parents=True)
        (folder / "program").write_text(text)
        return Task(task_id, kind, request, folder / "program", folder / "out")

    return make


def wait_free(engine: LocalEngine, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not engine.free():
        assert engine.poll(1.0) == []
        assert time.monotonic() < deadline, engine.trouble()


def run(engine: LocalEngine, task: Task) -> tuple[Report, list[Progressed]]:
    """A task's end, and what it told before."""
    wait_free(engine)
    engine.submit(task)
    told: list[Progressed] = []
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        for report in engine.poll(1.0):
            assert report.task_id == task.id
            if not isinstance(report, Progressed):
                return report, told
            told.append(report)
    raise AssertionError("the task never ends")


def failure(report: Report) -> JobFailure:
    assert isinstance(report, Failed), report
    return report.failure


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + 10.0
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, "the workers live on"
        time.sleep(0.02)


def test_a_warm_worker_is_used_again(engine: LocalEngine, make_task: Callable[..., Task]) -> None:
    wait_free(engine)
    pids = engine.pids
    for number in range(3):
        report, told = run(engine, make_task(FINE, f"t{number}"))
        assert isinstance(report, Succeeded)
        assert report.summary["inputs"] == [{"path": "arg0", "shape": [], "dtype": "f32"}]
        assert [report.progress["stage"] for report in told] == ["read", "inspect", "write"]
    # None of them waited for the imports of a new one.
    assert engine.pids == pids


@pytest.mark.parametrize(
    ("program", "kind", "says"),
    [
        (nested_too_deeply, "crashed", "SIGSEGV while it was at the stage 'read'"),
        (huge_constant, "out-of-memory", "more than 0.75 GiB of memory"),
    ],
)
def test_a_program_that_harms_its_reader_fails_alone(
    engine: LocalEngine,
    make_task: Callable[..., Task],
    program: Callable[[], str],
    kind: str,
    says: str,
) -> None:
    failed = failure(run(engine, make_task(program(), "harmful"))[0])
    assert failed.kind == kind
    assert says in failed.what
    assert failed.do
    assert isinstance(run(engine, make_task(FINE, "fine"))[0], Succeeded)


def test_cancelling_ends_a_worker_deep_in_cpp_at_once(
    engine: LocalEngine, make_task: Callable[..., Task]
) -> None:
    wait_free(engine)
    (pid,) = engine.pids
    engine.submit(make_task(endless()))
    while not (told := engine.poll(1.0)):
        pass
    assert isinstance(told[0], Progressed)
    time.sleep(0.5)  # by now it inlines
    began = time.monotonic()
    engine.cancel("t")
    assert is_gone(pid)
    assert time.monotonic() - began < 10.0  # the program itself never ends
    # Nothing is reported of it, and the slot is there again.
    wait_free(engine)
    assert engine.pids != [pid]


def test_dead_workers_leave_nothing_behind(engine: LocalEngine) -> None:
    """Of all that died so far, only the living one has a log."""
    wait_free(engine)
    assert len(list(engine.scratch.iterdir())) == 1


def test_a_task_that_nobody_has_is_cancelled_without_harm(engine: LocalEngine) -> None:
    wait_free(engine)
    pids = engine.pids
    engine.cancel("no such task")
    assert engine.pids == pids


def test_wrong_input_fails_with_what_where_and_do_and_keeps_the_worker(
    engine: LocalEngine, make_task: Callable[..., Task]
) -> None:
    wait_free(engine)
    pids = engine.pids
    failed = failure(run(engine, make_task("this is no program"))[0])
    assert failed.kind == "input"
    assert "does not parse" in failed.what or "that parses" in failed.what
    assert failed.do.startswith("Pass the text or bytecode")
    assert engine.pids == pids


def test_the_traceback_of_a_fault_goes_to_the_log_of_the_service(
    engine: LocalEngine, make_task: Callable[..., Task], caplog: pytest.LogCaptureFixture
) -> None:
    report, _ = run(engine, make_task(FINE, kind="no such kind"))
    assert failure(report).kind == "internal"
    assert "Traceback" in caplog.text
    assert "KeyError: 'no such kind'" in caplog.text


def test_an_idle_worker_that_dies_is_replaced(engine: LocalEngine) -> None:
    wait_free(engine)
    (pid,) = engine.pids
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    engine.poll(1.0)
    wait_free(engine)
    assert engine.pids != [pid]


def test_a_worker_that_has_grown_is_replaced_after_its_task(
    engine: LocalEngine, make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_free(engine)
    pids = engine.pids
    monkeypatch.setattr(WorkerProcess, "has_grown", lambda worker: True)
    assert isinstance(run(engine, make_task(FINE))[0], Succeeded)
    assert not set(engine.pids) & set(pids)


def test_a_worker_knows_no_secrets_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_DATABASE_URL", "postgresql://ann:hunter2@host/name")
    engine = LocalEngine(1, Limits(MEMORY, 60.0), tmp_path)
    engine.start()
    (pid,) = engine.pids
    while not (environment := psutil.Process(pid).environ()):
        time.sleep(0.01)  # it is there a moment after the process
    engine.stop()
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert "hunter2" not in str(environment)
    assert is_gone(pid)


def test_a_task_over_its_time_is_ended(tmp_path: Path, make_task: Callable[..., Task]) -> None:
    engine = LocalEngine(1, Limits(MEMORY << 4, 1.0), tmp_path)
    engine.start()
    wait_free(engine)
    began = time.monotonic()
    failed = failure(run(engine, make_task(endless()))[0])
    took = time.monotonic() - began
    engine.stop()
    assert failed.kind == "time-limit"
    assert "more than 1 seconds while it was at the stage 'read'" in failed.what
    assert 1.0 <= took < 3.0


def test_reading_has_a_limit_of_its_own(
    engine: LocalEngine, make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the damaged programs that were tried, some keep MLIR busy for ever."""
    monkeypatch.setattr("shardwright.api.jobs.worker_process._READ_SECONDS", 0.5)
    failed = failure(run(engine, make_task(endless()))[0])
    assert failed.kind == "time-limit"
    assert "not read, or the model not traced, in 0.5 seconds" in failed.what
    assert "JOB_SECONDS" not in failed.do


def test_a_machine_without_room_for_workers_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr("shardwright.api.jobs.local._PAUSE_SECONDS", 0.2)
    engine = LocalEngine(1, Limits(MEMORY, 60.0), tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen", fail)
        engine.start()
    assert "Resource temporarily unavailable" in engine.trouble()
    assert engine.free() == 0
    time.sleep(0.3)
    engine.poll(0.0)
    assert len(engine.pids) == 1
    engine.stop()


_SERVER = """
import sys, time
from pathlib import Path
from shardwright.api.jobs.engine import Limits, Task
from shardwright.api.jobs.local import LocalEngine
folder = Path(sys.argv[1])
engine = LocalEngine(2, Limits(8 << 30, 600.0), folder)
engine.start()
while not engine.free():
    engine.poll(1.0)
engine.submit(Task("t", "inspect", {}, folder / "program", folder))
print(*engine.pids, flush=True)
while True:
    engine.poll(1.0)
"""


def test_workers_end_with_the_server_even_in_cpp(tmp_path: Path) -> None:
    (tmp_path / "program").write_text(endless())
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        pids = [int(word) for word in server.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.5)
        assert not any(map(is_gone, pids))
        server.kill()
    wait_gone(*pids)


def test_a_failure_tells_by_how_much_memory_is_lacking(tmp_path: Path) -> None:
    told = {"kind": "does-not-fit", "what": "w", "where": "x", "do": "d", "least_bytes": 3e10}
    answer = {"failed": told | {"limit_bytes": 15e9}}
    failed = failure(outcome(Task("t", "plan", {}, None, tmp_path), answer))
    error = failed.as_error()
    assert (error["least_bytes"], error["limit_bytes"]) == (3e10, 15e9)
    assert "least_bytes" not in JobFailure("input", "w").as_error()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"done": 3},
        {"done": {"summary": {}, "files": ["../../etc/passwd"], "stage_seconds": {}}},
        {"done": {"summary": {}, "files": ["absent"], "stage_seconds": {}}},
        {"done": {"summary": {}, "files": [], "stage_seconds": {"read": "long"}}},
        {"failed": {"kind": "invented", "what": "", "where": "", "do": ""}},
        {"failed": "yes"},
    ],
)
def test_a_worker_that_a_program_took_over_cannot_say_more_than_that_it_is_done_or_failed(
    tmp_path: Path, answer: dict[str, Any]
) -> None:
    report = outcome(Task("t", "inspect", {}, None, tmp_path), answer)
    assert failure(report).kind == "internal"
