"""Arguments that come from the host each step: what feeding them counts, and that it cuts them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.prepared import prepare
from shardwright.planner.problem import ShardingProblem

PCIE = 16e9
"""Bytes/s of a v5e chip (How to Scale Your Model, "How to Think About TPUs")."""


def train_step(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        logits = jnp.take(w, batch["tokens"], axis=0) @ w.T
        labels = jax.nn.one_hot(batch["labels"], w.shape[0], dtype=w.dtype)
        return -(jax.nn.log_softmax(logits) * labels).mean()

    return w - 0.1 * jax.grad(loss)(w)


W = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
BATCH = {name: jax.ShapeDtypeStruct((16, 4096), jnp.int32) for name in ("labels", "tokens")}


def problem(donated: bool, w: jax.ShapeDtypeStruct = W) -> tuple[ShardingProblem, dict[str, int]]:
    program = sw.Program.trace(train_step, w, BATCH, donate_argnums=0 if donated else ())
    prepared = prepare(program)
    mesh = meshes_for_shape(parse_slice("v5e:2x2"), {"data": 4})[0]
    nodes = prepared.nodes
    names = dict(zip(nodes.graph.argument_names, nodes.argument_nodes, strict=True))
    return prepared.problem(mesh), names


def test_feeding_takes_the_local_bytes_over_the_host_link() -> None:
    # So much compute that feeding counts in full.
    given, names = problem(True, jax.ShapeDtypeStruct((65536, 16384), jnp.float32))
    node = names["[1]['tokens']"]
    rows = map(tuple, given.strategies[node].tolist())
    seconds = dict(zip(rows, given.feeding.seconds[node].tolist(), strict=True))
    whole = 4 * 16 * 4096 / PCIE
    assert seconds[-1,] == pytest.approx(whole)
    assert seconds[0,] == seconds[1,] == pytest.approx(whole / 4)
    assert given.feeding.most == pytest.approx(2 * whole)


def test_donated_arguments_are_not_fed() -> None:
    given, names = problem(donated=True)
    assert set(given.feeding.seconds) == {names["[1]['labels']"], names["[1]['tokens']"]}


def test_feeding_counts_a_ten_thousandth_of_the_least_compute_at_most() -> None:
    given, _ = problem(donated=False)
    assert len(given.feeding.seconds) == 3
    least = sum(float(seconds.min()) for seconds in given.compute)
    assert given.feeding.most == pytest.approx(1e-4 * least)


def test_what_readers_cut_is_fed_cut() -> None:
    plan = sw.plan(train_step, W, BATCH, topology="v5e:2x2", mesh={"data": 4}, donate_argnums=0)
    _, specs = plan.in_specs
    assert all(spec == PartitionSpec("data") for spec in specs.values())


def test_feeding_is_no_part_of_a_bound_on_the_step() -> None:
    given, _ = problem(donated=True)
    assert given.step_bound(1.0) == 1.0 - given.feeding.most
