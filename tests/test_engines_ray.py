"""The engine on a real Ray cluster: the same limits and failures as with local processes."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from programs_that_harm import FINE, endless, huge_constant, nested_too_deeply
from service_fixtures import child, wait_until

from shardwright.api.jobs.dispatcher import Dispatcher
from shardwright.api.jobs.engine import Failed, Limits, Progressed, Report, Succeeded, Task
from shardwright.api.jobs.ray_engine import RayEngine
from shardwright.api.jobs.ray_process import RayProcess
from shardwright.api.settings import load_settings
from shardwright.api.store import Store
from shardwright.errors import InputError

LIMITS = Limits(768 << 20, 60.0)


@pytest.fixture(scope="module")
def engine(ray_address: str) -> Iterator[RayEngine]:
    engine = RayEngine(1, LIMITS, ray_address)
    engine.start()
    yield engine
    engine.stop()


def run(engine: RayEngine, folder: Path, text: str, name: str) -> Report:
    engine_is_free(engine)
    engine.submit(make_task(folder, text, name))
    return end_of(engine, name)


def engine_is_free(engine: RayEngine) -> None:
    deadline = time.monotonic() + 120.0
    while not engine.free():
        assert engine.poll(1.0) == []
        assert time.monotonic() < deadline, engine.trouble()


def make_task(folder: Path, text: str, name: str) -> Task:
    home = folder / name
    (home / "out").mkdir(parents=True)
    (home / "program").write_text(text)
    return Task(name, "inspect", {}, home / "program", home / "out")


def end_of(engine: RayEngine, name: str) -> Report:
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        for report in engine.poll(1.0):
            assert report.task_id == name
            if not isinstance(report, Progressed):
                return report
    raise AssertionError("the task never ends")


def slots_of(address: str) -> list[psutil.Process]:
    """The processes of slots on a cluster; others may be on this machine too."""
    place = f":{address.rpartition(':')[2]}"
    return [
        process
        for process in psutil.process_iter()
        if process.name().startswith("ray::Slot")
        and any(place in " ".join(parent.cmdline()) for parent in process.parents())
    ]


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_harmful_programs_fail_alone_and_the_slot_goes_on(
    engine: RayEngine, ray_address: str, tmp_path: Path
) -> None:
    crashed = run(engine, tmp_path, nested_too_deeply(), "crash")
    assert isinstance(crashed, Failed)
    assert crashed.failure.kind == "crashed"
    assert "SIGSEGV while it was at the stage 'read'" in crashed.failure.what
    hungry = run(engine, tmp_path, huge_constant(), "hungry")
    assert isinstance(hungry, Failed)
    assert hungry.failure.kind == "out-of-memory"
    assert isinstance(run(engine, tmp_path, FINE, "fine"), Succeeded)
    # The slot has a worker of its own, which is used again.
    (slot,) = slots_of(ray_address)
    workers = slot.children()
    assert isinstance(run(engine, tmp_path, FINE, "again"), Succeeded)
    assert slot.children() == workers


def test_cancelling_ends_a_worker_deep_in_cpp_and_frees_the_slot(
    engine: RayEngine, ray_address: str, tmp_path: Path
) -> None:
    engine_is_free(engine)
    (slot,) = slots_of(ray_address)
    (worker,) = slot.children()
    engine.submit(make_task(tmp_path, endless(), "long"))
    assert isinstance(engine.poll(10.0)[0], Progressed)
    time.sleep(0.5)
    engine.cancel("long")
    wait_until(lambda: is_over(worker), lambda: "the worker lives on")
    assert isinstance(run(engine, tmp_path, FINE, "after"), Succeeded)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(load_settings(data_dir=tmp_path / "data"))
    yield store
    store.close()


def submit_and_wait(
    store: Store, dispatcher: Dispatcher, meanwhile: Callable[[], None] = lambda: None
) -> Any:
    options = {"features": 64, "hidden": 128, "layers": 2, "classes": 16, "batch": 64}
    request = {"model": {"name": "mlp", "options": options}, "topology": "v5e:2x4"}
    job, _ = store.jobs.submit("ann", "plan", request | {"time_limit_s": 1.0}, 10)
    dispatcher.wake()

    def is_running() -> bool:
        found = store.jobs.get("ann", job.id)
        return found is not None and bool(found.progress)

    wait_until(is_running, dispatcher.trouble)
    meanwhile()

    def is_final() -> bool:
        found = store.jobs.get("ann", job.id)
        return found is not None and found.is_final

    wait_until(is_final, dispatcher.trouble)
    return store.jobs.get("ann", job.id)


def test_a_plan_is_made_on_the_cluster_and_its_files_come_back(
    ray_address: str, store: Store, tmp_path: Path
) -> None:
    dispatcher = Dispatcher(store, RayProcess(1, LIMITS, ray_address), tmp_path)
    dispatcher.start()
    try:
        job = submit_and_wait(store, dispatcher)
        assert job.status == "succeeded", job.error
        plan = store.read_result(job, "plan.json")
        annotated = store.read_result(job, "annotated.mlir")
        assert plan is not None
        assert plan.rstrip().endswith(b"}")
        assert annotated is not None
        assert b"sdy.mesh" in annotated
        assert [event.name for event in store.jobs.events(job.id)][-1] == "done"
    finally:
        dispatcher.stop()


def test_a_job_whose_machine_is_lost_runs_again_elsewhere(
    ray_address: str, store: Store, tmp_path: Path
) -> None:
    others = set(slots_of(ray_address))
    dispatcher = Dispatcher(store, RayProcess(1, LIMITS, ray_address), tmp_path)
    dispatcher.start()

    def lose() -> None:
        (slot,) = set(slots_of(ray_address)) - others
        slot.kill()

    try:
        job = submit_and_wait(store, dispatcher, lose)
        assert (job.status, job.attempts) == ("succeeded", 2), job.error
    finally:
        dispatcher.stop()


def test_the_server_outlives_its_connection_to_the_cluster(
    ray_address: str, store: Store, tmp_path: Path
) -> None:
    """Ray ends the process that is connected where its cluster is gone for a minute."""
    engine = RayProcess(1, LIMITS, ray_address)
    dispatcher = Dispatcher(store, engine, tmp_path)
    dispatcher.start()

    def lose() -> None:
        (connected,) = (
            process
            for process in psutil.Process().children()
            if "shardwright.api.jobs.ray_driver" in process.cmdline()
        )
        connected.kill()
        wait_until(lambda: engine.trouble() != "", lambda: "it is not noticed")

    try:
        job = submit_and_wait(store, dispatcher, lose)
        assert (job.status, job.attempts) == ("succeeded", 2), job.error
        assert dispatcher.trouble() == ""
    finally:
        dispatcher.stop()


_SERVER = """
import sys
from shardwright.api.jobs.engine import Limits
from shardwright.api.jobs.ray_process import RayProcess
engine = RayProcess(1, Limits(768 << 20, 60.0), sys.argv[1])
engine.start()
while not engine.free():
    engine.poll(1.0)
print("ready", flush=True)
while True:
    engine.poll(1.0)
"""


def test_slots_and_workers_end_with_the_server(ray_address: str) -> None:
    others = set(slots_of(ray_address))
    command = child(sys.executable, "-c", _SERVER, ray_address)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        slots = set(slots_of(ray_address)) - others
        found = [*slots, *(worker for slot in slots for worker in slot.children())]
        assert len(found) == 2
        server.kill()
    wait_until(lambda: all(map(is_over, found)), lambda: "they live on")


def test_a_cluster_that_is_not_there_is_told_by_its_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(InputError, match=r"SHARDWRIGHT_RAY_ADDRESS 10.0.0.9:6379: .*ray start"):
        RayEngine(1, LIMITS, "10.0.0.9:6379").start()
