"""Fixtures that start the real thing in child processes: the service, Postgres, a Ray cluster.

`SHARDWRIGHT_REQUIRE_ALL=1` makes a test that would be skipped for want of one of these fail.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

_START_S = 120.0
_FIXTURES = ("service_factory", "service", "postgres_server", "postgres_url", "ray_address")
# A token in the home folder of whoever runs the tests would be asked for.
_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
REQUIRE_ALL = os.environ.get("SHARDWRIGHT_REQUIRE_ALL") == "1"


def lacking(what: str) -> None:
    """Skips the test that asks, or fails it where everything must be there."""
    if REQUIRE_ALL:
        pytest.fail(f"{what}, and SHARDWRIGHT_REQUIRE_ALL=1 asks for everything")
    pytest.skip(what)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Where everything must be there, a skip of any kind is a failure."""
    report = yield
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under SHARDWRIGHT_REQUIRE_ALL=1: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one module that share a server run in one process (pytest-xdist's loadgroup)."""
    for item in items:
        if set(_FIXTURES) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def child(*command: str | Path) -> list[str | Path]:
    """A command whose process ends when the one that started it does, however that ends."""
    tied = shutil.which("setpriv")
    return [tied, "--pdeathsig", "KILL", *command] if tied else [*command]


def bare_environment() -> dict[str, str]:
    """This environment without what tests and the settings of the service put into it."""
    unwanted = ("JAX_PLATFORMS", "XLA_FLAGS", "COLUMNS")
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in unwanted and not key.startswith(("SHARDWRIGHT_", "RAY_"))
    }
    return kept | _RAY


def shardwright(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    code = "import sys; from shardwright.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=bare_environment() | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=_START_S,
    )


@dataclass
class Service:
    """`shardwright serve` in a child process.

    Attributes:
      data_dir: its folder; the log is beside it.
      environment: variables of its settings, beside folder and port.
    """

    data_dir: Path
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def settings(self) -> dict[str, str]:
        """All its variables, for commands about the same store."""
        own = {"SHARDWRIGHT_DATA_DIR": str(self.data_dir), "SHARDWRIGHT_PORT": str(self.port)}
        return own | self.environment

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def _log(self) -> Path:
        return self.data_dir.with_suffix(".log")

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        code = "import sys; from shardwright.cli import main; sys.exit(main(['serve']))"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                child(sys.executable, "-c", code),
                env=bare_environment() | self.settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._ready, lambda: f"the server is not ready:\n{self.log}")

    def _ready(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            raise AssertionError(f"the server has ended:\n{self.log}")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        return False

    def kill(self) -> None:
        """Ends it at once, as a crash or a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Ends it as an administrator would."""
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def restart(self) -> None:
        """Ends it if it runs and starts it again, on the same store and port."""
        if self.process is not None and self.process.poll() is None:
            self.stop()
        self.start()

    def make_key(self, name: str, *options: str) -> str:
        """Makes an API key."""
        made = shardwright("keys", "create", name, *options, **self.settings)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()


def wait_until(ready: Callable[[], bool], failure: Callable[[], str]) -> None:
    """Waits for something that starts."""
    deadline = time.monotonic() + _START_S
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(failure())
        time.sleep(0.1)


@pytest.fixture(scope="module")
def service_factory(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Service]]:
    """Starts services, each with a folder of its own: `service_factory(SHARDWRIGHT_WORKERS="1")`.

    `started=False` gives one that does not run yet.
    """
    made: list[Service] = []

    def make(*, started: bool = True, **environment: str) -> Service:
        folder = tmp_path_factory.mktemp("service") / "data"
        service = Service(folder, {"SHARDWRIGHT_WORKERS": "1"} | environment)
        made.append(service)
        if started:
            service.start()
        return service

    yield make
    for service in made:
        service.kill()


@pytest.fixture(scope="module")
def service(service_factory: Callable[..., Service]) -> Service:
    """A service with SQLite and one worker process, without keys."""
    return service_factory()


# -- Postgres ------------------------------------------------------------------------------------


def postgres_program(name: str) -> Path | None:
    """A program of the newest Postgres of Debian's packages, or of the PATH."""
    versions = sorted(
        Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda p: float(p.parts[4])
    )
    found = shutil.which(name)
    return versions[-1] if versions else Path(found) if found else None


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A Postgres of its own in a temporary folder; its URL, without a database."""
    initdb, postgres = postgres_program("initdb"), postgres_program("postgres")
    if initdb is None or postgres is None:
        lacking("Postgres is not installed (Debian's package postgresql)")
    # It refuses to run as root. Its sockets have short paths, in a folder open to their user.
    user: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="shardwright-postgres-", dir="/tmp"))
    if os.geteuid() == 0:
        names = {account.pw_name: account for account in pwd.getpwall()}
        account = names.get("postgres") or names["nobody"]
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        os.chown(folder, account.pw_uid, account.pw_gid)
    port, data, log = free_port(), folder / "data", folder / "log"
    try:
        subprocess.run(
            [initdb, "--pgdata", data, "--username=shardwright", "--auth=trust", "--no-sync",
             "--encoding=UTF8", "--locale=C"],
            check=True, capture_output=True, cwd=folder, **user,
        )  # fmt: skip
        with log.open("wb") as output:
            server = subprocess.Popen(
                child(
                    postgres, "-D", data, "-p", str(port), "-k", folder, "-h", "127.0.0.1",
                    "-c", "fsync=off",
                ),
                cwd=folder, stdout=output, stderr=output, **user,
            )  # fmt: skip
        try:
            wait_until(lambda: _postgres_answers(port), log.read_text)
            yield f"postgresql+psycopg://shardwright@127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGINT)  # fast shutdown
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _postgres_answers(port: int) -> bool:
    import psycopg

    with contextlib.suppress(psycopg.OperationalError):
        psycopg.connect(host="127.0.0.1", port=port, user="shardwright", dbname="postgres").close()
        return True
    return False


@pytest.fixture(scope="module")
def postgres_url(postgres_server: str) -> str:
    """The URL of an empty database of a real Postgres."""
    import psycopg

    name = f"test_{time.monotonic_ns()}"
    place = postgres_server.replace("+psycopg", "")
    with psycopg.connect(f"{place}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return f"{postgres_server}/{name}"


# -- Ray -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A real Ray cluster of one node with two CPUs; its address as host:port."""
    try:
        import psutil
        import ray  # noqa: F401
    except ImportError as error:
        lacking(f"{error.name} is not installed (shardwright[ray])")
    port, program = free_port(), str(Path(sys.executable).with_name("ray"))
    # The paths of its sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="swray-", dir="/tmp"))
    environment = bare_environment()
    with (folder / "log").open("wb") as log:
        head = subprocess.Popen(
            child(
                program, "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}",
                "--num-cpus=2",
                f"--dashboard-agent-listen-port={free_port()}", "--include-dashboard=false",
                "--object-store-memory=100000000", f"--temp-dir={folder}", "--block",
            ),
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    family = psutil.Process(head.pid)
    try:
        address = f"127.0.0.1:{port}"
        ask = [program, "health-check", f"--address={address}"]

        def healthy() -> bool:
            assert head.poll() is None, (folder / "log").read_text(errors="replace")
            asked = subprocess.run(ask, env=environment, capture_output=True, check=False)
            return asked.returncode == 0

        wait_until(healthy, (folder / "log").read_text)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in _RAY.items():
                patch.setenv(name, value)
            yield address
    finally:
        children = family.children(recursive=True) if head.poll() is None else []
        for process in (family, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
