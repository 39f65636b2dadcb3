"""Peak memory of small programs on one device, in tensors of one size, counted by hand.

libtpu gives the same for each of them where the tensors are bf16[16384,16384] (`memory_analysis()`
on v5e: arguments + temporaries + outputs - aliases), too large to be kept in VMEM.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.planner.prepared import prepare

N, LAYERS = 16384, 4
ONE = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
STACK = jax.ShapeDtypeStruct((LAYERS, N, N), jnp.bfloat16)
ROWS = jax.ShapeDtypeStruct((16, N), jnp.bfloat16)
NBYTES = 2 * N * N


def scan(x: jax.Array, weights: jax.Array) -> jax.Array:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]


def scan_and_stack(x: jax.Array, weights: jax.Array) -> Any:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, weights)


def update(x: jax.Array, rows: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, rows, (0, 0))


def residual(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x) @ x + x @ x


Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...], float]
CASES: dict[str, Case] = {
    # An argument and a result.
    "elementwise": (lambda x: x * 2, (ONE,), (), 2),
    "elementwise, donated": (lambda x: x * 2, (ONE,), (0,), 1),
    "chain, of which only the end is written": (
        lambda x: jnp.sin(jnp.cos(x)) * 2, (ONE,), (), 2,
    ),
    "product": (lambda x: x @ x, (ONE,), (), 2),
    # One intermediate at a time, since a product cannot be written over its operands.
    "product of products": (lambda x: ((x @ x) @ x) @ x, (ONE,), (), 3),
    # The second product is written over by the sum; tanh is read until then.
    "products added up": (residual, (ONE,), (), 3),
    # Five arguments, the carry, and the next one that a product cannot write over it.
    "scan": (scan, (ONE, STACK), (), 7),
    "scan, donated": (scan, (ONE, STACK), (0,), 6),
    # And the stack of carries, written in place slice by slice.
    "scan and stack": (scan_and_stack, (ONE, STACK), (), 11),
    "loop that writes over its carry": (
        lambda x: lax.fori_loop(0, 5, lambda i, c: c * 1.5 + i.astype(c.dtype), x), (ONE,), (), 2,
    ),
    "loop of products": (lambda x: lax.fori_loop(0, 5, lambda i, c: c @ x, x), (ONE,), (), 3),
    # The caller keeps its argument, so the update is of a copy.
    "update of an argument": (update, (ONE, ROWS), (), 2),
    "update of a donated argument": (update, (ONE, ROWS), (0,), 1),
    "update of an intermediate": (lambda x, u: update(x @ x, u) * 2, (ONE, ROWS), (), 2),
    "concatenation": (lambda x: jnp.concatenate([x @ x, x]) * 2, (ONE,), (), 4),
}  # fmt: skip


def peak(fn: Callable[..., Any], args: tuple[Any, ...], donated: tuple[int, ...]) -> float:
    estimate = sw.evaluate(
        fn, *args, topology="v5e:1x1", mesh={"x": 1}, in_specs=P(), donate_argnums=donated
    )
    return estimate.peak_memory_bytes / NBYTES


@pytest.mark.parametrize("name", CASES)
def test_peak_memory_counted_in_tensors(name: str) -> None:
    fn, args, donated, tensors = CASES[name]
    # Rows, counters and scalars are a few hundredths of a tensor.
    assert peak(fn, args, donated) == pytest.approx(tensors, abs=0.05)


def test_sharded_tensors_count_by_their_shards() -> None:
    def bytes_on(spec: P) -> float:
        estimate = sw.evaluate(
            lambda x: x * 2, ONE, topology="v5e:2x2", mesh={"x": 4}, in_specs=spec, out_specs=spec
        )
        return estimate.peak_memory_bytes

    assert bytes_on(P()) == 2 * NBYTES
    assert bytes_on(P("x")) == 2 * NBYTES / 4


def test_gathered_copy_counts_beside_the_shards_that_it_is_made_of() -> None:
    estimate = sw.evaluate(
        jnp.sin, ONE, topology="v5e:2x2", mesh={"x": 4}, in_specs=P("x"),
        out_specs=P(),
    )  # fmt: skip
    # A quarter as argument, and the result gathered from a quarter.
    assert estimate.peak_memory_bytes / NBYTES == pytest.approx(1 / 4 + 1 / 4 + 1, abs=0.01)


def test_peak_says_what_fills_the_memory() -> None:
    estimate = sw.evaluate(scan, ONE, STACK, topology="v5e:1x1", mesh={"x": 1}, in_specs=P())
    largest = estimate.peak_buffers[0]
    assert largest.nbytes == LAYERS * NBYTES
    assert sum(buffer.nbytes for buffer in estimate.peak_buffers) == pytest.approx(
        estimate.peak_memory_bytes, rel=0.01
    )


def test_buffer_lives_until_the_last_read_of_a_view_of_it() -> None:
    def fn(x: jax.Array) -> Any:
        viewed = (x @ x).reshape(N // 2, 2, N)
        return jnp.sort(x), viewed.sum(0)

    prepared = prepare(sw.Program.trace(fn, ONE))
    ops = {op.name.removeprefix("stablehlo."): op for op in prepared.graph.ops}
    assert ops["dot_general"].id < ops["sort"].id < ops["reduce"].id
    (buffer,) = [b for b in prepared.buffers if b.value == ops["dot_general"].results[0]]
    assert buffer.start == ops["dot_general"].id
    assert buffer.end > ops["sort"].id


def test_a_table_that_one_lookup_would_gather_for_itself_is_known_to_take_memory() -> None:
    """It is read twice, so that a copy stands between; to gather it again seems to cost nothing."""

    def step(table: jax.Array, rows: jax.Array, new: jax.Array) -> Any:
        return jnp.take(table, rows, axis=0, mode="clip"), table.at[rows].add(new, mode="drop")

    table = jax.ShapeDtypeStruct((1 << 14, 128), jnp.float32)
    rows, new = jnp.zeros(64, jnp.int32), jnp.ones((64, 128))
    plan = sw.plan(
        step, table, rows, new, topology="v5e:2x4", mesh={"a": 8}, donate_argnums=0,
        memory_fraction=4e6 / 17.2e9,
    )  # fmt: skip
    assert any(plan.in_specs[0])
    assert plan.estimate.peak_memory_bytes < 4e6
