"""Reference decoders as pipelines: the plain decoder's numbers, planned and run over stages."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import InputError
from shardwright.models import build, mixture
from shardwright.models.choices import combinations

SMALL: dict[str, Any] = {
    "layers": 2, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 64, "vocab": 64, "batch": 8,
    "sequence": 16, "compute_dtype": "float32",
}  # fmt: skip


def assert_close(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


def test_a_planned_pipeline_on_eight_devices_gives_the_plain_decoders_step() -> None:
    model = build("llama3-8b", **SMALL, stages=2, microbatches=4, stage_axis="stage")
    plan = sw.plan(
        model.step, *model.example_args, topology="v5e:2x4", mesh={"stage": 2, "data": 4},
        donate_argnums=model.donate_argnums, time_limit_s=5,
    )  # fmt: skip
    permutes = [c for c in plan.estimate.collectives if c.kind == "collective_permute"]
    assert {(c.axes[0], c.count) for c in permutes} == {("stage", 5)}
    plain = build("llama3-8b", **SMALL)
    batch = model.make_batch(0)
    ours = plan.jit(model.step)(model.init(0), batch)
    assert_close(ours, jax.jit(plain.step)(plain.init(0), batch))


def test_the_products_with_weights_are_kept_where_remat_says_dots() -> None:
    def products(remat: str) -> int:
        model = build("llama3-8b", **SMALL, stages=2, microbatches=4, remat=remat)
        jaxpr = jax.make_jaxpr(model.step)(*model.example_args)
        return str(jaxpr).count("dot_general")

    # Seven products with weights a layer: three projections, the output, and three of the block.
    assert products("full") - products("dots") == 7


def test_a_mixture_is_a_pipeline_of_its_blocks() -> None:
    sizes = SMALL | {
        "layers": 4,
        "experts": 4,
        "head_dim": 8,
        "capacity_factor": 4.0,
        "kv_heads": None,
    }
    plain, stages = (
        build("gshard-37b", **sizes, **options)
        for options in ({}, {"stages": 2, "microbatches": 4, "remat": "none"})
    )
    params, batch = plain.init(0)["params"], plain.make_batch(0)
    losses = [
        jax.jit(partial(mixture.loss, model.options))(params, batch) for model in (plain, stages)
    ]
    # Each microbatch balances its experts by itself.
    assert jnp.abs(losses[0] - losses[1]) < 1e-3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stages": 3}, "stages=3 x repeats=1 does not divide the 2 layers"),
        ({"stages": 2, "repeats": 2, "layers": 4}, "microbatches=1 is not a multiple of stages=2"),
        ({"stages": 2, "microbatches": 4, "replicas": 4}, "replicas=4 does not divide batch=8"),
        ({"stages": 2, "scan_layers": False}, "leave scan_layers true"),
    ],
)
def test_stages_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        build("llama3-8b", **(SMALL | options))


def test_stages_are_chosen_with_four_microbatches_each() -> None:
    found = combinations("llama3-8b", {"batch": 24, "layers": 12}, {"stages": "auto"})
    # Of 2, 4, 8 and 16, those that divide the layers; of 16 microbatches, what divides the batch.
    assert list(found.values()) == [
        {"stages": 1},
        {"stages": 2, "microbatches": 8},
        {"stages": 4, "microbatches": 12},
    ]
    given = combinations(
        "llama3-8b", {"batch": 24, "layers": 12}, {"stages": [1, 4], "microbatches": [4, 8]}
    )
    assert [tuple(one.values()) for one in given.values()] == [(1, 4), (1, 8), (4, 4), (4, 8)]
