"""What jobs can say: pins, files, state by pattern, options of models, prices."""

import json
import textwrap

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.batch.ci_config import load_config
from shardwright.batch.ci_run import run_jobs, updated_lock
from shardwright.errors import InputError

MODULE = """
import jax, jax.numpy as jnp

def step(weight, batch):
    return jax.nn.relu(batch @ weight) @ weight.T

def arguments():
    shapes = ((1024, 4096), (4096, 1024))
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
"""
DEFAULTS = """
[defaults]
target = "ci_toy:step"
args = "ci_toy:arguments"
topologies = ["v5e:2x2"]
time_limit_s = 1
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the jobs of a configuration in a directory of their own."""
    (tmp_path / "ci_toy.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run_text(text, lock=None, **options):
        path = tmp_path / "shardwright.toml"
        path.write_text(DEFAULTS + textwrap.dedent(text))
        config = load_config(path)
        results = run_jobs(config, lock, **options)
        return results, updated_lock(results, lock, config, whole=True)

    return run_text


def test_pins_and_mesh_are_kept_and_their_change_is_planned_anew(run):
    pinned = """
    [jobs.a]
    mesh = { data = 2, model = 2 }
    pinned = { "[0]" = ["None", "model"] }
    state = ["[0]"]
    """
    (first,), lock = run(pinned)
    assert first.entry.mesh == {"data": 2, "model": 2}
    assert first.entry.state["[0]"].sharding == [[], ["model=2"]]
    (again,), _ = run(pinned, lock)
    assert again.source == "lock"
    assert again.passed
    (moved,), _ = run(pinned.replace('["None", "model"]', '["model", "data"]'), lock)
    assert moved.source == "solved"
    assert [fault.kind for fault in moved.faults if fault.kind != "slower"] == ["state-resharded"]
    assert "options changed" in " ".join(moved.notes)


def test_state_is_what_is_donated_where_it_is_not_told(run):
    (result,), _ = run("[jobs.a]")
    assert result.entry.state == {}
    (result,), _ = run('[jobs.a]\nstate = ["*"]')
    assert set(result.entry.state) == {"[0]", "[1]"}


def test_a_pattern_of_state_that_matches_nothing_is_a_fault(run):
    (result,), _ = run('[jobs.a]\nstate = ["*nothing*"]')
    assert [fault.kind for fault in result.faults] == ["not-planned"]
    assert "no path matches *nothing*" in result.faults[0].message


def test_a_program_may_be_a_file(run, tmp_path):
    shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    program = sw.Program.trace(lambda x: x @ x, shape)
    (tmp_path / "step.mlirbc").write_bytes(program.to_stablehlo())
    (result,), _ = run('[jobs.a]\ntarget = "./step.mlirbc"\nargs = ""')
    assert result.entry is not None
    assert result.entry.inputs.program == program.fingerprint


def test_a_program_may_be_a_reference_model_with_options(run):
    job = """
    [jobs.a]
    target = "mlp"
    args = ""
    options = { features = 256, hidden = 512, layers = 2, classes = 64, batch = 1024 }
    """
    (first,), lock = run(job)
    assert len(first.entry.state) > 4
    (other,), _ = run(job.replace("hidden = 512", "hidden = 1024"), lock)
    assert "the program changed" in " ".join(other.notes)


def test_every_slice_of_a_job_is_planned_and_told(run):
    seen = []
    results, lock = run(
        '[jobs.a]\ntopologies = ["v5e:2x2", "v6e:2x2", "v5e:9x9"]',
        on_result=lambda result, count: seen.append((result.topology, count)),
    )
    assert sorted(seen) == [("v5e:2x2", 3), ("v5e:9x9", 3), ("v6e:2x2", 3)]
    assert [result.topology for result in results] == ["v5e:2x2", "v6e:2x2", "v5e:9x9"]
    assert set(lock.entries) == {"a@v5e:2x2", "a@v6e:2x2"}
    assert results[2].faults[0].kind == "not-planned"
    assert "nearest first" in results[2].faults[0].message


def test_versions_and_profiles_are_part_of_what_a_plan_follows_from(run):
    (first,), lock = run("[jobs.a]")
    data = json.loads(lock.model_dump_json())
    for key, words in (("versions", "versions changed"), ("chip", "hardware profile changed")):
        inputs = dict(first.entry.inputs.model_dump())
        inputs[key] = {**inputs[key], "jax": "0.0"} if key == "versions" else "other"
        data["entries"]["a@v5e:2x2"]["inputs"] = inputs
        (result,), _ = run("[jobs.a]", type(lock).model_validate(data))
        assert result.source == "solved"
        assert result.passed
        assert words in " ".join(result.notes)


def test_a_job_that_does_not_exist_is_refused(run):
    with pytest.raises(InputError, match="no job b"):
        run("[jobs.a]", names=["b"])
