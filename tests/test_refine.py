"""The best few plans are compiled, and the compiled programs decide; what was compiled is kept."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.planner import compiled_cache, planning, refine
from shardwright.planner.compiled_cache import Compiled, compiled_for_tpu
from shardwright.planner.program import Program
from shardwright.planner.search import Progress

TOPOLOGY = "v5e:2x4"
ARGS = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 4096), (8192, 4096)))


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = jax.value_and_grad(lambda v: jnp.mean((x @ v) ** 2))(w)
    return w - 0.1 * grad, loss


def compiled(cycles: int) -> Compiled:
    """A program of one kernel."""
    kernel = f'negate(%p), backend_config={{"estimated_cycles":"{cycles}"}}'
    text = ["ENTRY %main (p: f32[8]) -> f32[8] {", "  %p = f32[8] parameter(0)"]
    text += [f"  ROOT %n = f32[8] {kernel}", "}"]
    return Compiled("\n".join(text), {"seconds": 1.0, "memory": {"peak": 1e6}})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Compiled]], None]:
    """Puts a function of the mesh's layout in the place of the compiler, which may be absent."""
    monkeypatch.setattr(planning, "check_libtpu", lambda where: None)

    def put(make: Callable[[str], Compiled]) -> None:
        monkeypatch.setattr(
            refine, "compiled_for_tpu", lambda plan, program: make(plan.logical_mesh.describe())
        )

    return put


def planned(**options: object) -> sw.Plan:
    return sw.plan(step, *ARGS, topology=TOPOLOGY, donate_argnums=0, **options)  # type: ignore[arg-type]


def test_the_fastest_compiled_program_is_chosen_and_every_one_is_told(
    compiler: Callable[[Callable[[str], Compiled]], None],
) -> None:
    by_prediction = planned().logical_mesh.describe()
    compiler(lambda layout: compiled(2_000_000 if layout == by_prediction else 1_000_000))
    told: list[Progress] = []
    plan = planned(refine=2, on_progress=told.append)
    first, second = plan.data.refined
    assert first.layout == by_prediction
    assert plan.logical_mesh.describe() == second.layout != by_prediction
    assert first.compiled_step_s == pytest.approx(2 * (second.compiled_step_s or 0))
    assert [one.meshes_tried for one in told if one.stage == "compile"] == [0, 1, 2]
    assert sw.Plan.from_json(plan.to_json()).data.refined == plan.data.refined


def test_a_plan_without_room_by_the_compiler_is_not_chosen(
    compiler: Callable[[Callable[[str], Compiled]], None],
) -> None:
    by_prediction = planned().logical_mesh.describe()
    compiler(
        lambda layout: (
            Compiled("", {}, "Used 20G of 15.75G hbm") if layout == by_prediction else compiled(9)
        )
    )
    plan = planned(refine=2)
    assert plan.logical_mesh.describe() != by_prediction
    assert "20G" in plan.data.refined[0].problem


def test_no_plan_with_room_by_the_compiler_is_an_error_that_says_so(
    compiler: Callable[[Callable[[str], Compiled]], None],
) -> None:
    compiler(lambda layout: Compiled("", {}, "Used 20G of 15.75G hbm"))
    with pytest.raises(sw.DoesNotFitError, match=r"no room for any of the 2.*20G.*memory_fraction"):
        planned(refine=2)


def test_an_interruption_compiles_no_more(
    compiler: Callable[[Callable[[str], Compiled]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refine, "_at_once", lambda count: 1)
    begun: list[str] = []

    def make(layout: str) -> Compiled:
        begun.append(layout)
        time.sleep(0.5)
        return compiled(9)

    def interrupt(progress: Progress) -> None:
        if progress.stage == "compile" and begun:
            raise KeyboardInterrupt

    compiler(make)
    with pytest.raises(KeyboardInterrupt):
        planned(refine=4, on_progress=interrupt)
    assert len(begun) <= 2


def test_a_compiler_that_fails_at_one_plan_leaves_the_others(
    compiler: Callable[[Callable[[str], Compiled]], None],
) -> None:
    by_prediction = planned().logical_mesh.describe()

    def make(layout: str) -> Compiled:
        if layout == by_prediction:
            raise sw.ShardwrightError("the tpu compiler failed")
        return compiled(9)

    compiler(make)
    assert planned(refine=2).data.refined[0].problem == "the tpu compiler failed"


def test_variants_take_part(compiler: Callable[[Callable[[str], Compiled]], None]) -> None:
    def twice(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        again, _ = step(w, x)
        return step(again, x)

    forms = {"once": (step, *ARGS), "twice": (twice, *ARGS)}
    compiler(lambda layout: compiled(9))
    plan = sw.plan(variants=forms, topology=TOPOLOGY, mesh={"a": 8}, donate_argnums=0, refine=8)
    assert plan.data.variant == "once"
    assert {one.variant for one in plan.data.refined} <= set(forms)


def test_missing_compiler_is_told_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(sw.InputError, match=r"refine: libtpu.*pip install 'shardwright\[tpu\]'"):
        sw.plan(lambda: 1 / 0, topology=TOPOLOGY, refine=2)


def test_what_was_compiled_is_found_again_whatever_lines_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def run(folder: Path, *_: object) -> None:
        runs.append(json.loads((folder / "job.json").read_text())["topology"])
        (folder / "compiled.hlo").write_text(compiled(7).hlo)
        (folder / "result.json").write_text(json.dumps(compiled(7).result))

    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled_cache, "run_compiler", run)
    monkeypatch.setattr(compiled_cache, "check_libtpu", lambda where: None)
    monkeypatch.setattr(compiled_cache.metadata, "version", lambda name: "1")

    def elsewhere(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda v: jnp.mean((x @ v) ** 2))(w)
        return w - 0.1 * grad, loss

    elsewhere.__name__ = "step"
    for fn in (step, elsewhere):
        program = Program.trace(fn, *ARGS, donate_argnums=0)
        for topology in (TOPOLOGY, "v5e:2x2"):
            plan = sw.plan(program, topology=topology, time_limit_s=0.1)
            assert compiled_for_tpu(plan, program).hlo == compiled(7).hlo
    assert runs == ["v5e:2x4", "v5e:2x2"]
