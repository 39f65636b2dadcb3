"""Models described in files: what is read, what is refused, and presets written as files."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.cli import main
from shardwright.cli_inputs import load_target, where_to_plan
from shardwright.models import build, model_names
from shardwright.models.config import config_text, configured, read_config
from shardwright.models.families import KINDS
from shardwright.models.registry import checked_options

DOCS = Path(__file__).parent.parent / "docs" / "models.md"
EXAMPLES = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.S)

SMALL = """
    kind = "decoder"
    name = "small"
    [model]
    layers = 2
    d_model = 64
    heads = 4
    d_ff = 128
    vocab = 256
    [train]
    batch = 8
    sequence = 16
    [plan]
    topology = "v5e:2x4"
    mesh = { data = 2, model = 4 }
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_text(text: str, name: str = "model.toml") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write_text


def test_a_file_is_the_model_of_its_options(write: Any) -> None:
    loaded = load_target(write(SMALL), None, (), {"batch": 16})
    expected = build(
        "decoder", layers=2, d_model=64, heads=4, d_ff=128, vocab=256, batch=16, sequence=16
    )
    assert (loaded.name, loaded.model) == ("small", "decoder")
    assert loaded.tokens_per_step == 16 * 16
    assert loaded.model_flops == expected.model_flops_per_step
    assert loaded.args == expected.example_args


def test_the_file_says_where_to_plan_and_the_command_line_counts_first(write: Any) -> None:
    path = write(SMALL)
    assert where_to_plan(path, None, None) == ("v5e:2x4", {"data": 2, "model": 4})
    assert where_to_plan(path, "v4:2x2x1", {"a": 4}) == ("v4:2x2x1", {"a": 4})
    with pytest.raises(sw.InputError, match=r"no slice is given.*\[plan\]"):
        where_to_plan("llama3-8b", None, None)


def test_a_file_that_extends_a_preset_changes_what_it_says(write: Any) -> None:
    path = write('extends = "llama3-8b"\n[model]\nlayers = 4\n[train]\noptimizer = "lamb"\n')
    changed = checked_options("llama3-8b", configured(read_config(path), {}))
    assert changed == checked_options("llama3-8b", {"layers": 4, "optimizer": "lamb"})


def test_a_file_with_a_serving_section_is_that_step_unless_told_otherwise(write: Any) -> None:
    path = write('extends = "llama3-8b"\n[model]\nlayers = 4\n[serve]\nbatch = 2\ncontext = 64\n')
    assert configured(read_config(path), {}) == {
        "step": "decode", "layers": 4, "batch": 2, "context": 64,
    }  # fmt: skip
    assert configured(read_config(path), {"step": "train"}) == {"step": "train", "layers": 4}


@pytest.mark.parametrize("name", model_names())
def test_every_preset_written_as_a_file_is_itself(name: str, write: Any) -> None:
    options = checked_options(name, {})
    kind = next(kind for kind, family in KINDS.items() if name in family.presets)
    path = write(config_text(kind, name, options.model_dump(mode="json"), {"batch": "a " * 90}))
    config = read_config(path)
    assert config.name == name
    assert checked_options(config.base, configured(config, {})) == options


def test_the_documentation_has_an_example_of_every_kind_and_all_are_models(write: Any) -> None:
    bases = set()
    for example in EXAMPLES:
        config = read_config(write(example))
        bases.add(config.base)
        assert build(config.base, **configured(config, {})).parameter_count > 0
    assert bases >= KINDS.keys()


def test_yaml_is_read_as_toml_is(write: Any) -> None:
    text = "extends: llama3-8b\nmodel: {layers: 4}\ntrain: {batch: 8}\n"
    config = read_config(write(text, "model.yaml"))
    assert configured(config, {}) == {"layers": 4, "batch": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = ", r"model.toml: this is not TOML"),
        ("[model]\nlayers = 2\n", "neither kind nor extends is given"),
        ('kind = "decoder"\nextends = "llama3-8b"\n', "both kind and extends are given"),
        ('kind = "decodr"\n', "unknown model 'decodr'. Did you mean 'decoder'"),
        ('extends = "llama3-8B"\n', "Did you mean 'llama3-8b'"),
        (
            'extends = "a.toml"\n',
            "model.toml, extends: unknown model 'a.toml'. It cannot be a",
        ),
        ('extends = "llama3-8b"\n[modle]\n', r"unknown field 'modle' \(did you mean model\?\)"),
        (
            'extends = "llama3-8b"\n[model]\nn_heads = 2\n',
            r"model.toml, \[model\]: unknown field 'n_heads' \(did you mean heads\?\)",
        ),
        (
            'extends = "llama3-8b"\n[train]\nlayers = 2\n',
            r"\[train\]: 'layers' belongs to \[model\]",
        ),
        (
            'extends = "llama3-8b"\n[train]\nremat = "some"\n',
            r"model.toml: option 'remat': Input should be 'none', 'full'",
        ),
        ('extends = "llama3-8b"\n[model]\nheads = 30\n', "kv_heads=8 does not divide heads=30"),
        ('extends = "llama3-8b"\n[train]\n[serve]\n', r"both \[train\] and \[serve\]"),
        ('extends = "gnmt"\n[serve]\n', "no step 'decode' of this kind"),
        (
            'extends = "llama3-8b"\n[plan]\ntopolgy = "v5e:2x2"\n',
            r"'plan.topolgy' \(did you mean topology\?\)",
        ),
    ],
)
def test_a_wrong_file_is_told_with_what_is_allowed(write: Any, text: str, message: str) -> None:
    with pytest.raises(sw.InputError, match=message):
        load_target(write(text), None, (), {})


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_every_kind_is_told_misspelt_misplaced_or_of_a_wrong_type(
    kind: str, write: Any
) -> None:
    family = KINDS[kind]
    fields, of_step = family.options.model_fields, family.step_fields("train")
    for name in fields:
        own, other = ("train", "model") if name in of_step else ("model", "train")

        def told(section: str, field: str, kind: str = kind) -> str:
            path = write(f'kind = "{kind}"\n[{section}]\n{field} = {{}}\n')
            with pytest.raises(sw.InputError) as error:
                configured(read_config(path), {})
            return str(error.value)

        assert f"'{name}s' (did you mean {name}?)" in told(own, f"{name}s")
        assert f"'{name}' belongs to [{own}]" in told(other, name)
        assert f"option '{name}': Input should be" in told(own, name)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(sw.InputError, match="cannot be read"):
        load_target("nowhere/model.toml", None, (), {})


def test_the_command_line_plans_a_file_and_remembers_the_model(
    write: Any, tmp_path: Path, capsys: Any
) -> None:
    plan = tmp_path / "plan.json"
    command = ["plan", write(SMALL), "--time-limit", "2", "-o", str(plan), "--quiet"]
    assert main(command) == 0
    assert "small on v5e:2x4" in capsys.readouterr().out
    origin = json.loads(plan.read_text())["program"]["origin"]
    assert origin["target"] == "decoder"
    assert origin["options"]["d_model"] == 64


def test_the_command_line_writes_a_preset_as_a_file(write: Any, capsys: Any) -> None:
    assert main(["models", "t5-base", "--toml"]) == 0
    config = read_config(write(capsys.readouterr().out))
    assert checked_options(config.base, configured(config, {})) == checked_options("t5-base", {})


def test_the_service_takes_a_kind_with_all_its_options() -> None:
    from shardwright.api.catalog import checked_options as checked_by_service

    sizes = {"layers": 2, "d_model": 64, "heads": 4, "d_ff": 128, "vocab": 256}
    given = sizes | {"batch": 8, "sequence": 16}
    assert checked_by_service("decoder", given) == given
    with pytest.raises(sw.InputError, match="option 'd_model': Field required"):
        checked_by_service("decoder", {"layers": 2})
    with pytest.raises(sw.InputError, match=r"unknown model 'model\.toml'"):
        checked_by_service("model.toml", {})


def test_the_docs_name_the_fields_that_each_kind_needs() -> None:
    table = DOCS.read_text().split("### Fields that a kind needs")[1].split("\n\n")[1]
    told = {}
    for kinds, *fields in (line.strip("|").split("|") for line in table.splitlines()[2:]):
        for kind in re.findall(r"`(\w+)`", kinds):
            told[kind] = set(re.findall(r"`(\w+)`", "".join(fields)))
    needed = {
        kind: {name for name, field in family.options.model_fields.items() if field.is_required()}
        for kind, family in KINDS.items()
        if kind not in model_names()  # which has the sizes of the preset of its name
    }
    assert told == needed
