"""Whatever is uploaded, it is refused or fails its own job, and the server goes on serving."""

import errno
import os
import pickle
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import psutil
import pytest
from api_fixtures import PROGRAM, App
from service_fixtures import Service

from shardwright.planner.program import Program

MIB = 1 << 20
LIMIT = 8 * MIB
ENDS_S = 120.0


def exported() -> bytes:
    """A jax.export artifact."""
    fn = jax.jit(lambda x: {"y": jnp.sin(x) @ x})
    given = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return bytes(jax.export.export(fn, platforms=["tpu"])(given).serialize())


def bytecode() -> bytes:
    """StableHLO bytecode."""
    given = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return Program.trace(lambda x: jnp.sin(x) @ x, given).to_stablehlo()


def random_bytes(count: int) -> bytes:
    return random.Random(0).randbytes(count)


def damaged(data: bytes) -> bytes:
    """Every hundredth byte after the head is another."""
    made = bytearray(data)
    for at in range(200, len(made), 100):
        made[at] ^= 0x55
    return bytes(made)


def nested(depth: int) -> bytes:
    """Regions inside regions: a parser that recurses runs out of stack."""
    opened = b'"stablehlo.custom_call"() ({\n' * depth
    return b"module {\n" + opened + b"}) : () -> ()\n" * depth + b"}\n"


def doubling(times: int) -> bytes:
    """Functions that call the next one twice: inlined, it is 2**times operations."""
    tensor = "tensor<8xf32>"
    text = ["module {", f"func.func public @main(%x: {tensor}) -> {tensor} {{",
            f"%0 = call @f0(%x) : ({tensor}) -> {tensor}", f"return %0 : {tensor} }}"]  # fmt: skip
    for i in range(times):
        text += [
            f"func.func private @f{i}(%x: {tensor}) -> {tensor} {{",
            f"%0 = call @f{i + 1}(%x) : ({tensor}) -> {tensor}",
            f"%1 = call @f{i + 1}(%0) : ({tensor}) -> {tensor}",
            f"return %1 : {tensor} }}",
        ]
    text += [
        f"func.func private @f{times}(%x: {tensor}) -> {tensor} {{",
        f"%0 = stablehlo.add %x, %x : {tensor}",
        f"return %0 : {tensor} }} }}",
    ]
    return "\n".join(text).encode()


def of_constant(text: str, kind: str) -> bytes:
    """A program that returns a constant."""
    return (
        f"module {{ func.func public @main() -> {kind} {{ %0 = stablehlo.constant {text} : {kind} "
        f"return %0 : {kind} }} }}"
    ).encode()


class Payload:
    """What pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/shardwright-unpickled",)


# A 4xx, or the kinds of error that a job of it may end with.
REFUSED: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "spaces": lambda: b" \n" * 1000,
    "random bytes": lambda: random_bytes(100_000),
    "random bytes after text": lambda: b"module {" + random_bytes(1000),
    "zeros": lambda: bytes(100_000),
    "a pickle": lambda: pickle.dumps(Payload()),
    "a zip": lambda: b"PK\x03\x04" + random_bytes(1000),
    "an image": lambda: b"\x89PNG\r\n\x1a\n" + random_bytes(1000),
    "HTML": lambda: b"<!doctype html><html></html>",
    "a plan": lambda: b'{\n "schema_version": 1}',
    "Python": lambda: b"import os\nos.system('id')\n",
    "UTF-16": lambda: PROGRAM.decode().encode("utf-16"),
    "head of an artifact": lambda: exported()[:120],
    "too large a program": lambda: PROGRAM + b"// \n" * (LIMIT // 4),
}
FAILS: dict[str, Callable[[], bytes]] = {
    "truncated artifact": lambda: exported()[:-100],
    "damaged artifact": lambda: damaged(exported()),
    "truncated bytecode": lambda: bytecode()[:-100],
    "random bytecode": lambda: b"ML\xefR" + random_bytes(100_000),
    "damaged bytecode": lambda: damaged(bytecode()),
    "random text": lambda: b"module { %" + random_bytes(1000).hex().encode() + b"}",
    "truncated text": lambda: PROGRAM[:-40],
    "no main": lambda: b"module {}",
    "unknown operations": lambda: b"module { func.func @main() { evil.op return } }",
    "deep nesting": lambda: nested(20_000),
    "deep types": lambda: b"module { func.func @main(%x: " + b"tuple<" * 100_000 + b"}",
    "calls that double 40 times": lambda: doubling(40),
    "calls in a circle": lambda: doubling(2).replace(b"@f2", b"@f0"),
    "endless constant": lambda: of_constant('dense<"0x00">', "tensor<4611686018427387904xf32>"),
    "dynamic shapes": lambda: PROGRAM.replace(b"8x128", b"?x128"),
}
TAKEN: dict[str, Callable[[], bytes]] = {
    "artifact": exported,
    "bytecode": bytecode,
    "text": lambda: PROGRAM,
    "text after comments": lambda: b"// made by hand\n\n" + PROGRAM,
    "huge constant": lambda: of_constant("dense<1.0>", "tensor<1048576x1048576xf32>"),
}


@pytest.fixture(scope="module")
def hardened(service_factory: Callable[..., Service]) -> Service:
    """A server whose jobs may take little."""
    return service_factory(
        SHARDWRIGHT_MAX_UPLOAD_BYTES=str(LIMIT),
        SHARDWRIGHT_JOB_MEMORY_BYTES=str(512 * MIB),
        SHARDWRIGHT_JOB_SECONDS="20",
        SHARDWRIGHT_WORKERS="2",
    )


def upload(url: str, data: Any) -> httpx.Response:
    headers = {"Content-Type": "application/octet-stream"}
    return httpx.post(f"{url}/v1/programs", content=data, headers=headers, timeout=60)


def looked_into(url: str, program: str) -> dict[str, Any]:
    """A program once its job has ended."""
    deadline = time.monotonic() + ENDS_S
    while True:
        found: dict[str, Any] = httpx.get(f"{url}/v1/programs/{program}").json()
        if found["status"] != "inspecting":
            return found
        assert time.monotonic() < deadline, "the program is never looked into"
        time.sleep(0.1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_program_is_refused_at_once(hardened: Service, name: str) -> None:
    answer = upload(hardened.url, REFUSED[name]())
    assert answer.status_code == (413 if "large" in name else 422)
    problem = answer.json()
    assert problem["what"] and problem["do"]
    assert not os.path.exists("/tmp/shardwright-unpickled")


def test_broken_programs_fail_their_own_jobs_and_the_server_serves_on(hardened: Service) -> None:
    process = psutil.Process(hardened.process.pid)  # type: ignore[union-attr]
    ids = {}
    for name, make in (FAILS | TAKEN).items():
        answer = upload(hardened.url, make())
        assert answer.status_code in (200, 201), (name, answer.text)
        ids[name] = answer.json()["id"]
        assert httpx.get(f"{hardened.url}/healthz").status_code == 200
    for name in FAILS:
        found = looked_into(hardened.url, ids[name])
        assert found["status"] == "invalid", (name, found)
        assert found["error"]["kind"] in (
            "input", "crashed", "out-of-memory", "time-limit",
        ), (name, found["error"])  # fmt: skip
        assert found["error"]["what"], name
        if name == "calls that double 40 times":
            assert found["error"]["kind"] in ("out-of-memory", "time-limit"), found["error"]
    for name in TAKEN:
        found = looked_into(hardened.url, ids[name])
        assert found["status"] == "ready", (name, found)
        assert found["facts"]["outputs"]
    assert process.is_running() and process.pid == hardened.process.pid  # type: ignore[union-attr]
    assert httpx.get(f"{hardened.url}/readyz").status_code == 200


def test_program_that_could_not_be_read_cannot_be_planned(hardened: Service) -> None:
    made = upload(hardened.url, FAILS["no main"]()).json()
    looked_into(hardened.url, made["id"])
    body = {"program": made["id"], "topology": "v5e:2x2"}
    answer = httpx.post(f"{hardened.url}/v1/plans", json=body)
    assert (answer.status_code, answer.json()["where"]) == (422, "program")


class Watch:
    """The most memory that a process had."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.before = self.most = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.02):
            self.most = max(self.most, self._process.memory_info().rss)


def gibibyte(sent: list[int]) -> Iterator[bytes]:
    block = b"ML\xefR" + bytes(MIB - 4)
    for _ in range(1024):
        sent[0] += len(block)
        yield block


def test_gibibyte_is_taken_in_with_flat_memory_and_fails_its_worker_alone(
    service_factory: Callable[..., Service],
) -> None:
    service = service_factory(
        SHARDWRIGHT_MAX_UPLOAD_BYTES=str(2 << 30), SHARDWRIGHT_JOB_MEMORY_BYTES=str(1 << 30)
    )
    upload(service.url, bytecode())
    sent = [0]
    with Watch(service.process.pid) as memory:  # type: ignore[union-attr]
        answer = upload(service.url, gibibyte(sent))
    assert (answer.status_code, answer.json()["nbytes"]) == (201, 1 << 30)
    found = looked_into(service.url, answer.json()["id"])
    assert found["error"]["kind"] == "out-of-memory"
    assert memory.most - memory.before < 64 * MIB
    service.kill()
    shutil.rmtree(service.data_dir)


def test_gibibyte_is_refused_at_the_limit(hardened: Service) -> None:
    sent = [0]
    with Watch(hardened.process.pid) as memory:  # type: ignore[union-attr]
        answer = upload(hardened.url, gibibyte(sent))
    assert (answer.status_code, answer.json()["kind"]) == (413, "too-large")
    assert memory.most - memory.before < 64 * MIB
    uploads = hardened.data_dir / "uploads"
    assert list(uploads.iterdir()) == []


def test_declared_size_is_refused_before_it_is_sent(hardened: Service) -> None:
    head = f"POST /v1/programs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {1 << 40}\r\n"
    for expect in ("", "Expect: 100-continue\r\n"):
        with socket.create_connection(("127.0.0.1", hardened.port), timeout=10) as sender:
            sender.sendall(f"{head}{expect}\r\n".encode())
            assert sender.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_upload_that_breaks_off_leaves_nothing(hardened: Service) -> None:
    def broken() -> Iterator[bytes]:
        yield bytecode()
        raise ConnectionError

    with pytest.raises(ConnectionError):
        upload(hardened.url, broken())
    uploads = hardened.data_dir / "uploads"
    deadline = time.monotonic() + 10
    while list(uploads.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("step", ["upload", "keep"])
def test_full_disk_is_told_as_such(app: App, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {"upload": (app.store, "upload_file"), "keep": (app.store.files, "put")}[step]
    monkeypatch.setattr(*target, full)
    answer = app.client.post(
        "/v1/programs", content=PROGRAM, headers={"Content-Type": "text/plain"}
    )
    assert (answer.status_code, answer.json()["kind"]) == (507, "storage-full")


def test_same_bytes_again_are_the_same_program(app: App) -> None:
    first = app.client.post("/v1/programs", content=PROGRAM)
    again = app.client.post("/v1/programs", content=PROGRAM)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"] == first.headers["location"][-64:]


@pytest.mark.parametrize("given", ["application/json", "multipart/form-data; boundary=x", "x"])
def test_upload_of_another_type_is_refused(shared_app: App, given: str) -> None:
    headers = {"Content-Type": given}
    answer = shared_app.client.post("/v1/programs", content=PROGRAM, headers=headers)
    assert answer.status_code == 415
    assert "octet-stream" in answer.json()["do"]
