"""What workers do: look into programs, plan, price; and never run what was uploaded."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.export import _export
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.api.jobs import tasks
from shardwright.errors import DoesNotFitError, InputError
from shardwright.hardware_profiles import load_chip
from shardwright.models import build
from shardwright.planner.plan import Plan
from shardwright.planner.program import Program

MLP = {"features": 64, "hidden": 128, "layers": 2, "classes": 16, "batch": 256}
MODEL = {"model": {"name": "mlp", "options": MLP}, "topology": "v5e:2x4"}


def step(w: Any, x: Any) -> dict[str, Any]:
    return {"loss": jnp.sum(jnp.tanh(x @ w)), "w": w * 2}


ARGS = (jax.ShapeDtypeStruct((16, 32), "bfloat16"), jax.ShapeDtypeStruct((8, 16), "bfloat16"))
EXPECTED_INPUTS = [
    {"path": "[0]", "shape": [16, 32], "dtype": "bf16"},
    {"path": "[1]", "shape": [8, 16], "dtype": "bf16"},
]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """JAX's registry of containers, as it was, for this test alone."""
    own = dict(_export.deserialization_registry)
    monkeypatch.setattr(_export, "deserialization_registry", own)
    return own


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    def run(kind: str, request: dict[str, Any], program: bytes | None = None) -> Any:
        path = None
        if program is not None:
            path = tmp_path / "program"
            path.write_bytes(program)
        return tasks.run(kind, request, path, tmp_path, lambda progress: None)

    return run


def exported(fn: Callable[..., Any], *args: Any) -> bytes:
    return bytes(jax.export.export(jax.jit(fn), platforms=["tpu"])(*args).serialize())


# -- looking into programs -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exported", "bytecode", "text"])
def test_inspection_tells_inputs_outputs_and_operations(run: Callable[..., Any], kind: str) -> None:
    program = Program.trace(step, *ARGS)
    data = exported(step, *ARGS) if kind == "exported" else program.to_stablehlo()
    if kind == "text":
        with program.module() as module:
            data = str(module).encode()
    facts = run("inspect", {"program": "0" * 64}, data)["summary"]
    names = {"text": ["arg0", "arg1"]}.get(kind, ["[0]", "[1]"])
    assert facts["inputs"] == [e | {"path": n} for e, n in zip(EXPECTED_INPUTS, names, strict=True)]
    assert [output["shape"] for output in facts["outputs"]] == [[], [16, 32]]
    assert facts["operations"]["stablehlo.dot_general"] == 1
    assert facts["operations"]["stablehlo.tanh"] == 1
    # Most frequent first.
    counts = list(facts["operations"].values())
    assert counts == sorted(counts, reverse=True)


def test_inspection_tells_what_is_donated_and_looks_into_loops(run: Callable[..., Any]) -> None:
    def looped(w: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w), x)

    args = (jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((8, 16), "float32"))
    program = Program.trace(looped, *args, donate_argnums=(1,))
    facts = run("inspect", {}, program.to_stablehlo())["summary"]
    assert facts["donated"] == ["[1]"]
    assert facts["operations"]["stablehlo.while"] == 1
    assert facts["operations"]["stablehlo.tanh"] == 1
    assert facts["fingerprint"] == program.fingerprint


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"\x89PNG\r\n\x1a\n\0\0", "not a jax.export artifact"),
        (b"ML\xefR garbage", "not a StableHLO module"),
        (b"module {}", "no function called main"),
        (b"\xff\xfe\xfd", "neither MLIR bytecode nor text"),
        (b'{"schema_version": 3}', "this is a plan"),
    ],
)
def test_what_is_no_program_is_refused(run: Callable[..., Any], data: bytes, says: str) -> None:
    with pytest.raises(InputError, match=says):
        run("inspect", {}, data)


@pytest.mark.parametrize("part", [1, 3, 7, 9])
def test_truncated_artifacts_are_refused(run: Callable[..., Any], part: int) -> None:
    for whole in (exported(step, *ARGS), Program.trace(step, *ARGS).to_stablehlo()):
        with pytest.raises(InputError):
            run("inspect", {}, whole[: len(whole) * part // 10])


def test_names_that_are_no_text_are_told_as_damage(run: Callable[..., Any]) -> None:
    whole = Program.trace(step, *ARGS).to_stablehlo()
    assert whole.count(b"main\0") == 1
    with pytest.raises(InputError, match="the program is damaged"):
        run("inspect", {}, whole.replace(b"main\0", b"m\xff\xfen\0"))


# -- nothing uploaded runs -----------------------------------------------------------------------


class Box:
    """A container whose data is read by pickle, as some library may do."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_containers_that_other_code_would_read_are_refused_unread(
    run: Callable[..., Any], registry: dict[str, Any]
) -> None:
    read: list[bytes] = []
    jax.tree_util.register_pytree_node(Box, lambda b: ((b.value,), None), lambda _, c: Box(*c))
    jax.export.register_pytree_node_serialization(
        Box,
        serialized_name="box",
        serialize_auxdata=lambda aux: b"pickled",
        deserialize_auxdata=read.append,
    )
    artifact = exported(lambda box: box.value * 2, Box(ARGS[0]))
    assert "box" in registry
    tasks.read_only_safe_containers()
    with pytest.raises(InputError, match="unregistered type `box`"):
        run("inspect", {}, artifact)
    assert read == []


_watched: list[str] | None = None


def _watch(event: str, args: Any) -> None:
    if _watched is not None and event.startswith(
        ("pickle.", "marshal.", "subprocess.", "os.exec", "os.system", "os.posix_spawn", "os.fork")
    ):
        _watched.append(event)


@pytest.fixture
def events() -> Iterator[list[str]]:
    """What Python tells of unpickling and of starting processes."""
    global _watched  # noqa: PLW0603 - an audit hook cannot be taken back
    if not hasattr(_watch, "added"):
        sys.addaudithook(_watch)
        _watch.added = True  # type: ignore[attr-defined]
    _watched = []
    yield _watched
    _watched = None


def test_reading_a_program_unpickles_and_starts_nothing(
    run: Callable[..., Any], events: list[str]
) -> None:
    import collections
    import pickle

    def ordered(tree: Any) -> Any:
        return tree["a"] @ tree["b"]

    tree = collections.OrderedDict(a=ARGS[1], b=ARGS[0])
    artifact = exported(ordered, tree)
    events.clear()
    facts = run("inspect", {}, artifact)["summary"]
    assert [tensor["path"] for tensor in facts["inputs"]] == ["[0]['a']", "[0]['b']"]
    assert events == []
    pickle.loads(pickle.dumps(Box(1)))
    assert events == ["pickle.find_class"], "the watch sees unpickling"


# -- planning ------------------------------------------------------------------------------------


def test_a_reference_model_is_planned_as_the_planner_alone_plans_it(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    done = run("plan", MODEL | {"mesh": {"data": 4, "model": 2}, "time_limit_s": 1.0})
    assert done["files"] == ["plan.json", "annotated.mlir"]
    made = Plan.load(tmp_path / "plan.json")
    model = build("mlp", **MLP)
    alone = sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", donate_argnums=(0,),
        mesh={"data": 4, "model": 2}, time_limit_s=1.0,
        model_flops=float(model.model_flops_per_step),
    )  # fmt: skip
    assert made.estimate.step_time_s == pytest.approx(alone.estimate.step_time_s, rel=0.02)
    assert made.estimate.mfu == pytest.approx(alone.estimate.mfu, rel=0.02)
    assert made.data.program.fingerprint == alone.data.program.fingerprint
    summary = done["summary"]
    assert summary["mesh_axes"] == {"data": 4, "model": 2}
    assert summary["step_time_s"] == made.estimate.step_time_s
    assert summary["peak_memory_bytes"] == made.estimate.peak_memory_bytes
    assert "sdy.mesh" in (tmp_path / "annotated.mlir").read_text()
    # The plan is of the model's own train step, which it runs.
    made.lower(model.train_step, *model.example_args)


def test_pins_of_a_program_are_kept_however_they_are_written(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    data = Program.trace(step, *ARGS).to_stablehlo()
    for spec in ([[], ["model"]], [None, "model"], "None,model"):
        asked = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}, "pinned": {"[0]": spec}}
        run("plan", asked | {"time_limit_s": 1.0}, data)
        plan = json.loads((tmp_path / "plan.json").read_text())
        assert plan["program"]["inputs"][0]["spec"] == [[], ["model"]]


def test_pins_of_results_and_of_lines_are_kept_and_open_dimensions_completed(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    data = Program.trace(step, *ARGS).to_stablehlo()
    pinned = {"[0]": "?,model", "result['w']": [["data", "?"]]}
    asked = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}, "pinned": pinned}
    run("plan", asked | {"time_limit_s": 1.0}, data)
    program = json.loads((tmp_path / "plan.json").read_text())["program"]
    assert program["inputs"][0]["spec"][1] == ["model"]
    (result,) = [one for one in program["outputs"] if one["path"] == "['w']"]
    assert result["spec"][0][:1] == ["data"]


def test_a_named_layout_of_a_request_tells_its_rules(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    data = Program.trace(step, *ARGS).to_stablehlo()
    asked = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}, "time_limit_s": 1.0}
    run("plan", asked | {"layout": "named", "logical_axes": {"*": ["rows", "columns"]}}, data)
    made = Plan.load(tmp_path / "plan.json")
    assert set(made.layout_rules) == {"rows", "columns"}


def test_progress_tells_stages_meshes_and_the_best_so_far(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    done = tasks.run("plan", MODEL | {"time_limit_s": 5.0}, None, tmp_path, told.append)
    stages = list(dict.fromkeys(progress["stage"] for progress in told))
    assert set(done["stage_seconds"]) == set(stages)
    # Where no machine code of the solver's kernels is on disk, that is told too.
    stages = [stage for stage in stages if stage != "kernels"]
    assert stages == ["read", "trace", "graph", "search", "polish", "plan", "annotate", "write"]
    searching = [progress for progress in told if progress["stage"] == "search"]
    tried = [progress["meshes_tried"] for progress in searching]
    assert tried == sorted(tried)
    assert (tried[0], searching[0]["best_step_s"]) == (0, None)
    assert all(progress["best_step_s"] > 0 for progress in searching[1:])
    assert any(progress["gap"] is not None for progress in searching[1:])
    last = told[-1]
    assert last["meshes"] == searching[0]["meshes"]
    assert last["best_step_s"] is not None


def test_a_model_that_does_not_fit_says_so(run: Callable[..., Any]) -> None:
    options = {"layers": 2, "vocab": 1024, "d_model": 1024, "batch": 65536, "sequence": 2048}
    asked = {"model": {"name": "llama3-8b", "options": options}, "topology": "v5e:1x1"}
    with pytest.raises(DoesNotFitError):
        run("plan", asked | {"time_limit_s": 1.0})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"topology": "v5e:3x5"}, "v5e:3x5"),
        ({"model": {"name": "gpt-9", "options": {}}}, "unknown model"),
        ({"model": {"name": "mlp", "options": {"colour": 3}}}, "colour"),
        ({"mesh": {"data": 3}}, "data"),
        ({"pinned": {"[0]": [["data"]]}}, "pinned"),
        ({"mesh": {"data": 8}, "pinned": {"[0]": 3}}, "not a PartitionSpec"),
        ({"model": None}, "neither a program nor a model"),
    ],
)
def test_wrong_requests_are_refused(
    run: Callable[..., Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        run("plan", MODEL | changes)


# -- pricing -------------------------------------------------------------------------------------


def test_a_hand_made_sharding_costs_what_it_costs_in_python(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    asked = {
        "topology": "v5e:2x4",
        "mesh": {"data": 8},
        "in_specs": {"[1]*": [["data"]]},
    }
    done = run("evaluate", MODEL | asked)
    estimate = json.loads((tmp_path / "estimate.json").read_text())
    model = build("mlp", **MLP)
    state, batch = model.example_args
    alone = sw.evaluate(
        model.train_step, state, batch, topology="v5e:2x4", mesh={"data": 8},
        in_specs=(P(), P("data")), donate_argnums=(0,),
        model_flops=float(model.model_flops_per_step),
    )  # fmt: skip
    assert estimate == alone.model_dump(mode="json")
    assert done["summary"]["step_time_s"] == alone.step_time_s
    # What no pattern matches is told: it is replicated.
    assert "[0]['params']['layers'][0]['w']" in done["summary"]["replicated"]


def test_the_first_pattern_that_matches_counts(run: Callable[..., Any], tmp_path: Path) -> None:
    data = Program.trace(step, *ARGS).to_stablehlo()
    asked = {"topology": "v5e:2x4", "mesh": {"data": 8}}
    seconds = []
    for patterns in ({"[1]": "data", "*": ""}, {"*": "", "[1]": "data"}):
        run("evaluate", asked | {"in_specs": patterns}, data)
        estimate = json.loads((tmp_path / "estimate.json").read_text())
        seconds.append(estimate["collective_time_s"])
    # Sharded batches need their sums added up; replicated ones need nothing.
    assert seconds[0] > 0
    assert seconds[1] == 0


def test_a_chip_of_the_requests_own_is_used(run: Callable[..., Any], tmp_path: Path) -> None:
    data = Program.trace(step, *ARGS).to_stablehlo()
    slow = load_chip("v5e").model_dump(mode="json")
    slow["hbm_bandwidth"]["value"] /= 1000
    asked = {"topology": "v5e:2x4", "mesh": {"data": 8}, "in_specs": {}}
    seconds = []
    for chip in (None, slow):
        run("evaluate", asked | {"chip": chip}, data)
        seconds.append(json.loads((tmp_path / "estimate.json").read_text())["step_time_s"])
    assert seconds[1] > 2 * seconds[0]


def test_a_pattern_that_matches_nothing_is_refused_with_paths_like_it(
    run: Callable[..., Any],
) -> None:
    asked = MODEL | {"mesh": {"data": 8}, "in_specs": {"[0]['parms']*": "data"}}
    with pytest.raises(InputError, match=r"in_specs: no path matches .*Paths look like \[0\]"):
        run("evaluate", asked)


def test_choices_of_a_request_are_searched_and_the_best_is_told(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    run("plan", MODEL | {"choices": {"microbatches": [4, 1]}, "mesh": {"data": 8}})
    made = Plan.load(tmp_path / "plan.json").data
    assert [one.name for one in made.variants] == ["microbatches=4", "microbatches=1"]
    assert made.variant == "microbatches=1"
    assert made.program.origin is not None
    assert made.program.origin.options == MLP | {"microbatches": 1}
