"""BERT from a file: planned, and run on eight devices with the numbers of one."""

from pathlib import Path

import jax
import numpy as np

import shardwright as sw
from shardwright.models import build
from shardwright.models.config import configured, read_config

SMALL_BERT = """
extends = "bert-large"
[model]
layers = 1
d_model = 32
heads = 4
d_ff = 64
vocab = 128
max_positions = 16
[train]
batch = 8
sequence = 16
compute_dtype = "float32"
learning_rate = 0.01
"""


def test_a_planned_step_of_an_encoder_gives_the_numbers_of_one_device(tmp_path: Path) -> None:
    path = tmp_path / "bert.toml"
    path.write_text(SMALL_BERT)
    config = read_config(path)
    model = build(config.base, **configured(config, {}))
    plan = sw.plan(
        model.step, *model.example_args, topology="v5e:2x4", mesh={"data": 4, "model": 2},
        donate_argnums=model.donate_argnums, time_limit_s=3,
    )  # fmt: skip
    batch = model.make_batch(0)
    state, metrics = plan.jit(model.step)(model.init(0), batch)
    alone, expected = jax.jit(model.step)(model.init(0), batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
