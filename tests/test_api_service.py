"""`shardwright serve` as a process: who may reach it, how it stops, what it keeps."""

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from api_fixtures import PLAN, App, events_of
from service_fixtures import Service

import shardwright as sw
from shardwright.cli import main

SLOW = {
    "model": {"name": "llama3-8b", "options": {"layers": 2}},
    "topology": "v5e:16x16",
    "time_limit_s": 600,
}
"""A plan that is searched for until somebody stops it."""


def finished(url: str, plan: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    """A plan once it has ended, by its events."""
    answer = httpx.get(f"{url}{plan['links']['events']}", headers=headers, timeout=120)
    _, name, data = events_of(answer.text)[-1]
    assert name == "done"
    return data


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[1])


def test_plan_is_made_followed_and_read(service: Service) -> None:
    made = httpx.post(f"{service.url}/v1/plans", json=PLAN).json()
    done = finished(service.url, made)
    assert done["status"] == "succeeded"
    plan = sw.Plan.from_json(httpx.get(f"{service.url}{done['links']['plan']}").text)
    assert plan.data.topology == "v5e:2x2"
    assert plan.estimate.step_time_s == done["summary"]["step_time_s"]
    assert "stablehlo" in httpx.get(f"{service.url}{done['links']['annotated']}").text
    text = httpx.get(f"{service.url}/metrics").text
    assert 'shardwright_jobs_finished_total{kind="plan",status="succeeded"} 1.0' in text
    assert 'shardwright_job_stage_duration_seconds_count{kind="plan",stage="search"} 1.0' in text
    assert "shardwright_solver_gap_ratio_count 1.0" in text


def test_evaluation_prices_a_sharding(service: Service) -> None:
    body = PLAN | {"mesh": {"data": 4}, "in_specs": {"[1]['features']": [["data"], []]}}
    made = httpx.post(f"{service.url}/v1/evaluations", json=body, timeout=60).json()
    done = finished(service.url, made)
    assert done["status"] == "succeeded", done["error"]
    assert done["estimate"]["step_time_s"] > 0


def test_plan_that_does_not_fit_says_so(service: Service) -> None:
    body = {"model": {"name": "mlp", "options": {"hidden": 65536}}, "topology": "v5e:1x1"}
    done = finished(service.url, httpx.post(f"{service.url}/v1/plans", json=body).json())
    assert (done["status"], done["error"]["kind"]) == ("failed", "does-not-fit")
    assert done["error"]["do"]
    text = httpx.get(f"{service.url}/metrics").text
    assert 'shardwright_job_failures_total{failure="does-not-fit",kind="plan"} 1.0' in text


def test_cancelling_ends_the_work_and_the_stream(service: Service) -> None:
    made = httpx.post(f"{service.url}/v1/plans", json=SLOW).json()
    at = f"{service.url}{made['links']['self']}"
    until(lambda: httpx.get(at).json()["status"] == "running")
    stream = threading.Thread(target=finished, args=(service.url, made))
    stream.start()
    assert httpx.delete(at).json()["status"] == "cancelled"
    stream.join(10)
    assert not stream.is_alive()
    until(lambda: metric(service.url, "shardwright_jobs_running") == 0, 10)


def test_stream_of_a_client_that_goes_away_is_closed(service: Service) -> None:
    made = httpx.post(f"{service.url}/v1/plans", json=SLOW | {"seed": 1}).json()
    process = psutil.Process(service.process.pid)  # type: ignore[union-attr]
    httpx.get(f"{service.url}/healthz")
    files, threads = process.num_fds(), process.num_threads()
    clients = []
    for _ in range(30):
        client = socket.create_connection(("127.0.0.1", service.port))
        client.sendall(
            f"GET {made['links']['events']} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        )
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        clients.append(client)
    assert metric(service.url, "shardwright_event_streams") == 30
    assert process.num_threads() <= threads + 8
    database = service.data_dir / "shardwright.db"
    held = [file for file in process.open_files() if file.path == str(database)]
    assert len(held) <= 20
    for client in clients:
        client.close()
    until(lambda: metric(service.url, "shardwright_event_streams") == 0, 10)
    until(lambda: process.num_fds() <= files + 5, 10)
    httpx.delete(f"{service.url}{made['links']['self']}")


def test_headers_without_end_are_refused(service: Service) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
    for size, status in ((60_000, b"200"), (70_000, b"400")):
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as client:
            client.sendall(head + b"a" * size)
            if status == b"200":
                client.sendall(b"\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 " + status)


def test_server_answers_while_many_wait_for_events(service: Service) -> None:
    """Two hundred streams: none has a thread or a connection to the database of its own."""
    made = httpx.post(f"{service.url}/v1/plans", json=SLOW | {"seed": 2}).json()
    url = f"{service.url}{made['links']['events']}"

    async def watch() -> list[Any]:
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            streams = [asyncio.create_task(client.get(url)) for _ in range(200)]
            await asyncio.sleep(3)
            started = time.monotonic()
            answer = await client.get(f"{service.url}/v1/plans")
            assert answer.status_code == 200
            assert time.monotonic() - started < 10
            await client.delete(f"{service.url}{made['links']['self']}")
            return [events_of(answer.text)[-1] for answer in await asyncio.gather(*streams)]

    ends = asyncio.run(watch())
    assert [(name, data["status"]) for _, name, data in ends] == [("done", "cancelled")] * 200


def test_stopping_gives_running_plans_back_and_the_next_start_makes_them(
    service_factory: Callable[..., Service],
) -> None:
    service = service_factory()
    slow = httpx.post(f"{service.url}/v1/plans", json=SLOW).json()
    quick = httpx.post(f"{service.url}/v1/plans", json=PLAN).json()
    until(lambda: httpx.get(f"{service.url}{slow['links']['self']}").json()["status"] == "running")
    family = psutil.Process(service.process.pid).children(recursive=True)  # type: ignore[union-attr]
    assert family
    texts: list[str] = []
    stream = threading.Thread(
        target=lambda: texts.append(
            httpx.get(f"{service.url}{slow['links']['events']}", timeout=60).text
        )
    )
    stream.start()
    until(lambda: metric(service.url, "shardwright_event_streams") == 1)
    started = time.monotonic()
    service.stop()
    assert service.process.returncode in (0, -signal.SIGTERM)  # type: ignore[union-attr]
    assert time.monotonic() - started < 40
    stream.join(10)
    assert "event: done" not in texts[0]
    assert not [child for child in family if child.is_running() and child.status() != "zombie"]
    service.start()
    until(lambda: httpx.get(f"{service.url}{slow['links']['self']}").json()["status"] == "running")
    httpx.delete(f"{service.url}{slow['links']['self']}")
    assert finished(service.url, quick)["status"] == "succeeded"
    service.kill()


class Command:
    """The command in this process, on a store of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        code = main([*arguments, "--data-dir", str(self._folder)])
        told = self._capsys.readouterr()
        return code, told.out, told.err


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_address_that_others_reach_is_refused_without_keys(command: Command, host: str) -> None:
    code, _, told = command("serve", "--host", host)
    assert code == 2
    assert told.count("\n") == 1
    assert "shardwright keys create" in told


def test_address_that_others_reach_is_bound_with_keys(
    service_factory: Callable[..., Service],
) -> None:
    service = service_factory(started=False, SHARDWRIGHT_HOST="0.0.0.0")
    key = service.make_key("mine")
    service.start()
    assert httpx.get(f"{service.url}/v1/plans").status_code == 401
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{service.url}/v1/plans", headers=headers).status_code == 200
    service.kill()


def test_port_that_is_taken_is_told(command: Command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, told = command("serve", "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "Give another --port" in told


@pytest.mark.parametrize(
    ("name", "value"), [("WORKERS", "many"), ("QUEUE_LIMIT", "0"), ("DATABASE_URL", "mysql://x")]
)
def test_wrong_setting_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"SHARDWRIGHT_{name}", value)
    code, _, told = command("serve")
    assert code == 2
    assert f"SHARDWRIGHT_{name}" in told
    assert told.count("\n") == 1


def test_keys_are_made_listed_and_revoked(command: Command, tmp_path: Path) -> None:
    made = json.loads(
        command("keys", "create", "ci", "--scope", "plan", "--owner", "team", "--json")[1]
    )
    code, text, note = command("keys", "create", "me", "--quota", "5")
    assert code == 0 and text.startswith("sw_") and "not shown again" in note
    secret = text.strip().rpartition("_")[2]
    first, second = json.loads(command("keys", "list", "--json")[1])
    assert (first["name"], first["owner"], first["scopes"]) == ("ci", "team", ["plan"])
    assert (second["scopes"], second["plan_quota_per_day"]) == (["read", "plan"], 5)
    assert command("keys", "revoke", made["id"])[0] == 0
    first, second = json.loads(command("keys", "list", "--json")[1])
    assert first["revoked_at"] and not second["revoked_at"]
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("shardwright.db*"))
    assert second["id"].encode() in kept and secret.encode() not in kept


def test_wrong_key_commands_are_refused(command: Command) -> None:
    assert command("keys", "revoke", "nothing")[0] == 2
    code, _, told = command("keys", "create", "x", "--scope", "all")
    assert code == 2 and "read, plan, admin" in told


def test_server_is_alive_but_not_ready_while_its_database_is_away(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy.exc import OperationalError

    def away(*_: object, **__: object) -> None:
        raise OperationalError("SELECT 1", {}, ConnectionError("refused"))

    made = app.submit()
    monkeypatch.setattr(app.store.database, "read", away)
    # What was remembered for two seconds is forgotten.
    app.client.app.state.gate._keyed_until = 0.0  # type: ignore[attr-defined]
    assert app.client.get("/healthz").status_code == 200
    for path in ("/readyz", "/v1/plans", made["links"]["self"]):
        answer = app.client.get(path)
        assert (answer.status_code, answer.json()["kind"]) == (503, "unavailable")
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["retry-after"]) > 0
    monkeypatch.undo()
    assert app.client.get("/readyz").status_code == 200


def test_server_is_not_ready_while_jobs_do_not_run(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = app.client.app.state.context.runner  # type: ignore[attr-defined]
    monkeypatch.setattr(runner, "trouble", lambda: "the dispatcher has ended")
    answer = app.client.get("/readyz")
    assert (answer.status_code, answer.json()["what"]) == (503, "the dispatcher has ended")
    assert app.client.get("/healthz").status_code == 200


def test_server_never_imports_jax(service: Service) -> None:
    """It would take memory and time, and is for workers."""
    maps = Path(f"/proc/{service.process.pid}/maps")  # type: ignore[union-attr]
    if not maps.exists():
        pytest.skip("there is no /proc")
    assert "jaxlib" not in maps.read_text()
