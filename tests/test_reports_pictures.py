"""Pictures of a plan as files: every one is there, in the form that was asked for."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from service_fixtures import lacking

import shardwright as sw
from shardwright.cli import main

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PNG = b"\x89PNG\r\n\x1a\n"


def needs_a_browser() -> None:
    try:
        import kaleido  # noqa: F401
    except ImportError:
        lacking("kaleido is not installed (shardwright[pictures])")
    if not any(map(shutil.which, _BROWSERS)):
        lacking("there is no Chromium (Debian's package chromium)")


def documented_commands() -> list[list[str]]:
    text = (Path(__file__).parent.parent / "docs" / "reports.md").read_text(encoding="utf-8")
    lines = [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.split("\n")
    ]
    return [shlex.split(line)[1:] for line in lines if line.startswith("shardwright ")]


def test_the_documented_commands_write_the_page_and_every_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_a_browser()
    monkeypatch.chdir(tmp_path)
    commands = documented_commands()
    assert [command[0] for command in commands] == ["plan", "report", "report", "report"]
    for command in commands:
        assert main(command) == 0, command
    axes = json.loads(Path("plan.json").read_text(encoding="utf-8"))["mesh_axes"]
    names = {*(f"torus-{axis}" for axis in axes), "step-time", "memory", "collectives"}
    for suffix in ("svg", "png"):
        assert {path.stem for path in Path("pictures").glob(f"*.{suffix}")} == names
    for path in Path("pictures").glob("*.png"):
        content = path.read_bytes()
        assert content.startswith(_PNG)
        assert int.from_bytes(content[16:20]) >= 200, path  # its width
    for path in Path("pictures").glob("*.svg"):
        root = ET.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_a_folder_that_cannot_be_made_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = sw.plan(
        lambda x: x + 1,
        jax.ShapeDtypeStruct((8, 128), jnp.float32),
        topology="v5e:2x2",
        mesh={"data": 4},
    )
    plan.save(tmp_path / "plan.json")
    under = tmp_path / "plan.json" / "under"
    assert main(["report", str(tmp_path / "plan.json"), "--svg", str(under)]) == 2
    assert "pictures cannot be written here" in capsys.readouterr().err
    assert not (tmp_path / "plan.html").exists()
