"""What docs/exploring.md says: its commands parse, its knobs are all, its example is as planned."""

import re
import shlex
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.cli import main
from shardwright.models import build
from shardwright.planner.explore_model import ExplorationModel
from shardwright.planner.explore_space import RESOURCES, TORUS

PAGE = (Path(__file__).parents[1] / "docs" / "exploring.md").read_text()
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^(shardwright explore .*)$", PAGE, re.M)]


def test_every_knob_is_on_the_page() -> None:
    table = PAGE.partition("## What can vary")[2].partition("\n\n## ")[0]
    assert {*RESOURCES, TORUS} <= set(re.findall(r"`(\w+)`", table))


def test_the_small_command_of_the_page_runs(tmp_path: Path) -> None:
    (command,) = [words for words in COMMANDS if "gpt2-124m" in words]
    file = tmp_path / "points.json"
    small = ["--layers=2", "--workers=1", "--time-limit=0.5", "-q", "-o", str(file)]
    assert main([*command, *small]) == 0
    made = ExplorationModel.model_validate_json(file.read_text())
    assert made.minimise == ["step_time", "chips"]
    assert [point.chips for point in made.points] == [4, 16, 32]


def test_steps_of_the_example_are_as_planned() -> None:
    """The real chip's row, whose step `plan` predicts as well."""
    (told,) = re.findall(r"^  4x4x4 +1 +1 +([\d.]+) ", PAGE, re.M)
    model = build("llama3-8b", batch=256)
    made = sw.explore(
        model.step, *model.example_args, base="v5p:4x4x4", vary={"hbm_bandwidth": (1.0,)},
        donate_argnums=model.donate_argnums, time_limit_s=1, workers=1,
    )  # fmt: skip
    (point,) = made.points
    assert point.step_time_s == pytest.approx(float(told), rel=0.15)
