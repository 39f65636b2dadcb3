"""Flash attention: plain attention's numbers, planned as two kernels, without the scores."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import InputError
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.models import build
from shardwright.models.decoder import dot_attention
from shardwright.models.flash_attention import _kernels
from shardwright.planner.graph_reader import build_graph
from shardwright.planner.kernel_costs import evaluate_cost
from shardwright.planner.mesh_solution import evaluate_choices
from shardwright.planner.plan_making import make_plan
from shardwright.planner.plan_schema import OptionsModel
from shardwright.planner.prepared import prepare
from shardwright.planner.pricing import build_problem
from shardwright.planner.search import SearchResult
from shardwright.planner.solver import Solution, evaluate

MESH = {"data": 2, "model": 4}
OPTIONS = OptionsModel(
    topology="v5e:2x4", mesh=MESH, pinned={}, memory_fraction=0.9, time_limit_s=1.0, seed=0
)
DECODER: dict[str, Any] = {
    "layers": 2, "d_model": 32, "heads": 8, "kv_heads": 4, "d_ff": 64, "vocab": 64, "batch": 4,
    "sequence": 128, "compute_dtype": "float32", "learning_rate": 1e-2, "remat": "full",
}  # fmt: skip
LLAMA: dict[str, Any] = {"layers": 2, "batch": 16, "sequence": 4096, "vocab": 1024}


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Without a mask, heads repeated: written apart from the code that is tested."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients_equal_plain_attention(heads: tuple[int, int], causal: bool) -> None:
    q, k, v = (random(2, 128, h, 16, seed=i) for i, h in enumerate([*heads, heads[1]]))
    flash = functools.partial(sw.flash_attention, causal=causal)
    plain = dot_attention if causal else plain_attention

    def loss(attend: Any, *arrays: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attend(*arrays)))

    ours, theirs = (
        jax.value_and_grad(functools.partial(loss, attend), argnums=(0, 1, 2))(q, k, v)
        for attend in (flash, plain)
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_shards_compute_what_the_rules_say(causal: bool) -> None:
    q, k, gradient = random(2, 4, 128, 16), random(2, 2, 128, 16, seed=1), random(2, 4, 128, 16)
    forward, backward = _kernels(causal, 4)
    forward.check(q, k, k)
    backward.check(q, k, k, *forward(q, k, k), gradient)


def test_flops_are_those_of_the_blocks_that_run() -> None:
    """Forward two products, backward seven, each 2 x 128^2 x 16 FLOPs a head, of one block."""
    q, k = random(2, 128, 4, 16), random(2, 128, 2, 16)
    loss = lambda q: jnp.sum(sw.flash_attention(q, k, k) ** 2)  # noqa: E731
    graph = build_graph(sw.Program.trace(jax.grad(loss), q))
    kernels = [op.detail["kernel"] for op in graph.ops if "kernel" in op.detail]
    one = 2.0 * 128 * 128 * 16 * 2 * 4
    assert [k.needed_flops() for k in kernels] == [2 * one, 7 * one]
    # A matrix unit of 128 does no less for 16 columns than for 128.
    assert evaluate_cost(kernels[0].flops, kernels[0].sizes | {"mxu": 128}) == 2 * one * 8
    # 4096 positions in blocks of 512: 36 of 64 blocks are on or below the diagonal.
    long = kernels[0].sizes | {"t": 4096, "s": 4096, "mxu": 1}
    assert evaluate_cost(kernels[0].flops, long) == 2 * one * 32 * 32 * 36 / 64


@pytest.mark.parametrize("scanned", [True, False])
def test_planned_flash_decoder_trains_as_on_one_device(scanned: bool) -> None:
    """Float32 throughout, rematerialised; against plain attention on one device.

    The kernels' batch and key heads are sharded, nothing else is.
    """
    model = build("llama3-8b", **DECODER, scan_layers=scanned, attention="flash")
    donated = model.donate_argnums
    program = sw.Program.trace(model.train_step, *model.example_args, donate_argnums=donated)
    prepared = prepare(program)
    (mesh, *_) = meshes_for_shape(parse_slice("v5e:2x4"), MESH)
    problem = build_problem(prepared.nodes, prepared.fusions, prepared.buffers, mesh)
    choices = [0] * len(problem.strategies)
    kernels = [op for op in prepared.graph.ops if "kernel" in op.detail]
    for op in kernels:
        node = prepared.nodes.node_of_op[op.id]
        factors = prepared.nodes.nodes[node].ops[op.id]
        choices[node] = problem.strategies[node].tolist().index([factors[0], factors[1]])
    told = evaluate(problem.weighed(0.5, 1e15), choices)
    solution = Solution(
        tuple(choices), told.cost, told.cost, 0.0, "feasible", 0.0, told.peak, None
    )  # fmt: skip
    found = SearchResult(evaluate_choices(prepared, problem, solution), ())
    plan = make_plan(prepared, found, OPTIONS, None, 0.0)
    calls = 1 if scanned else DECODER["layers"]
    names = [k.name for k in plan.data.kernels]
    # Forward, forward again for the backward pass, backward.
    assert names.count("flash_attention") == 2 * calls
    assert names.count("flash_attention_gradient") == calls
    assert {str(k.in_specs[:2]) for k in plan.data.kernels} == {
        str([[["data"], ["model"], [], []]] * 2)
    }
    dot = build("llama3-8b", **DECODER, scan_layers=scanned)
    step, one_device = plan.jit(model.train_step), jax.jit(dot.train_step)
    state, alone = model.init(0), dot.init(0)
    for number in range(2):
        batch = model.make_batch(number)
        state, metrics = step(state, batch)
        alone, expected = one_device(alone, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-3)


def test_flash_takes_less_memory_and_time_than_dot() -> None:
    """The scores of a layer alone, 2 sequences of 4096 in float32 for 32 heads, are 4.3 GB."""
    plans = {}
    for attention in ("dot", "flash"):
        model = build("llama3-8b", **LLAMA, attention=attention)
        plans[attention] = sw.plan(
            model.train_step, *model.example_args, topology="v5e:2x4", mesh={"data": 8},
            donate_argnums=model.donate_argnums, memory_fraction=1.0, time_limit_s=5,
        )  # fmt: skip
    dot, flash = plans["dot"].estimate, plans["flash"].estimate
    assert dot.peak_memory_bytes - flash.peak_memory_bytes > 4.2e9
    assert flash.step_time_s < 0.8 * dot.step_time_s
    for buffer in flash.peak_buffers:
        assert "8, 4, 4096, 4096]" not in buffer.name


WRONG = {
    "rank": ((2, 128, 16), (2, 128, 2, 16), "four dimensions"),
    "groups": ((2, 128, 3, 16), (2, 128, 2, 16), "kv_heads divide heads"),
    "keys": ((2, 128, 4, 16), (2, 256, 4, 16), "as many keys as queries"),
    "length": ((2, 100, 4, 16), (2, 100, 4, 16), "multiples of 128"),
}


@pytest.mark.parametrize("case", WRONG)
def test_shapes_that_do_not_go_together_are_refused(case: str) -> None:
    queries, keys, told = WRONG[case]
    with pytest.raises(InputError, match=told):
        sw.flash_attention(random(*queries), random(*keys), random(*keys))


def test_a_model_of_another_length_is_refused_before_it_is_traced() -> None:
    with pytest.raises(InputError, match="sequence=100 is not a multiple of 128"):
        build("llama3-8b", sequence=100, attention="flash")


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernels_lower_for_tpu(causal: bool) -> None:
    """Forward one Mosaic kernel; backward one for queries, one for keys and values."""
    q, k = (jax.ShapeDtypeStruct((1, h, 1024, 128), jnp.bfloat16) for h in (8, 2))
    sums = jax.ShapeDtypeStruct((1, 8, 1024), jnp.float32)
    forward, backward = _kernels(causal, 2)
    for kernel, args, calls in ((forward, (q, k, k), 1), (backward, (q, k, k, q, sums, q), 2)):
        lowered = jax.jit(kernel).trace(*args).lower(lowering_platforms=("tpu",))
        assert lowered.as_text().count("@tpu_custom_call") == calls
