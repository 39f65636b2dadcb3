"""Forms of one step are planned together: the best of them on its best mesh is the plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.models.choices import combinations, model_variants
from shardwright.planner.search import Progress
from shardwright.reports.page import plan_page

TOPOLOGY = "v5e:2x2"
MODEL = "llama3-8b"
SMALL: dict[str, Any] = {
    "layers": 4, "d_model": 512, "heads": 8, "kv_heads": 8, "d_ff": 2048, "vocab": 4096,
    "sequence": 1024, "batch": 32,
}  # fmt: skip
CHOICES = {"remat": ["none", "full"], "microbatches": [1, 4]}
MESH = {"data": 2, "model": 2}


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
    return model_variants(MODEL, SMALL, CHOICES)


@pytest.fixture(scope="module")
def singly(forms: dict[str, sw.Variant]) -> dict[str, tuple[float, float]]:
    """Step time and memory of each form planned alone, with all memory to itself."""
    plans = {name: alone(form) for name, form in forms.items()}
    return {
        name: (plan.estimate.step_time_s, plan.estimate.peak_memory_bytes)
        for name, plan in plans.items()
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
        step, _ = singly[told.name]
        if told.step_time_s is not None:
            assert told.step_time_s >= step * 0.998
        if told.bound_s is not None:
            assert told.bound_s <= step * 1.001


def test_where_memory_is_short_the_form_that_fits_is_chosen_and_the_others_say_so(
    forms: dict[str, sw.Variant], best: sw.Plan
) -> None:
    """The limit lies between the memory of the fastest form, alone, and of the leanest."""
    capacity = best.estimate.memory_capacity_bytes
    least = {}
    for name, form in forms.items():
        with pytest.raises(sw.DoesNotFitError) as refused:
            alone(form, memory_fraction=1e-4)
        least[name] = refused.value.least_bytes
    leanest = min(least, key=lambda name: least[name])
    limit = 1.02 * least[leanest]
    wanting = {name for name, nbytes in least.items() if nbytes > limit}
    assert "remat=none, microbatches=1" in wanting
    plan = together(forms, memory_fraction=limit / capacity)
    assert plan.data.variant not in wanting
    assert plan.estimate.peak_memory_bytes <= limit
    told = {one.name: one for one in plan.data.variants}
    for name in wanting:
        assert told[name].status.startswith(("does not fit", "ruled out"))


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
