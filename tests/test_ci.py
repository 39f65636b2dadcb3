"""Planning in continuous integration: the sample repository, with the real command."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from shardwright.batch.ci_config import load_config
from shardwright.cli import main

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "examples" / "ci"


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A directory in which `shardwright` is this package's command."""
    directory = tmp_path_factory.mktemp("bin")
    script = directory / "shardwright"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom shardwright.cli import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    return directory


@pytest.fixture
def shell(command):
    """Runs a line of shell in a directory: exit code, stdout, stderr."""

    def run(line, cwd, **environment):
        found = subprocess.run(
            ["bash", "-c", line],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=cwd,
            env=os.environ | {"PATH": f"{command}:{os.environ['PATH']}"} | environment,
        )
        return found.returncode, found.stdout, found.stderr

    return run


def run_here(line, cwd):
    """Runs a line `shardwright ...` in this process, with the modules of that directory."""
    program, *arguments = shlex.split(line, comments=True)
    assert program == "shardwright"
    for name in [name for name in sys.modules if name.partition(".")[0] == "train"]:
        del sys.modules[name]
    with contextlib.chdir(cwd), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        return main(arguments)


@pytest.fixture
def run(capsys):
    """As `shell`, for a command alone: without a process of its own, which takes seconds."""

    def run(line, cwd):
        capsys.readouterr()
        code = run_here(line, cwd)
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """A copy of the sample repository with a lock of this version."""
    path = tmp_path_factory.mktemp("sample") / "repository"
    shutil.copytree(SAMPLE, path)
    assert run_here("shardwright ci update --fresh -q", path) == 0
    return path


@pytest.fixture
def repository(locked, tmp_path):
    shutil.copytree(locked, tmp_path / "repository")
    return tmp_path / "repository"


def change(repository, name, value):
    path = repository / "train" / "config.py"
    text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", path.read_text(), flags=re.M)
    assert count == 1
    path.write_text(text)


def test_an_unchanged_repository_passes_without_solving(repository, shell):
    code, out, _ = shell("shardwright ci check --json", repository)
    data = json.loads(out)
    assert code == 0
    assert data["passed"]
    assert {result["source"] for result in data["results"]} == {"lock"}


def test_twenty_unchanged_jobs_take_seconds(repository, run):
    config = repository / "shardwright.toml"
    job = '[jobs.job{n}]\ntopologies = ["v5e:2x2"]\nmemory_fraction = {part}\n'
    head = config.read_text().partition("[jobs")[0]
    config.write_text(head + "".join(job.format(n=n, part=0.9) for n in range(20)))
    lock = json.loads((repository / "shardwright.lock.json").read_text())
    entry = lock["entries"]["small@v5e:2x2"]
    lock["entries"] = {f"job{n}@v5e:2x2": entry for n in range(20)}
    (repository / "shardwright.lock.json").write_text(json.dumps(lock))
    began = time.monotonic()
    code, out, _ = run("shardwright ci check", repository)
    assert code == 0
    assert "20 of 20 passed; 20 unchanged since the lock" in out
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("name", "value", "code", "kind", "words"),
    [
        ("BATCH", "2**22", 3, "does-not-fit", "no sharding of step"),
        ("LAYERS", "12", 4, "over-budget", "and the budget is 50.0 ms"),
        ("HIDDEN", "10240", 5, "slower", "5.0 % are tolerated"),
        ("BATCH", "1024", 6, "state-resharded", "checkpoints need resharding"),
    ],
)
def test_a_changed_model_fails_for_its_reason(repository, run, name, value, code, kind, words):
    change(repository, name, value)
    found, out, _ = run("shardwright ci check small --json-file plans.json", repository)
    assert found == code
    assert words in " ".join(out.split())
    (result,) = json.loads((repository / "plans.json").read_text())["results"]
    assert kind in [fault["kind"] for fault in result["faults"]]
    assert result["source"] != "lock"
    told = any("locked shardings kept" in note for note in result["notes"])
    assert told == (kind == "state-resharded")


def test_an_update_makes_a_changed_model_pass(repository, run):
    change(repository, "HIDDEN", "10240")
    code, _, err = run("shardwright ci update small", repository)
    assert code == 0, err
    code, out, _ = run("shardwright ci check small", repository)
    assert code == 0
    assert "1 unchanged" in out
    # The other job is still as it was locked before, and so slower now.
    kept = json.loads((repository / "shardwright.lock.json").read_text())["entries"]
    assert set(kept) == {"small@v5e:2x2", "large@v5e:4x4", "large@v6e:4x4"}


def test_a_comment_changes_no_program(repository, run):
    step = repository / "train" / "step.py"
    step.write_text("# A comment\n\n\n" + step.read_text())
    code, out, _ = run("shardwright ci check", repository)
    assert code == 0
    assert "3 unchanged" in out


def test_resharding_can_be_allowed(repository, run):
    change(repository, "BATCH", "1024")
    config = repository / "shardwright.toml"
    config.write_text(config.read_text().replace("donate", "allow_resharding = true\ndonate"))
    code, out, _ = run("shardwright ci check small", repository)
    assert code == 0
    assert "checkpoints need resharding" in " ".join(out.split())


def test_a_new_job_is_not_in_the_lock(repository, run):
    config = repository / "shardwright.toml"
    config.write_text(config.read_text() + '[jobs.more]\ntopologies = ["v5e:1x1"]\n')
    code, out, _ = run("shardwright ci check more", repository)
    assert code == 7
    assert "shardwright ci update" in out


def test_a_job_that_cannot_be_planned_leaves_the_others(repository, run):
    config = repository / "shardwright.toml"
    text = config.read_text() + '[jobs.broken]\ntopologies = ["v5e:2x2"]\nargs = "train.no:args"\n'
    config.write_text(text)
    code, out, _ = run("shardwright ci check --junit junit.xml", repository)
    assert code == 2
    assert "3 of 4 passed" in out
    root = ElementTree.parse(repository / "junit.xml").getroot()
    (suite,) = root.findall("testsuite")
    assert suite.attrib["tests"] == "4"
    assert suite.attrib["errors"] == "1"
    cases = {case.attrib["classname"]: case for case in suite.findall("testcase")}
    (error,) = cases["shardwright.broken"].findall("error")
    assert error.attrib["type"] == "not-planned"
    assert "train.no" in error.attrib["message"]


def test_budgets_are_checked_without_solving_too(repository, run):
    config = repository / "shardwright.toml"
    config.write_text(config.read_text().replace("step_time_s = 0.05", "step_time_s = 0.001"))
    code, out, _ = run("shardwright ci check small", repository)
    assert code == 4
    assert "1 unchanged" in out


def test_budgets_of_money_use_the_prices(repository, run):
    prices = repository / "prices.toml"
    prices.write_text(prices.read_text().replace("v6e = 2.00", "v6e = 2000.0"))
    code, out, _ = run("shardwright ci check large", repository)
    assert code == 4
    assert "a step costs" in out


def test_the_committed_lock_is_of_the_committed_jobs():
    config = load_config(SAMPLE / "shardwright.toml")
    lock = json.loads((SAMPLE / "shardwright.lock.json").read_text())
    jobs = {f"{name}@{on}" for name, job in config.jobs.items() for on in job.topologies}
    assert lock["entries"].keys() == jobs


def test_the_action_runs_the_check_and_shows_its_summary(repository, shell):
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = [step for step in action["runs"]["steps"] if step.get("id") == "check"]
    config = repository / "shardwright.toml"
    config.write_text(config.read_text().replace("step_time_s = 0.05", "step_time_s = 0.001"))
    inputs = {name: given["default"] for name, given in action["inputs"].items()}
    filled = {
        key: inputs[re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1]]
        for key, value in step["env"].items()
    }
    filled |= {"JOBS": "small", "GITHUB_STEP_SUMMARY": "summary", "GITHUB_OUTPUT": "output"}
    code, _, err = shell(step["run"], repository, **filled)
    assert code == 4, err
    assert (repository / "output").read_text() == "exit-code=4\n"
    summary = (repository / "summary").read_text()
    assert "| ❌ | `small` | `v5e:2x2` |" in summary
    assert (repository / inputs["junit"]).exists()


def test_every_command_in_the_docs_runs(repository, run, shell):
    text = (ROOT / "docs" / "ci.md").read_text() + (SAMPLE / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    gitlab = yaml.safe_load(re.search(r"```yaml\n(plans:.*?)```", text, re.S)[1])
    lines += [line for line in gitlab["plans"]["script"] if line.startswith("shardwright")]
    assert len(lines) == 7
    for line in lines:
        code, _, err = (shell if "||" in line else run)(line, repository)
        assert code == 0, (line, err)


def test_the_table_of_the_sample_says_what_happens():
    rows = re.findall(r"\| `(\w+) = (.*?)` \|.*\| (\d) \|", (SAMPLE / "README.md").read_text())
    assert rows == [
        ("BATCH", "2**22", "3"),
        ("LAYERS", "12", "4"),
        ("HIDDEN", "10240", "5"),
        ("BATCH", "256", "6"),
    ]
