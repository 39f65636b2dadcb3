"""Pictures of a plan as files: every one is there, in the form that was asked for."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = sw.plan(
        lambda w, x: (w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), jnp.sum(x)),
        jax.ShapeDtypeStruct((4096, 4096), jnp.float32),
        jax.ShapeDtypeStruct((8192, 4096), jnp.float32),
        topology="v5e:2x4",
        mesh={"data": 4, "model": 2},
        donate_argnums=(0,),
    )
    path = tmp_path_factory.mktemp("pictures") / "plan.json"
    plan.save(path)
    return path


def needs_a_browser() -> None:
    try:
        import kaleido  # noqa: F401
    except ImportError:
        lacking("kaleido is not installed (shardwright[pictures])")
    if not any(map(shutil.which, _BROWSERS)):
        lacking("there is no Chromium (Debian's package chromium)")


def test_pictures_are_written_in_both_forms(plan_path: Path, tmp_path: Path) -> None:
    needs_a_browser()
    png, svg = tmp_path / "png", tmp_path / "svg"
    assert main(["report", str(plan_path), "--png", str(png), "--svg", str(svg)]) == 0
    names = {"torus-data", "torus-model", "step-time", "memory", "collectives"}
    assert {path.stem for path in png.iterdir()} == names
    assert {path.stem for path in svg.iterdir()} == names
    for path in png.iterdir():
        content = path.read_bytes()
        assert content.startswith(_PNG)
        width = int.from_bytes(content[16:20])
        assert width >= 300, path
    for path in svg.iterdir():
        root = ET.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not plan_path.with_suffix(".html").exists()


def test_a_folder_that_cannot_be_made_is_told(
    plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["report", str(plan_path), "--svg", str(tmp_path / "file" / "under")]) == 2
    assert "pictures cannot be written here" in capsys.readouterr().err
