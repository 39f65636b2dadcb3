"""Forms of one step are planned together: the best of them on its best mesh is the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.hardware_profiles import meshes_for_shape, parse_slice
from shardwright.models.choices import combinations
from shardwright.planner import variants
from shardwright.planner.search import Considered, Outdone, Progress
from shardwright.reports.page import plan_page

TOPOLOGY = "v5e:2x2"
MODEL = "llama3-8b"
MESH = {"data": 2, "model": 2}
SHAPES = ((8, 1024, 1024), (1 << 16, 1024))


def step_of(remat: bool, microbatches: int) -> Callable[..., jax.Array]:
    """A step of eight layers, its activations kept or recomputed, its gradients added up."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        parts = jnp.swapaxes(x.reshape(-1, microbatches, x.shape[-1]), 0, 1)
        if microbatches == 1:
            return w - 0.1 * jax.grad(loss)(w, x)
        add = lambda total, part: (total + jax.grad(loss)(w, part), None)  # noqa: E731
        total, _ = jax.lax.scan(add, jnp.zeros_like(w), parts)
        return w - 0.1 * total / microbatches

    return step


def alone(form: sw.Variant, **options: Any) -> sw.Plan:
    return sw.plan(
        form.fn,
        *form.args,
        donate_argnums=form.donate_argnums,
        topology=TOPOLOGY,
        mesh=MESH,
        **options,
    )


@pytest.fixture(scope="module")
def forms() -> dict[str, sw.Variant]:
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]
    return {
        f"remat={remat}, microbatches={count}": sw.Variant(step_of(remat == "full", count), args, 0)
        for remat in ("none", "full")
        for count in (1, 4)
    }


@pytest.fixture(scope="module")
def singly(forms: dict[str, sw.Variant]) -> dict[str, tuple[float, float]]:
    """Step time of each form planned alone, exactly and by the integer program."""
    plans = {name: alone(form) for name, form in forms.items()}
    return {
        name: (plan.estimate.step_time_s, plan.solver.objective) for name, plan in plans.items()
    }


def together(forms: dict[str, sw.Variant], **options: Any) -> sw.Plan:
    return sw.plan(variants=forms, topology=TOPOLOGY, mesh=MESH, **options)


@pytest.fixture(scope="module")
def best(forms: dict[str, sw.Variant]) -> sw.Plan:
    return together(forms)


def test_the_best_form_is_the_best_of_all_forms_planned_singly(
    best: sw.Plan, singly: dict[str, tuple[float, float]]
) -> None:
    plan = best
    fastest = min(step for step, _ in singly.values())
    assert plan.estimate.step_time_s == pytest.approx(fastest, rel=0.002)
    assert singly[plan.data.variant][0] == pytest.approx(fastest, rel=0.002)


def test_bounds_and_steps_told_of_other_forms_hold_for_them_planned_singly(
    best: sw.Plan, singly: dict[str, tuple[float, float]]
) -> None:
    for told in best.data.variants:
        step, by_program = singly[told.name]
        if told.step_time_s is not None:
            assert told.step_time_s >= step * 0.998
        if told.bound_s is not None:
            assert told.bound_s <= by_program * 1.001


def test_where_memory_is_short_the_form_that_fits_is_chosen_and_the_others_say_so(
    forms: dict[str, sw.Variant], best: sw.Plan
) -> None:
    """The limit lies between the memory of the fastest form, alone, and of the leanest."""
    fast, lean = "remat=none, microbatches=1", "remat=full, microbatches=4"
    least = {}
    for name in (fast, lean):
        with pytest.raises(sw.DoesNotFitError) as refused:
            alone(forms[name], memory_fraction=1e-4)
        least[name] = refused.value.least_bytes or 0.0
    limit = 1.02 * least[lean]
    assert limit < least[fast]
    plan = together(forms, memory_fraction=limit / best.estimate.memory_capacity_bytes)
    assert plan.data.variant != fast
    assert plan.estimate.peak_memory_bytes <= limit
    told = {one.name: one for one in plan.data.variants}
    assert told[fast].status.startswith("does not fit")
    assert told[fast].peak_memory_bytes == pytest.approx(least[fast], rel=0.05)


def test_of_a_mesh_that_is_planned_twice_the_better_plan_is_told() -> None:
    mesh = meshes_for_shape(parse_slice(TOPOLOGY), {"x": parse_slice(TOPOLOGY).devices})[0]
    run = variants._Run(form=None)  # type: ignore[arg-type]
    for seconds in (1.0, 2.0, None):
        run.note(Outdone((Considered(mesh, "planned", seconds),), bound_s=1.0))
    assert run.considered[mesh].step_s == 1.0


def test_no_form_that_fits_is_an_error_that_names_the_leanest() -> None:
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    forms = {f"{n} rows": (double, jax.ShapeDtypeStruct((n, 1 << 20), "float32")) for n in (16, 8)}
    with pytest.raises(sw.DoesNotFitError, match=r"none of 2 variants fits.*by 8 rows"):
        together(forms, memory_fraction=1e-5)


def test_forms_of_different_work_are_compared_by_the_token() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    def form(rows: int, tokens: float | None) -> sw.Variant:
        args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 4096), (rows, 4096))]
        return sw.Variant(step, args, tokens_per_step=tokens)

    both = {"little": form(1024, 1024), "much": form(65536, 65536)}
    assert sw.plan(variants=both, topology=TOPOLOGY).data.variant == "much"
    untold = {"little": form(1024, None), "much": form(65536, None)}
    assert sw.plan(variants=untold, topology=TOPOLOGY).data.variant == "little"


def test_the_plan_of_a_form_runs_its_function_and_tells_it_everywhere() -> None:
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    def add(x: jax.Array) -> jax.Array:
        return x + x

    x = jnp.arange(64.0)
    told: list[Progress] = []
    forms = {"double": (double, x), "add": (add, x)}
    plan = sw.plan(variants=forms, topology="v5e:1x1", on_progress=told.append)
    assert {one.message.partition(":")[0] for one in told if one.stage == "trace"} == set(forms)
    fn = forms[plan.data.variant][0]
    assert (plan.jit(fn, devices=jax.devices()[:1])(x) == 2 * x).all()
    again = sw.Plan.from_json(plan.to_json())
    assert [one.name for one in again.data.variants] == list(forms)
    page = plan_page(plan.data)
    assert all(f'<th scope="row">{name}</th>' in page for name in forms)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"variants": {}}, "mapping of names, or it is empty"),
        ({"variants": {"a": 3}}, "'a'"),
        ({"variants": {"": (jnp.tanh, jnp.ones(4))}}, "no name"),
        ({}, "nothing to plan"),
    ],
)
def test_what_is_no_variant_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(sw.InputError, match=told):
        sw.plan(topology=TOPOLOGY, **given)


def test_auto_takes_every_policy_and_the_microbatches_that_divide_the_batch() -> None:
    found = combinations(MODEL, {"batch": 12}, {"remat": "auto", "microbatches": "auto"})
    assert {one["microbatches"] for one in found.values()} == {1, 2, 4}
    assert {one["remat"] for one in found.values()} >= {"none", "dots", "full"}
    assert len(found) == 3 * len({name.split(",")[0] for name in found})


def test_choices_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(sw.InputError, match="no option 'remat'"):
        combinations("mlp", {}, {"remat": "auto"})
    with pytest.raises(sw.InputError, match="worth trying"):
        combinations(MODEL, {}, {"sequence": "auto"})
    with pytest.raises(sw.InputError, match="microbatches=5 does not divide"):
        combinations(MODEL, {"batch": 8}, {"microbatches": [1, 5]})
