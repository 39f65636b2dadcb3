"""Images are cut in space where a batch is smaller than the devices, with the numbers of one."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.models import build

MESH = {"data": 2, "space": 4}
LARGE: dict[str, dict[str, Any]] = {
    "unet-2d": {"image": 512, "batch": 2, "filters": ((64, 64), (128, 128))},
    "unet-3d": {"image": 64, "batch": 2, "filters": ((32, 64), (64, 128))},
}
SMALL: dict[str, dict[str, Any]] = {
    "ssd-300": {
        "image": 32, "batch": 4, "width": 4, "classes": 5, "depths": (1, 1, 1), "norm_groups": 2,
        "layers": ((4, 8, 2),), "anchors": (2, 3),
    },
    "unet-2d": {"image": 16, "batch": 4, "filters": ((4, 4), (8, 8)), "norm_groups": 2},
    "unet-3d": {"image": 8, "batch": 2, "filters": ((4, 4), (4, 4))},
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_space_is_cut_where_the_batch_is_smaller_than_the_devices(name: str) -> None:
    model = build(name, **LARGE[name])
    plan = sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", mesh=MESH,
        donate_argnums=(0,), time_limit_s=5,
    )  # fmt: skip
    images = next(t for t in plan.data.program.inputs if t.path == "[1]['images']")
    assert any(images.spec[1:-1])
    # All devices share the work.
    assert sum(map(len, images.spec)) == len(MESH)


@pytest.mark.parametrize("name", SMALL)
def test_a_step_cut_over_batch_and_space_computes_the_numbers_of_one_device(name: str) -> None:
    """Batch norm over groups of the batch, each on devices of its own; float32 throughout."""
    model = build(name, **SMALL[name], compute_dtype="float32", learning_rate=0.01)
    plan = sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", mesh=MESH,
        donate_argnums=(0,), pinned={"[1]['images']": P("data", "space")}, time_limit_s=3,
    )  # fmt: skip
    made = [c.made for c in plan.data.constraints]
    assert any(spec[:2] == [["data"], ["space"]] for spec in made if len(spec) >= 4)
    step, state, alone = plan.jit(model.train_step), model.init(0), model.init(0)
    batch = model.make_batch(0)
    state, metrics = step(state, batch)
    alone, expected = jax.jit(model.train_step)(alone, batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3)
