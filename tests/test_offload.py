"""Activations in the memory of the host: found in the program, priced over PCIe, not in HBM."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cost_models.schedule import Loop, Transfer
from shardwright.errors import InputError
from shardwright.models import build
from shardwright.planner.offload import host_values, transfers
from shardwright.planner.prepared import prepare
from shardwright.planner.program import Program
from shardwright.planner.schedule import schedule_of_models

LAYERS, TOKENS, WIDTH = 4, 2048, 1024


def train(policy):
    """The gradient of a scanned stack of layers that name their input and what follows."""

    def layer(x, w):
        x = checkpoint_name(x, "input")
        return jnp.tanh(jnp.sin(x) @ w), None

    def loss(ws, x):
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jnp.sum(jax.lax.scan(body, x, ws)[0].astype(jnp.float32))

    ws = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
    return jax.grad(loss), (ws, jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16))


OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["input"],
    offload_src="device",
    offload_dst="pinned_host",
)
SAVE = jax.checkpoint_policies.save_only_these_names("input")


@pytest.fixture(scope="module")
def graph():
    fn, args = train(OFFLOAD)
    return prepare(Program.trace(fn, *args)).graph


def evaluated(policy, devices=4):
    fn, args = train(policy)
    specs = (P(), P("data"))
    shape = {1: "1x1", 4: "2x2"}[devices]
    return sw.evaluate(fn, *args, topology=f"v6e:{shape}", mesh={"data": devices}, in_specs=specs)


def transfers_of(entries):
    """Every transfer with how often it runs."""
    for entry in entries:
        if isinstance(entry, Loop):
            yield from ((one, entry.passes * times) for one, times in transfers_of(entry.entries))
        elif isinstance(entry, Transfer):
            yield entry, 1


def test_each_layer_sends_its_input_to_the_host_and_takes_it_back(graph):
    found = list(transfers(graph))
    assert [t.to_host for t in found] == [True, False]
    assert [graph.ops[t.op].trips for t in found] == [LAYERS, LAYERS]


def test_the_stack_that_a_loop_writes_them_to_is_on_the_host(graph):
    shapes = {graph.values[v].shape for v in host_values(graph)}
    assert (LAYERS, TOKENS, WIDTH) in shapes
    stacks = [c for loop in graph.loops for c in loop.carries if c.argument in host_values(graph)]
    assert len(stacks) == 2  # of the forward and of the backward loop


def test_a_program_without_offload_has_nothing_there():
    fn, args = train(SAVE)
    graph = prepare(Program.trace(fn, *args)).graph
    assert host_values(graph) == frozenset()
    assert not list(transfers(graph))


def test_what_is_on_the_host_takes_no_memory_of_the_device():
    stack = LAYERS * TOKENS * WIDTH * 2 / 4
    saved = evaluated(SAVE).peak_memory_bytes - evaluated(OFFLOAD).peak_memory_bytes
    assert stack / LAYERS <= saved <= stack


def test_copies_take_the_bytes_of_a_shard_over_pcie():
    # v6e: 32e9 bytes/s a chip each way; each of 4 devices has a quarter of the tokens.
    one = TOKENS * WIDTH * 2 / 4 / 32e9
    estimate = evaluated(OFFLOAD)
    copies = [
        (t.label.kind, t.stages[0].links, t.when, times, t.seconds)
        for t, times in transfers_of(schedule_of_models(estimate.schedule))
        if t.label.kind.startswith("copy")
    ]
    assert copies == [
        ("copy-to-host", ("pcie to host",), "behind", LAYERS, pytest.approx(one)),
        ("copy-from-host", ("pcie from host",), "ahead", LAYERS, pytest.approx(one)),
    ]
    assert estimate.host_copy_time_s == pytest.approx(2 * LAYERS * one)


def test_the_two_devices_of_a_chip_share_its_link():
    fn, args = train(OFFLOAD)
    estimate = sw.evaluate(
        fn, *args, topology="tpu7x:1x1x1", mesh={"data": 2}, in_specs=(P(), P("data"))
    )
    assert estimate.host_copy_time_s == pytest.approx(2 * LAYERS * TOKENS * WIDTH / 16e9)


def test_a_plan_may_offload():
    fn, args = train(OFFLOAD)
    plan = sw.plan(fn, *args, topology="v6e:2x2", time_limit_s=1)
    assert plan.estimate.host_copy_time_s > 0
    assert not plan.data.replicated_ops


def test_decoders_offload_by_name():
    small = {
        **{"layers": 2, "d_model": 256, "heads": 2, "kv_heads": 2, "d_ff": 512, "vocab": 512},
        **{"sequence": 128, "batch": 8},
    }
    names = {"remat": "names", "offloaded": ("decoder_layer_input",), "saved": ("out_proj",)}
    model = build("llama3-8b", **small, **names)
    graph = prepare(Program.trace(model.train_step, *model.example_args)).graph
    assert [t.to_host for t in transfers(graph)] == [True, False]
    with pytest.raises(InputError, match="remat='names'"):
        build("llama3-8b", **small, offloaded=("out_proj",))


def test_sums_over_slices_leave_a_pass_during_the_next():
    def loss(ws, x):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), prevent_cse=False)
        return jnp.sum(jax.lax.scan(body, x, ws)[0].astype(jnp.float32))

    _, args = train(SAVE)
    estimate = sw.evaluate(
        jax.grad(loss), *args,
        topology="2*v5e:2x2", mesh={"slices": 2, "data": 4},
        in_specs=(P(), P(("slices", "data"))), out_specs=P(),
    )  # fmt: skip
    links = {
        (stage.links, t.when)
        for t, times in transfers_of(schedule_of_models(estimate.schedule))
        if times == LAYERS
        for stage in t.stages
    }
    assert (("slice",), "behind") in links
    assert all(when == "stops" for names, when in links if names != ("slice",))
