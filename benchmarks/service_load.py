"""Loads a real server on loopback: reads, hits on stored plans, submissions, a crash.

    python benchmarks/service_load.py [--seconds 5] [--submissions 200] [--workers 2]

The server is `shardwright serve` in a child process with a folder of its own. 64 connections ask as
fast as answers come; times are of whole requests as a client sees them, CPU is the processor time
of the server for each. Client, server and workers share the machine, so that rates would be higher
from another. The claims, checked at the end:

- every submission that was accepted is there once after kill -9 and a restart, and succeeded;
- the queue never held more than its limit;
- the server's resident memory stays within 64 MiB of what it was after the first reads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

CONNECTIONS = 64
QUEUE_LIMIT = 150
RETRY_S = 1.0
FLAT_BYTES = 64 << 20
MODEL = {
    "name": "mlp",
    "options": {"layers": 2, "batch": 256, "features": 256, "hidden": 512, "classes": 64},
}
PLAN = {"model": MODEL, "topology": "v5e:2x2", "mesh": {"data": 2, "model": 2}, "time_limit_s": 1}


@dataclass
class Answer:
    """A response and the seconds that it took."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Connection:
    """One HTTP/1.1 connection; a general client would take more time than the server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", headers: str = "") -> Answer:
        """Sends a request and reads the whole answer."""
        started = time.perf_counter()
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        kind = "Content-Type: application/json\r\n" if body else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}{headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        top = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in top[1:] if ": " in line)
        content = await self._reader.readexactly(int(fields.get("content-length", 0)))
        return Answer(int(top[0].split()[1]), fields, content, time.perf_counter() - started)

    def close(self) -> None:
        """Closes it."""
        if self._writer is not None:
            self._writer.close()


@dataclass
class Server:
    """The server in a child process."""

    folder: Path
    workers: int
    port: int
    process: psutil.Popen | None = None

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        code = "import sys; from shardwright.cli import main; sys.exit(main(['serve']))"
        environment = os.environ | {
            "SHARDWRIGHT_DATA_DIR": str(self.folder / "data"),
            "SHARDWRIGHT_PORT": str(self.port),
            "SHARDWRIGHT_WORKERS": str(self.workers),
            "SHARDWRIGHT_QUEUE_LIMIT": str(QUEUE_LIMIT),
            "SHARDWRIGHT_LOG_LEVEL": "error",
        }
        with (self.folder / "log").open("ab") as log:
            self.process = psutil.Popen(
                [sys.executable, "-c", code], env=environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 120
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((self.folder / "log").read_text())
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.1)

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def cpu_seconds(self) -> float:
        """Processor time that it has taken, without that of its workers."""
        assert self.process is not None
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Its memory now."""
        assert self.process is not None
        return int(self.process.memory_info().rss)


@dataclass
class Load:
    """Requests of many connections."""

    name: str
    answers: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def row(self) -> str:
        """A line of the table."""
        times = sorted(self.answers)
        p50, p99 = (times[int(part * (len(times) - 1))] * 1e3 for part in (0.5, 0.99))
        statuses = ", ".join(f"{n} x {status}" for status, n in sorted(self.statuses.items()))
        rate = len(times) / self.seconds
        cpu = self.cpu_seconds / len(times) * 1e3
        return f"{self.name:<36}{rate:>11,.0f}{p50:>9.1f}{p99:>9.1f}{cpu:>9.2f}   {statuses}"


async def drive(
    server: Server, name: str, seconds: float, request: tuple[str, str, bytes, str]
) -> Load:
    """Sends one request from every connection again and again."""
    load = Load(name)
    until = time.perf_counter() + seconds

    async def one() -> None:
        connection = Connection(server.port)
        while time.perf_counter() < until:
            answer = await connection.ask(*request)
            load.answers.append(answer.seconds)
            load.statuses[answer.status] += 1
        connection.close()

    with measured(server, load):
        await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return load


@contextlib.contextmanager
def measured(server: Server, load: Load) -> Iterator[None]:
    """Notes how long the block takes, and how much processor time it costs the server."""
    started, cpu = time.perf_counter(), server.cpu_seconds()
    yield
    load.seconds = time.perf_counter() - started
    load.cpu_seconds = server.cpu_seconds() - cpu


async def reads(server: Server, seconds: float) -> list[Load]:
    """Reads a finished plan, and asks for one that is stored."""
    body = json.dumps(PLAN).encode()
    connection = Connection(server.port)
    plan = (await connection.ask("POST", "/v1/plans", body)).json()
    at = plan["links"]["self"]
    while (await connection.ask("GET", at)).json()["status"] != "succeeded":
        await asyncio.sleep(0.2)
    whole = await connection.ask("GET", f"{at}/plan.json")
    print(f"plan.json has {len(whole.body):,} bytes")
    known = f"If-None-Match: {whole.headers['etag']}\r\n"
    requests = {
        "GET plan.json": ("GET", f"{at}/plan.json", b"", ""),
        "GET plan.json, If-None-Match": ("GET", f"{at}/plan.json", b"", known),
        "GET /v1/plans/{id}": ("GET", at, b"", ""),
        "GET /v1/plans": ("GET", "/v1/plans", b"", ""),
        "POST /v1/plans, stored": ("POST", "/v1/plans", body, ""),
    }
    connection.close()
    return [await drive(server, name, seconds, r) for name, r in requests.items()]


async def submissions(server: Server, count: int, depth: list[int]) -> tuple[Load, set[str]]:
    """Asks for many different plans at once, again where the queue is full."""
    load = Load(f"POST /v1/plans, {count} new at once")
    ids: set[str] = set()
    bodies: Iterator[bytes] = iter(
        [json.dumps(PLAN | {"seed": seed}).encode() for seed in range(1, count + 1)]
    )

    async def one() -> None:
        connection = Connection(server.port)
        for body in bodies:
            while True:
                answer = await connection.ask("POST", "/v1/plans", body)
                load.answers.append(answer.seconds)
                load.statuses[answer.status] += 1
                if answer.status != 429:
                    break
                await asyncio.sleep(RETRY_S)
            ids.add(answer.json()["id"])
        connection.close()

    async def watch() -> None:
        connection = Connection(server.port)
        while True:
            depth.append(await queue_depth(connection))
            await asyncio.sleep(0.2)

    watcher = asyncio.create_task(watch())
    with measured(server, load):
        await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    watcher.cancel()
    return load, ids


async def queue_depth(connection: Connection) -> int:
    """How many jobs wait."""
    text = (await connection.ask("GET", "/metrics")).body.decode()
    line = next(x for x in text.splitlines() if x.startswith("shardwright_queue_depth "))
    return int(float(line.split()[1]))


async def finished(port: int, count: int, timeout: float) -> dict[str, dict[str, Any]]:
    """All plans by id, once as many have ended as were asked for, or time is up."""
    connection = Connection(port)
    until = time.monotonic() + timeout
    while True:
        found: dict[str, dict[str, Any]] = {}
        path = "/v1/plans?limit=200"
        while path:
            page = (await connection.ask("GET", path)).json()
            found |= {item["id"]: item for item in page["items"]}
            cursor = page["next_cursor"]
            path = cursor and f"/v1/plans?limit=200&cursor={cursor}"
        ended = [one for one in found.values() if one["status"] not in ("queued", "running")]
        if len(ended) >= count or time.monotonic() > until:
            connection.close()
            return found
        await asyncio.sleep(0.5)


async def crash(server: Server, count: int, timeout: float) -> tuple[list[Load], list[str]]:
    """Submits, kills the server when a fifth is done, restarts it and counts."""
    depth: list[int] = []
    load, accepted = await submissions(server, count, depth)
    resident = [server.resident_bytes()]
    connection = Connection(server.port)
    while await queue_depth(connection) > max(count - count // 5, 0):
        await asyncio.sleep(0.2)
    connection.close()
    server.kill()
    started = time.monotonic()
    server.start()
    restarted = time.monotonic() - started
    found = await finished(server.port, count + 1, timeout)
    resident.append(server.resident_bytes())
    statuses = Counter(found[one]["status"] if one in found else "lost" for one in accepted)
    doubled = Counter(json.dumps(one["request"], sort_keys=True) for one in found.values())
    attempts = Counter(found[one]["attempts"] for one in accepted if one in found)
    lines = [
        f"queue: at most {max(depth)} waited, {QUEUE_LIMIT} may",
        f"kill -9 and restart: serving again after {restarted:.1f} s",
        f"accepted {len(accepted)}: "
        + ", ".join(f"{number} {status}" for status, number in statuses.items())
        + f"; made twice: {sum(number > 1 for number in doubled.values())}",
        "attempts: " + ", ".join(f"{n} plans took {a}" for a, n in sorted(attempts.items())),
        f"all done {time.monotonic() - started:.0f} s after the restart",
        "resident memory: "
        + " MiB before the crash, ".join(f"{one / 2**20:.0f}" for one in resident)
        + " MiB at the end",
    ]
    assert max(depth) <= QUEUE_LIMIT, "the queue outgrew its limit"
    assert statuses == {"succeeded": count}, f"plans were lost: {statuses}"
    assert all(number == 1 for number in doubled.values()), "plans were made twice"
    return [load], lines


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def table(loads: Sequence[Load]) -> None:
    """Prints what was measured."""
    print(
        f"{'64 connections':<36}{'requests/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>9}   answers"
    )
    for load in loads:
        print(load.row())


def main() -> None:
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each kind of read")
    parser.add_argument("--submissions", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="for all plans, in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardwright-load-") as folder:
        server = Server(Path(folder), options.workers, free_port())
        server.start()
        try:
            at_start = server.resident_bytes()
            asyncio.run(reads(server, 0.5))
            warm = server.resident_bytes()
            loads = asyncio.run(reads(server, options.seconds))
            after = server.resident_bytes()
            more, lines = asyncio.run(crash(server, options.submissions, options.timeout))
        finally:
            server.kill()
    table([*loads, *more])
    print(
        f"resident memory: {at_start / 2**20:.0f} MiB at start, {warm / 2**20:.0f} MiB after the "
        f"first reads, {after / 2**20:.0f} MiB after {sum(len(x.answers) for x in loads):,} more"
    )
    for line in lines:
        print(line)
    assert after - warm < FLAT_BYTES, "the server's memory grew"


if __name__ == "__main__":
    main()
