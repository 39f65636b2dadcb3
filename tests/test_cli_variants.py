"""`shardwright plan` with several forms of a step: chosen, told, refused where they are none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardwright.cli import main
from shardwright.cli_variants import split_choices
from shardwright.errors import InputError

SIZES = {"features": 256, "hidden": 512, "layers": 2, "classes": 64, "batch": 1024}
MLP = ["mlp", "-t", "v5e:2x2", "--mesh", "data=4", *(f"--set={k}={v}" for k, v in SIZES.items())]
STEPS = """
import jax, jax.numpy as jnp

args = (jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((1024, 256), "float32"))


def once(w, x):
    return jnp.tanh(x @ w)


def twice(w, x):
    return jnp.tanh(once(w, x) @ w)


variants = {"twice": twice, "once": once}
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with two forms of a step in the current directory."""
    (tmp_path / "my_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    return "my_steps"


def test_values_of_an_option_are_chosen_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *MLP, "--microbatches", "4,1", "-q", "-o", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Variants  2 forms of the step" in shown
    assert "microbatches=1" in shown
    plan = json.loads(path.read_text())
    assert plan["variant"] == "microbatches=1"
    assert plan["program"]["origin"]["options"] == SIZES | {"microbatches": 1}
    # A single value is an option as any other, without variants.
    assert main(["plan", *MLP, "--microbatches", "4", "-q", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["variants"] == []
    assert alone["program"]["origin"]["options"] == SIZES | {"microbatches": 4}


def test_a_dict_of_functions_is_planned(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--variants", f"{steps}:variants", "--args", f"{steps}:args", "--json", "-q"]
    assert main(["plan", *asked, "-t", "v5e:2x2", "--mesh", "a=4"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["variant"] == "once"
    assert [one["name"] for one in plan["variants"]] == ["twice", "once"]


def test_the_form_that_was_planned_is_found_again(
    steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    asked = ["--variants", f"{steps}:variants", "--args", f"{steps}:args", "-q", "-o", str(path)]
    assert main(["plan", *asked, "-t", "v5e:2x2", "--mesh", "a=4"]) == 0
    capsys.readouterr()
    assert main(["verify", str(path), "--compiler", "cpu", "--quiet"]) == 0
    assert "1 results differ from one device's by at most" in capsys.readouterr().out
    # A form that is gone from the module since is told.
    data = json.loads(path.read_text())
    data["program"]["origin"]["variant"] = "thrice"
    path.write_text(json.dumps(data))
    assert main(["verify", str(path), "--compiler", "cpu", "--quiet"]) == 2
    assert "no variant 'thrice' any more; there are twice, once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to plan"),
        (["mlp", "--variants", "my_steps:variants"], "a program and --variants"),
        (["--variants", "my_steps:variants"], "arguments of 'twice' are not given"),
        (["--variants", "my_steps:args"], "mapping of names"),
        (["--variants", "my_steps:variants", "--set", "batch=8"], "options of a model"),
        (["my_steps:once", "--args", "my_steps:args", "--remat", "auto"], "reference models alone"),
        (["mlp", "--remat", "auto"], "no option 'remat'"),
        (["mlp", "--refine", "2", "--server", "http://localhost:1"], "server compiles nothing"),
    ],
)
def test_what_cannot_be_chosen_is_told(
    steps: str, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, "-t", "v5e:2x2", "-q"]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_one_value_is_fixed_and_several_are_chosen_between() -> None:
    fixed, choices = split_choices(
        {"remat": "save_qkv_proj", "microbatches": "1, 2", "mu_dtype": "auto"}, ["sequence=8,16"]
    )
    assert fixed["remat"] == "names"
    assert fixed["saved"]
    assert choices == {"microbatches": [1, 2], "mu_dtype": "auto", "sequence": [8, 16]}


@pytest.mark.parametrize("text", ["batch", "=1", "batch=", "remat=none"])
def test_a_malformed_vary_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--vary"):
        split_choices({"remat": "auto"}, [text])
