"""Exported code is run, and gives the specs of the plan."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cli import main
from shardwright.errors import InputError
from shardwright.models import build
from shardwright.planner.export import constraints_code, pytree_code, specs_code
from shardwright.planner.export_rules import (
    apply_rules,
    flax_code,
    logical_rules,
    maxtext_yaml,
)

SIZES = {"layers": 2, "d_model": 512, "heads": 8, "d_ff": 2048, "vocab": 4096}
DECODER = {**SIZES, "sequence": 512, "batch": 16, "kv_heads": 8}


@pytest.fixture(scope="module")
def model():
    return build("llama3-8b", **DECODER)


@pytest.fixture(scope="module")
def plan(model):
    return sw.plan(
        model.train_step,
        *model.example_args,
        topology="v5e:2x2",
        donate_argnums=model.donate_argnums,
        mesh={"data": 2, "model": 2},
        time_limit_s=2,
        name="llama3-8b",
    )


def run(code):
    """What a piece of exported Python defines."""
    defined = {}
    exec(compile(code, "exported", "exec"), defined)
    return defined


def flat(specs):
    return jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P))


def test_specs_by_path_are_those_of_the_plan(plan, model):
    defined = run(specs_code(plan.data))
    made = defined["specs_like"](model.example_args, defined["IN_SPECS"])
    assert jax.tree.structure(made, is_leaf=lambda leaf: isinstance(leaf, P)) == jax.tree.structure(
        model.example_args
    )
    assert flat(made) == flat(plan.in_specs)
    assert defined["MESH_AXES"] == plan.mesh_axes


def test_results_that_take_over_nothing_have_their_specs(plan):
    defined = run(specs_code(plan.data))
    loss = [tensor for tensor in plan.data.program.outputs if "loss" in tensor.path]
    assert [tensor.path in defined["OUT_SPECS"] for tensor in loss] == [True]


def test_a_pytree_literal_is_equal_with_its_optax_states(plan):
    made = run(pytree_code(plan.data, plan.in_tree))["IN_SPECS"]
    assert made == plan.in_specs


def test_a_pytree_with_a_class_of_the_users_says_what_works(plan):
    own = jax.tree_util.tree_structure(nn.LogicallyPartitioned(np.zeros(2), names=("a",)))
    with pytest.raises(InputError, match="specs_like"):
        pytree_code(plan.data, own)


def test_constraint_lines_name_lines_of_the_model_and_run(plan):
    code = constraints_code(plan.data)
    places = re.findall(r"^# (.+):(\d+)$", code, re.M)
    assert places
    for file, line in places:
        assert file.endswith(("models/decoder.py", "models/training.py"))
        assert int(line) <= len(Path(file).read_text().splitlines())
    planned = {
        repr(P(*[tuple(d) if len(d) > 1 else d[0] if d else None for d in c.made]))
        for c in plan.data.constraints
    }
    devices = np.array(jax.devices() * 4, dtype=object)[:4].reshape(2, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for line in [line for line in code.splitlines() if line.startswith("x = ")]:
        spec = eval(re.search(r"x, (P\(.*\))\)  #", line)[1], {"P": P})
        NamedSharding(mesh, spec)  # names axes of the mesh, each once
        assert any(text.startswith(repr(spec)[:-1].rstrip(",")) for text in planned)


def test_a_constraint_line_pasted_shards_its_value(plan):
    # As a user pastes it: in a context that has the mesh, on a value of the rank that it names.
    lines = [line for line in constraints_code(plan.data).splitlines() if line.startswith("x = ")]
    code = "def pasted(x):\n    import jax\n    from jax.sharding import PartitionSpec as P\n"
    for line in lines:
        spec = eval(re.search(r"x, (P\(.*\))\)  #", line)[1], {"P": P})
        defined = run(f"{code}    {line}\n    return x\n")
        shape = (4,) * max(2, len(spec))
        with jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        ):
            text = (
                jax.jit(defined["pasted"])
                .trace(jax.ShapeDtypeStruct(shape, jnp.float32))
                .lower(lowering_platforms=("tpu",))
                .as_text()
            )
        for axis in [a for e in spec for a in ((e,) if isinstance(e, str) else e or ())]:
            assert f'"{axis}"' in text.partition("sharding_constraint")[2]


def names_of(plan):
    from shardwright.models.logical_axes import decoder_names

    inputs = plan.data.program.inputs
    return decoder_names([t.path for t in inputs], [len(t.shape) for t in inputs])


def test_rules_apply_as_flax_applies_them(plan):
    names = names_of(plan)
    rules = run(flax_code(plan.data, logical_rules(plan.data, names)))["LOGICAL_AXIS_RULES"]
    found = logical_rules(plan.data, names)
    for logical in set(names.values()):
        by_flax = nn.logical_to_mesh_axes(logical, rules=rules)
        ours = [tuple(axes) for axes in apply_rules(logical, found.rules)]
        theirs = [(e,) if isinstance(e, str) else tuple(e or ()) for e in by_flax]
        assert ours == theirs + [()] * (len(ours) - len(theirs))


def test_rules_and_the_tensors_they_get_wrong_are_all_tensors(plan):
    names = names_of(plan)
    found = logical_rules(plan.data, names)
    wrong = {deviation.path for deviation in found.deviations}
    for tensor in plan.data.program.inputs:
        if tensor.path in names:
            as_planned = apply_rules(names[tensor.path], found.rules) == tensor.spec
            assert as_planned == (tensor.path not in wrong)
    assert found.named == len(names)


def test_rules_are_whole_where_names_allow_it(plan):
    # A name of its own for every dimension of every tensor can say any plan.
    inputs = [t for t in plan.data.program.inputs if t.shape]
    names = {t.path: tuple(f"{i}_{d}" for d in range(len(t.shape))) for i, t in enumerate(inputs)}
    assert logical_rules(plan.data, names).deviations == ()


def test_maxtext_rules_are_the_flax_rules(plan):
    found = logical_rules(plan.data, names_of(plan))
    loaded = yaml.safe_load(maxtext_yaml(plan.data, found))
    assert loaded["mesh_axes"] == ["data", "model"]
    assert [(name, tuple(axes)) for name, axes in loaded["logical_axis_rules"]] == list(found.rules)


def test_every_parameter_of_a_reference_decoder_has_names(plan):
    names = names_of(plan)
    assert [t.path for t in plan.data.program.inputs if t.path not in names] == []


OTHERS = {
    "layers/3/self_attention/query/kernel": (3, ("embed", "q_heads", "kv")),
    "layers/self_attn/o_proj/weight": (3, ("layers", "q_heads", "embed")),
    "blocks/mlp/c_fc/bias": (1, ("mlp",)),
    "transformer/h/0/ln_1/scale": (1, ("norm",)),
    "wte/embedding": (2, ("vocab", "embed")),
}


@pytest.mark.parametrize("path", OTHERS)
def test_parameters_called_as_others_call_them_have_names(path):
    from shardwright.models.logical_axes import decoder_names

    rank, names = OTHERS[path]
    keys = "".join(f"[{k}]" if k.isdigit() else f"['{k}']" for k in path.split("/"))
    assert decoder_names([f"[0]{keys}"], [rank]) == {f"[0]{keys}": names}


def test_tensors_that_rules_leave_out_are_told(plan):
    names = {path: of for path, of in names_of(plan).items() if "embedding" not in path}
    text = maxtext_yaml(plan.data, logical_rules(plan.data, names))
    (told,) = re.findall(r"# (\d+) more are left out, as their dimensions have no logical", text)
    left_out = [t.path for t in plan.data.program.inputs if "embedding" in t.path]
    assert int(told) == len(left_out) > 0
    assert all(f"#   {path}: P(" in text for path in left_out)


def test_names_must_be_one_a_dimension(plan):
    with pytest.raises(InputError, match="1 names for 2 dimensions"):
        logical_rules(plan.data, {"*params*embedding*": ("vocab",)})


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def path(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_the_command_writes_specs(path, plan, tmp_path):
    output = tmp_path / "specs.py"
    assert main(["export", path, "-o", str(output)]) == 0
    assert output.read_text() == specs_code(plan.data)


def test_the_command_finds_the_pytree_of_a_reference_model(path, plan, capsys):
    sizes = [f"--set={key}={value}" for key, value in DECODER.items()]
    assert main(["export", path, "--format", "pytree", *sizes]) == 0
    assert run(capsys.readouterr()[0])["IN_SPECS"] == plan.in_specs


def test_the_command_refuses_another_models_pytree(path, capsys):
    assert main(["export", path, "--format", "pytree", "--target", "mlp"]) == 2
    assert "not the arguments that were planned" in capsys.readouterr()[1]


def test_the_command_takes_names_from_a_file(path, tmp_path, capsys):
    names = tmp_path / "names.toml"
    names.write_text(
        '"*[\'w_up\']" = "None,embed,mlp"\n"*params*embedding*" = ["vocab", "embed"]\n'
    )
    assert main(["export", path, "-f", "flax", "--names", str(names)]) == 0
    rules = run(capsys.readouterr()[0])["LOGICAL_AXIS_RULES"]
    assert {name for name, _ in rules} == {"embed", "mlp", "vocab"}


def test_the_command_needs_names_of_a_foreign_model(tmp_path, capsys):
    made = sw.plan(lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), jnp.float32), topology="v5e:1x1")
    made.save(tmp_path / "plan.json")
    assert main(["export", str(tmp_path / "plan.json"), "-f", "maxtext"]) == 2
    assert "--names" in capsys.readouterr()[1]
