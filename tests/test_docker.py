"""The files under docker/: linted, checked against their specification, and run as far as one can
without an engine."""

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from service_fixtures import bare_environment, free_port, wait_until

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
SCRIPTS = sorted(DOCKER.glob("*.sh"))
BIN = Path(sys.executable).parent


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=120, **options
    )


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of each instruction of the Dockerfile, continued lines joined."""
    text = (DOCKER / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def final_stage() -> list[tuple[str, str]]:
    found = instructions()
    starts = [i for i, (name, _) in enumerate(found) if name == "FROM"]
    return found[starts[-1] :]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return loaded


def test_dockerfile_passes_hadolint() -> None:
    found = run(BIN / "hadolint", DOCKER / "Dockerfile")
    assert (found.returncode, found.stdout) == (0, "")


def test_compose_file_passes_its_linter() -> None:
    found = run(BIN / "compose-lint", DOCKER / "compose.yaml")
    assert found.returncode == 0, found.stdout


def test_compose_file_is_of_the_compose_specification(compose: dict[str, Any]) -> None:
    schema = json.loads((ROOT / "tests/data/compose/compose-spec.json").read_text())
    assert [
        error.message for error in jsonschema.Draft7Validator(schema).iter_errors(compose)
    ] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script: Path) -> None:
    shell = script.read_text().splitlines()[0].removeprefix("#!/bin/")
    assert shell in ("sh", "bash")
    assert os.access(script, os.X_OK)
    assert run(shell, "-n", script).returncode == 0


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci/run", ROOT / "tests/run"], ids=str)
def test_script_passes_shellcheck(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (Debian's package shellcheck)")
    found = run("shellcheck", script)
    assert (found.returncode, found.stdout) == (0, "")


def test_every_install_step_is_a_script_that_is_there() -> None:
    steps = [arguments for name, arguments in instructions() if name == "RUN"]
    commands = [command.split() for step in steps for command in step.split("&&")]
    called = [command[0] for command in commands if command[0] != "rm"]
    assert called
    assert all((DOCKER / Path(name).name).is_file() for name in called)


def test_base_images_are_pinned_to_a_whole_version(compose: dict[str, Any]) -> None:
    images = [a.split("=")[1] for n, a in instructions() if n == "ARG" and "IMAGE" in a]
    images += [service["image"] for service in compose["services"].values()]
    assert len(images) >= 5
    assert all(re.search(r":\d+\.\d+(\.\d+)?(-[a-z-]+)?$", image) for image in images)


def test_image_runs_as_a_user_who_is_not_root() -> None:
    assert ("USER", "10001:10001") in final_stage()
    (install,) = [a for n, a in final_stage() if n == "RUN"]
    assert "add_user.sh shardwright 10001 /var/lib/shardwright" in install


def test_image_holds_nothing_but_what_the_ignore_file_lets_in() -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert rules[1] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert _packages() <= allowed
    assert not allowed & {"tests", ".git", "docs", "benchmarks"}
    copied = [a.split()[:-1] for n, a in instructions() if n == "COPY" and "--from" not in a]
    assert {path.split("/")[0] for paths in copied for path in paths} <= allowed | {"."}


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _packages() -> set[str]:
    """Folders that pyproject.toml installs."""
    return set(_project()["tool"]["setuptools"]["package-dir"].values())


def test_image_has_a_version_of_everything_that_it_installs() -> None:
    project = _project()["project"]
    wanted = [*project["dependencies"]]
    for extra in ("server", "postgres", "ray"):
        wanted += project["optional-dependencies"][extra]
    requirements = [Requirement(text) for text in wanted]
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    for requirement in requirements:
        if canonicalize_name(requirement.name) != "shardwright":
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier


def test_compose_file_holds_no_secret_and_says_which_it_needs(compose: dict[str, Any]) -> None:
    text = (DOCKER / "compose.yaml").read_text()
    wanted = set(re.findall(r"\$\{(\w+)", text))
    told = set(re.findall(r"^(\w+)=", (DOCKER / "env.example").read_text(), re.MULTILINE))
    assert wanted == told
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASS|SECRET|TOKEN|KEY", name):
                assert re.fullmatch(r"\$\{\w+:\?.*\}", value)


def test_every_service_restarts_and_is_watched(compose: dict[str, Any]) -> None:
    image_watches = any(name == "HEALTHCHECK" for name, _ in final_stage())
    for name, service in compose["services"].items():
        assert service["restart"] == "unless-stopped"
        assert "healthcheck" in service or (image_watches and name == "api")


def test_only_the_api_is_reached_from_outside(compose: dict[str, Any]) -> None:
    assert compose["networks"]["inner"] == {"internal": True}
    outside = {
        name
        for name, service in compose["services"].items()
        if "ports" in service or "outer" in service["networks"]
    }
    assert outside == {"api"}
    # Unless it is asked to do otherwise, it publishes to this machine alone.
    assert compose["services"]["api"]["ports"] == ["${SHARDWRIGHT_PUBLISH:-127.0.0.1:8080}:8080"]


def test_package_script_does_nothing_where_all_is_there() -> None:
    found = run(DOCKER / "install_debian_packages.sh", "coreutils", "dpkg")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_package_script_says_what_to_install_where_it_cannot(tmp_path: Path) -> None:
    for name in ("sh", "grep"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    found = run(
        DOCKER / "install_debian_packages.sh", "no-such-package", env={"PATH": str(tmp_path)}
    )
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == (
        "error: this system has no apt-get; install by its own means: no-such-package"
    )


# -- the image's own command ---------------------------------------------------------------------


class Container:
    """What a container would run, as the user and with the variables of the image."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ.get("SHARDWRIGHT_IMAGE", "")
        self.bin = Path(environment) / "bin" if environment else BIN
        self.folder, self.options = folder, {}
        if os.geteuid() == 0:
            if not environment:
                pytest.skip("root needs the image's environment, which .ci/run makes")
            self.options = {"user": pwd.getpwnam("shardwright").pw_uid, "group": 10001}
            shutil.chown(folder, "shardwright", "shardwright")
        settings = next(a for n, a in final_stage() if n == "ENV")
        told = dict(pair.split("=", 1) for pair in settings.split())
        told = {k: v.replace("/var/lib/shardwright", str(folder)) for k, v in told.items()}
        told["TINI_SUBREAPER"] = "1"  # it is not the first process here
        told["PATH"] = f"{self.bin}:/usr/bin:/bin"
        self.environment = told | {"SHARDWRIGHT_PORT": str(free_port())}

    def start(self, *command: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(map(str, command)),
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **self.options,
        )

    def run(self, *command: str | Path) -> tuple[int, str]:
        process = self.start(*command)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def check_health(self) -> tuple[int, str]:
        return self.run(self.bin / "python", self.folder / "healthcheck.py")


@pytest.fixture
def container() -> Iterator[Container]:
    # Folders of pytest are root's alone.
    folder = Path("/tmp") / f"shardwright-image-{os.getpid()}"
    folder.mkdir(mode=0o755)
    shutil.copy(DOCKER / "healthcheck.py", folder)
    try:
        yield Container(folder)
    finally:
        shutil.rmtree(folder)


def test_image_serves_as_its_user_once_there_is_a_key(container: Container) -> None:
    (told,) = [json.loads(a) for n, a in final_stage() if n == "CMD"]
    (entry,) = [json.loads(a) for n, a in final_stage() if n == "ENTRYPOINT"]
    if shutil.which("tini") is None:
        pytest.skip("tini is not installed (Debian's package tini)")
    code, output = container.run(*entry, *told)
    assert code == 2 and "there are no keys" in output

    code, key = container.run(*entry, "keys", "create", "first")
    assert code == 0 and key.startswith("sw_")
    assert container.check_health()[0] == 1

    server = container.start(*entry, *told)
    try:
        deadline = time.monotonic() + 90
        while container.check_health()[0] != 0:
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)
    finally:
        server.terminate()
        output, _ = server.communicate(timeout=60)
    assert server.returncode in (0, 128 + signal.SIGTERM) and "Traceback" not in output


def test_server_of_a_cluster_joins_it_without_taking_work(ray_address: str, tmp_path: Path) -> None:
    import psutil
    import ray

    port, mark = free_port(), f"SHARDWRIGHT_TEST={tmp_path}"
    environment = bare_environment() | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "SHARDWRIGHT_DATA_DIR": str(tmp_path / "data"),
        "SHARDWRIGHT_ENGINE": "ray",
        "SHARDWRIGHT_RAY_ADDRESS": ray_address,
        "SHARDWRIGHT_WORKERS": "1",
        "SHARDWRIGHT_PORT": str(port),
        "SHARDWRIGHT_TEST": str(tmp_path),
    }
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [DOCKER / "serve_on_ray.sh"], env=environment, stdout=output, stderr=output
        )
    try:
        wait_until(lambda: answers(port) or server.poll() is not None, log.read_text)
        assert server.poll() is None, log.read_text()
        ray.init(address=ray_address, log_to_driver=False, configure_logging=False)
        cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        ray.shutdown()
        assert sorted(cpus) == [0, 2]
        server.terminate()
        assert server.wait(60) in (0, 128 + signal.SIGTERM)
    finally:
        # A container's end takes the node with it; here it would stay.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if f"SHARDWRIGHT_TEST={process.environ().get('SHARDWRIGHT_TEST')}" == mark:
                    process.kill()


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    return False
