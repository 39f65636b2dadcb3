"""What the command line reads: meshes, shardings, options, targets and output paths."""

import sys
from pathlib import Path

import pytest

from shardwright.cli_inputs import check_output, load_program, load_target, place_of
from shardwright.cli_specs import (
    parse_mesh,
    parse_pin,
    parse_setting,
    read_spec_file,
)
from shardwright.errors import InputError
from shardwright.planner.spec_patterns import match_specs, parse_spec


def test_mesh_keeps_the_order_of_its_axes():
    assert list(parse_mesh("model=16, data=4").items()) == [("model", 16), ("data", 4)]


@pytest.mark.parametrize(
    "text", ["", "data", "data=", "data=x", "data=2,data=2", "=4", "a b=2", "ä=4"]
)
def test_mesh_that_is_not_axis_sizes_is_refused(text):
    with pytest.raises(InputError, match="--mesh"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", ()),
        ("None", (None,)),
        ("data", ("data",)),
        ("None,model", (None, "model")),
        ("data+model, None", (("data", "model"), None)),
        ("P()", ()),
        ("P(None, 'model')", (None, "model")),
        ("P(('data', 'model'),)", (("data", "model"),)),
        ('PartitionSpec("data")', ("data",)),
    ],
)
def test_spec_in_short_form_and_as_python(text, spec):
    assert parse_spec(text, "here") == spec


@pytest.mark.parametrize("text", ["data;model", "data+", "P(data)", "P(3)", "P(", "P([['a']])"])
def test_spec_that_is_neither_is_refused_with_its_place(text):
    with pytest.raises(InputError, match="--pin w"):
        parse_spec(text, "--pin w")


def test_pin_splits_at_its_last_equals_sign():
    # Keys of a pytree may hold "=" themselves.
    assert parse_pin("[0]['a=b']=data,None") == ("[0]['a=b']", (("data",), ()))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("d_ff=128", 128),
        ("remat=none", "none"),
        ("biases=true", True),
        ("clip_norm=null", None),
        ("learning_rate=1e-3", 1e-3),
        ("name=a=b", "a=b"),
    ],
)
def test_setting_is_json_or_else_text(text, value):
    assert parse_setting(text) == (text.partition("=")[0], value)


def test_pattern_brackets_stand_for_themselves_and_the_first_match_counts():
    paths = ["[0]['params']['w_up']", "[0]['params']['w_down']", "[1]"]
    patterns = {"[0]*['w_up']": ("data",), "[0]*": ("model",)}
    assert match_specs(patterns, paths, "--spec") == [("data",), ("model",), None]


def test_pattern_that_matches_nothing_is_refused_with_paths_like_it():
    with pytest.raises(InputError, match=r"\[0\]\['w_up'\]"):
        match_specs({"[0]['w_upp']": ("data",)}, ["[0]['w_up']", "[1]"], "--spec")


def test_spec_files_in_toml_and_json_say_the_same(tmp_path):
    toml, json_ = tmp_path / "specs.toml", tmp_path / "specs.json"
    toml.write_text(
        """"[0]*['w_up']" = ["None", "data", ["x", "y"]]\n"[1]" = "data,None"\n""", "utf-8"
    )
    json_.write_text(
        """{"[0]*['w_up']": [null, "data", ["x", "y"]], "[1]": "data,None"}""", "utf-8"
    )
    expected = {"[0]*['w_up']": (None, "data", ("x", "y")), "[1]": ("data", None)}
    assert read_spec_file(toml) == expected
    assert read_spec_file(json_) == expected


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 3}', "a ="])
def test_spec_file_of_anything_else_is_refused_with_its_path(tmp_path, text):
    path = tmp_path / "specs.json"
    path.write_text(text, "utf-8")
    with pytest.raises(InputError, match=r"specs\.json"):
        read_spec_file(path)


def test_output_is_refused_where_it_cannot_be_written(tmp_path):
    check_output(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []
    for wrong in (tmp_path, tmp_path / "missing" / "plan.json"):
        with pytest.raises(InputError):
            check_output(wrong)


def test_output_check_leaves_an_existing_plan_as_it_is(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text("before", "utf-8")
    check_output(plan)
    assert plan.read_text("utf-8") == "before"


MODULE = """
module {
  func.func @main(%a: tensor<8x4xf32>) -> tensor<8x4xf32> { return %a : tensor<8x4xf32> }
}
"""


def test_program_is_told_by_its_bytes_whatever_the_file_is_called(tmp_path):
    import jax
    import jax.numpy as jnp
    from jax import export

    def double(x):
        return x * 2

    exported = export.export(jax.jit(double), platforms=["tpu"])(
        jax.ShapeDtypeStruct((8, 4), jnp.float32)
    )
    contents = {
        "text": MODULE.encode(),
        "exported": bytes(exported.serialize()),
        "portable": bytes(exported.mlir_module_serialized),
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.anything"
        path.write_bytes(content)
        (tensor,) = load_program(path).inputs
        assert (tensor.shape, tensor.dtype) == ((8, 4), "f32"), name


def test_function_and_its_arguments_come_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "wave_equation.py").write_text(
        "class Steps:\n    @staticmethod\n    def step(x):\n        return x\nsizes = (1, 2)\n",
        "utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = load_target("wave_equation:Steps.step", "wave_equation:sizes", [1], {})
    assert target.args == (1, 2)
    assert target.donate == (1,)
    assert callable(target.program) and target.program(7) == 7


def test_reference_model_brings_its_arguments_donation_and_flops():
    sizes = {"features": 8, "hidden": 16, "layers": 2, "classes": 4, "batch": 32}
    target = load_target("mlp", None, [], sizes)
    assert target.donate == (0,)
    assert target.tokens_per_step == 32
    # By hand: 6 a weight and example, 4 in the first layer.
    assert target.model_flops == 32 * (4 * 8 * 16 + 6 * 16 * 4)


def test_place_of_an_error_is_the_users_line_not_a_librarys(tmp_path, monkeypatch):
    script = tmp_path / "users.py"
    script.write_text("import json\ndef read():\n    return json.loads('{')\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(script.read_text("utf-8"), str(script), "exec"), names)
    with pytest.raises(ValueError) as raised:
        names["read"]()
    assert place_of(raised.value) == " (users.py:3)"
    with pytest.raises(FileNotFoundError) as raised_here:
        Path("missing").read_text("utf-8")
    assert "pathlib" not in place_of(raised_here.value)
