"""What changed between two plans, and why."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cli import main
from shardwright.planner.plan_diff import diff_plans

MESH = {"data": 2, "model": 2}


def step(weight, batch):
    return jax.nn.relu(batch @ weight) @ weight.T


def arguments(rows=4096):
    shapes = ((1024, 4096), (rows, 1024))
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)


def plan(rows=4096, topology="v5e:2x2", fn=step, **options):
    return sw.plan(
        fn, *arguments(rows), topology=topology, mesh=MESH, time_limit_s=1, **options
    ).data


@pytest.fixture(scope="module")
def base():
    return plan(pinned={"[1]": P("data", None), "[0]": P(None, "model")})


@pytest.fixture(scope="module")
def replicated():
    """The same program, its weight pinned whole on every device."""
    return plan(pinned={"[1]": P("data", None), "[0]": P()})


def test_a_plan_does_not_differ_from_itself(base):
    found = diff_plans(base, base)
    assert found.same
    assert found.reasons == []
    assert found.step_time_s.change == 0


def test_the_changed_pin_is_the_reason_and_the_sharding(base, replicated):
    found = diff_plans(base, replicated)
    (reason,) = found.reasons
    assert reason.startswith("the option pinned")
    weights = [change for change in found.tensors if change.path == "[0]"]
    assert [(c.a, c.b) for c in weights] == [([[], ["model=2"]], [[], []])]
    # 1024 * 4096 * 2 bytes, whole instead of in halves.
    assert weights[0].device_bytes.b == 8 * 2**20
    assert weights[0].device_bytes.change == 4 * 2**20


def test_seconds_of_the_changes_add_up_to_the_change_of_all(base, replicated):
    found = diff_plans(base, replicated)
    compute = sum(c.seconds.change for c in found.costs if c.kind == "compute")
    communication = sum(c.seconds.change for c in found.costs if c.kind != "compute")
    assert compute == pytest.approx(found.compute_time_s.change, abs=1e-8)
    assert communication == pytest.approx(found.collective_time_s.change, abs=1e-8)


def test_changes_come_in_order_of_seconds(base):
    found = diff_plans(base, plan(rows=16384))
    seconds = [abs(change.seconds.change) for change in found.costs]
    assert seconds == sorted(seconds, reverse=True)
    assert len(seconds) > 1


def test_a_collective_is_gained_in_one_direction_and_lost_in_the_other(base, replicated):
    there, back = diff_plans(base, replicated), diff_plans(replicated, base)
    opposite = {"gained": "lost", "lost": "gained", "changed": "changed"}
    assert [opposite[c.status] for c in there.costs] == [c.status for c in back.costs]
    assert any(c.status != "changed" for c in there.costs)


def test_program_slice_profile_and_versions_are_told(base):
    other = plan(rows=16384, topology="v6e:2x2")
    other = other.model_copy(
        update={"versions": other.versions.model_copy(update={"jax": "0.9.9"})}
    )
    reasons = diff_plans(base, other).reasons
    assert "the program" in reasons
    assert "the slice: v5e:2x2 -> v6e:2x2" in reasons
    assert any(reason.startswith("the version of jax: ") for reason in reasons)
    chip = base.chip | {"clock_hz": base.chip["clock_hz"] | {"value": 1e9}}
    profile = diff_plans(base, base.model_copy(update={"chip": chip})).reasons
    assert profile == ["the hardware profile: clock_hz"]


def test_the_command_shows_totals_reasons_and_shardings(base, replicated, tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(base.model_dump_json())
    b.write_text(replicated.model_dump_json())
    assert main(["diff", str(a), str(b)]) == 0
    out, _ = capsys.readouterr()
    assert "Why  the option pinned" in out
    assert "P(None, 'model=2')" in out
    assert main(["diff", str(a), str(b), "--json"]) == 0
    data = json.loads(capsys.readouterr()[0])
    assert data["step_time_s"]["a"] == base.estimate.step_time_s


def test_the_command_says_when_nothing_differs(base, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(base.model_dump_json())
    assert main(["diff", str(path), str(path)]) == 0
    assert "shard alike and cost the same" in capsys.readouterr()[0]


def test_what_is_no_plan_is_refused(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text("{}")
    assert main(["diff", str(path), str(path)]) == 2
    assert "not a Shardwright plan" in capsys.readouterr()[1]
