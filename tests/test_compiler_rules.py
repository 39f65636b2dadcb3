"""What the TPU compiler is known to do to programs, in small programs: casts and scatters.

Each rule was read from scheduled programs of libtpu 0.0.42.1 (`benchmarks/fidelity.py` compares
whole train steps with it).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cost_models.compute import beyond_cmem, computes_quotients_again
from shardwright.cost_models.memory import Buffer
from shardwright.hardware_profiles.chip import load_chip
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.hand_made import flat_shardings
from shardwright.planner.narrowing import Narrowing
from shardwright.planner.partitioning import partition
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.product_order import in_order
from shardwright.planner.program import Program
from shardwright.planner.small_products import is_outer, is_row_sum
from shardwright.planner.step_buffers import step_buffers, without_vmem

MESH = {"x": 4, "y": 2}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def s32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def prepared(fn: Any, *args: Any, donate: Any = ()) -> Prepared:
    return prepare(Program.trace(fn, *args, donate_argnums=donate))


def written(made: Prepared) -> set[str]:
    """Types and shapes of what kernels write to memory."""
    values = made.graph.values
    return {
        f"{values[v].dtype}{list(values[v].shape)}"
        for kernel in made.fusions.fusions
        for v in kernel.writes
    }


def buffers(made: Prepared, specs: Any) -> list[Any]:
    (mesh, *_) = meshes_for_shape(parse_slice("v5e:2x4"), MESH)
    program = made.program
    ins = flat_shardings(specs, program.in_tree, program.inputs, MESH, "in_specs")
    outs = [ins[program.aliases[k]] if k in program.aliases else None
            for k in range(len(program.outputs))]  # fmt: skip
    parts = partition(program, made.graph, MESH, (), ins, outs)
    return step_buffers(made.graph, made.fusions, made.buffers, parts, mesh)


# -- stacks of weights -----------------------------------------------------------------------------


def layers(stack: jax.Array, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    return lax.scan(layer, x, stack)[0]


def test_stack_that_a_loop_casts_is_cast_before_it() -> None:
    made = prepared(layers, f32(4, 64, 64), bf16(32, 64))
    assert list(Narrowing(made.graph).stacks.values()) == ["bf16"]
    (narrow,) = [life for life in made.buffers if life.dtype is not None]
    assert (narrow.dtype, made.graph.values[narrow.value].shape) == ("bf16", (4, 64, 64))


def test_stack_that_a_loop_also_reads_whole_is_not_cast() -> None:
    def fn(stack: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), jnp.sum(w)

        x, sums = lax.scan(layer, x, stack)
        return x + sums.sum().astype(x.dtype)

    made = prepared(fn, f32(4, 64, 64), bf16(32, 64))
    assert not Narrowing(made.graph).stacks


def test_stack_is_gathered_in_the_type_that_it_is_cast_to() -> None:
    """4 layers of 512 x 512 in bf16; the float32 stack would be twice as large."""
    plan = sw.plan(
        layers, f32(4, 512, 512), bf16(1 << 14, 512), topology="v5e:2x4", mesh=MESH,
        pinned={"[0]": P(None, "x"), "[1]": P(("x", "y"))},
    )  # fmt: skip
    gathers = [c for c in plan.estimate.collectives if c.kind == "all_gather"]
    assert {c.dtype for c in gathers} == {"bf16"}
    assert sum(c.nbytes * c.count for c in gathers) == 4 * 512 * 512 * 2


def test_table_whose_rows_are_looked_up_and_cast_is_gathered_cast() -> None:
    def fn(table: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.take(table, rows, axis=0).astype(jnp.bfloat16)

    made = prepared(fn, f32(512, 256), s32(64))
    reader = next(op.id for op in made.graph.ops if op.name == "stablehlo.gather")
    assert Narrowing(made.graph).dtype_for(made.graph.arguments[0], [reader]) == "bf16"


def test_elementwise_readers_of_a_table_do_not_keep_it_wide() -> None:
    def fn(table: jax.Array, rows: jax.Array) -> Any:
        return table * 0.5, jnp.take(table, rows, axis=0).astype(jnp.bfloat16)

    made = prepared(fn, f32(512, 256), s32(64))
    assert Narrowing(made.graph).gathered_dtype(made.graph.arguments[0]) == "bf16"


def test_reader_behind_a_barrier_keeps_a_table_wide() -> None:
    def fn(table: jax.Array, rows: jax.Array) -> Any:
        return lax.optimization_barrier(table), jnp.take(table, rows, axis=0).astype(jnp.bfloat16)

    made = prepared(fn, f32(512, 256), s32(64))
    assert Narrowing(made.graph).gathered_dtype(made.graph.arguments[0]) is None


# -- kernels ---------------------------------------------------------------------------------------


def test_cast_is_written_by_the_kernel_that_makes_what_it_casts() -> None:
    def fn(a: jax.Array, b: jax.Array, w: jax.Array) -> Any:
        y = (a * b).astype(jnp.bfloat16)
        return y @ w, y.T @ w

    made = prepared(fn, f32(64, 64), f32(64, 64), bf16(64, 64))
    assert written(made) == {"bf16[64, 64]"}


def test_elementwise_work_that_one_product_reads_runs_inside_it() -> None:
    def fn(a: jax.Array, b: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(a * b) @ w

    made = prepared(fn, bf16(64, 32), bf16(64, 32), bf16(32, 128))
    assert written(made) == {"bf16[64, 128]"}


def test_what_is_gathered_from_is_written_and_others_cast_it_themselves() -> None:
    """The logit of a label is looked up in float32 logits; their sum needs none."""

    def fn(x: jax.Array, w: jax.Array, label: jax.Array) -> Any:
        logits = (x @ w).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, label[:, None], axis=-1)
        return picked, jnp.exp(logits).sum(-1)

    made = prepared(fn, bf16(256, 64), bf16(64, 512), s32(256))
    assert {"bf16[256, 512]", "f32[256, 512]"} <= written(made)
    values = made.graph.values
    readers = {
        made.graph.ops[read.op].name
        for kernel in made.fusions.fusions
        for read in kernel.reads
        if values[made.graph.ops[read.op].operands[read.operand]].dtype == "f32"
        and values[made.graph.ops[read.op].operands[read.operand]].shape == (256, 512)
    }
    assert readers == {"stablehlo.gather"}


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, label[:, None], axis=-1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def test_gradient_of_a_looked_up_element_is_a_comparison_without_memory() -> None:
    made = prepared(jax.grad(cross_entropy), f32(256, 512), s32(256))
    (scatter,) = [op for op in made.graph.ops if op.name == "stablehlo.scatter"]
    assert scatter.results[0] not in made.fusions.materialized


def test_gradient_of_looked_up_rows_has_memory() -> None:
    def loss(table: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.tanh(table[rows]).sum()

    made = prepared(jax.grad(loss), f32(512, 64), s32(256))
    (scatter,) = [op for op in made.graph.ops if op.name == "stablehlo.scatter"]
    assert scatter.results[0] in made.fusions.materialized


# -- what kernels write over -----------------------------------------------------------------------


def test_product_writes_over_what_is_added_to_it_and_nothing_else() -> None:
    # XLA shares the buffer of a product's addend; seen in scheduled programs of libtpu 0.0.42.1.
    def overlap(combine: Any) -> bool:
        def fn(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
            return combine(x @ w, x @ v)

        square = bf16(64, 64)
        made = prepared(fn, square, square, square)
        own = [life for life in made.buffers if life.value not in made.graph.arguments]
        first, second = sorted(own, key=lambda life: life.start)
        return first.end > second.start

    assert overlap(lambda y, z: y * z)
    assert not overlap(lambda y, z: y + z)


# -- what is kept from the forward to the backward pass --------------------------------------------


def test_gathered_weight_that_both_passes_read_is_kept_between_them() -> None:
    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            y = jnp.tanh(x @ w[0].astype(jnp.bfloat16))
            return jnp.tanh(y @ w[1].astype(jnp.bfloat16)).sum()

        return jax.grad(loss)(w)

    made = prepared(step, [f32(4096, 4096)] * 2, bf16(1024, 4096))
    rows, cut = P(("x", "y"), None), P(None, ("x", "y"))
    gathered = [b for b in buffers(made, ([cut, cut], rows)) if b.name.startswith("all_gather")]
    products = [op.id for op in made.graph.ops if op.name == "stablehlo.dot_general"]
    (second,) = [b for b in gathered if b.name.endswith("[1]")]
    # Forward twice, then the gradients of the second weight, of what it is multiplied with...
    assert second.start <= products[1] and second.end > products[3]


def attention_step(scores: str, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Attention and its gradients; its scores as the softmax reads them, or transposed to it."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        made = jnp.einsum(f"bsh,bth->{scores}", q, k).astype(jnp.float32)
        made = made if scores == "bst" else made.transpose(0, 2, 1)
        weights = jax.nn.softmax(made).astype(q.dtype)
        return jnp.square(jnp.einsum("bst,bth->bsh", weights, v).astype(jnp.float32)).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


def test_exponentials_of_a_softmax_are_kept_in_f32_unless_its_scores_are_transposed() -> None:
    """Compiled on v6e, f32[8,8,1024,1024] of an encoder; of a decoder with grouped heads, none."""
    heads = bf16(4, 256, 64)
    straight = prepared(lambda *heads: attention_step("bst", *heads), heads, heads, heads)
    assert "f32[4, 256, 256]" in written(straight)
    transposed = prepared(lambda *heads: attention_step("bts", *heads), heads, heads, heads)
    assert "f32[4, 256, 256]" not in written(transposed)


def test_exponentials_of_logits_are_computed_again() -> None:
    """Compiled on v5e, f32[2048,32128] of a T5's loss is nowhere."""

    def loss(w: jax.Array, x: jax.Array, label: jax.Array) -> jax.Array:
        return cross_entropy((x @ w).astype(jnp.float32), label)

    step = jax.value_and_grad(loss)
    made = prepared(step, bf16(64, 1024), bf16(256, 64), s32(256))
    exponentials = [op for op in made.graph.ops if op.name == "stablehlo.exponential"]
    assert exponentials
    assert not {op.results[0] for op in exponentials} & made.fusions.materialized


def test_weights_of_attention_are_divided_again_in_products_of_v6e_alone() -> None:
    chips = {name: computes_quotients_again(load_chip(name)) for name in ("v5e", "v5p", "v6e")}
    assert chips == {"v5e": False, "v5p": False, "v6e": True}
    heads = bf16(4, 256, 64)
    made = prepared(lambda *heads: attention_step("bst", *heads), heads, heads, heads)
    quotients = [kernel for kernel in made.fusions.fusions if kernel.quotient]
    assert [kernel.computed_in for kernel in quotients] == [2]


# -- what a loop stacks ----------------------------------------------------------------------------


def test_slices_that_are_computed_from_one_product_are_written_by_one_kernel() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return lax.scan(lambda x, v: (jax.nn.gelu(x @ v), None), x, w)[0].sum()

        return jax.grad(loss)(w)

    made = prepared(step, f32(4, 512, 512), f32(256, 512))
    stacked = [
        kernel
        for kernel in made.fusions.fusions
        for written in kernel.writes
        if made.graph.values[written].shape == (4, 256, 512)
    ]
    # The layer's input is a slice of its own.
    assert len(stacked) > 3
    assert [kernel.with_others for kernel in stacked].count(False) == 2


# -- order -----------------------------------------------------------------------------------------


def test_gathered_weight_is_gone_when_the_other_operand_of_its_gradient_is_gathered() -> None:
    """Compiled on v5p, the two are never in memory together in a multilayer perceptron."""
    weight = bf16(64, 64)
    loss = jax.grad(lambda v, w, x: jnp.tanh(jnp.tanh(x @ v) @ w).sum(), argnums=(0, 1, 2))
    graph = prepared(loss, weight, weight, weight).graph
    *_, gradient, other = [op.id for op in graph.ops if op.name == "stablehlo.dot_general"]
    weight_held = Buffer("weight", 0, other + 1, 1.0, "collective")
    rows = Buffer("rows", gradient, gradient + 1, 1.0, "collective")
    value = Buffer("value", 0, other + 1, 1.0, "temporary")
    found = in_order(graph, [weight_held, rows, value], lambda op: op)
    assert [(b.start, b.end) for b in found] == [
        (0, gradient + 1), (other, other + 1), (0, other + 1)
    ]  # fmt: skip
    assert in_order(graph, [weight_held, value], lambda op: op) == [weight_held, value]


# -- CMEM ------------------------------------------------------------------------------------------


def test_what_lies_in_cmem_takes_no_memory_and_is_read_from_none() -> None:
    """On v4 an array of attention of all 128 MiB is in CMEM while the next kernels read it."""
    v4, v5e = load_chip("v4"), load_chip("v5e")
    assert float(beyond_cmem(2.0**27, v4)) == 0 < float(beyond_cmem(2.0**27 + 1, v4))
    assert float(beyond_cmem(1.0, v5e)) == 1.0
    large = Buffer("scores", 0, 3, 2.0**27, "temporary")
    small = Buffer("output", 1, 2, 2.0**20, "temporary")
    times = np.arange(4)
    assert without_vmem([small, large], 2.0**27, times, cmem=True) == [small]
    assert without_vmem([small, large], 2.0**27, times) == [large]


# -- products without the matrix units -------------------------------------------------------------


def test_one_hot_products_of_a_mixture_are_elementwise() -> None:
    """Compiled on v5p and v6e, neither the combine weights nor their gradients are in memory."""

    def loss(gates: jax.Array, slot: jax.Array, made: jax.Array) -> jax.Array:
        combine = jnp.einsum("gse,gsc->gsec", gates, slot).astype(jnp.bfloat16)
        return jnp.einsum("gsec,gecd->gsd", combine, made).astype(jnp.float32).sum()

    step = jax.value_and_grad(loss, argnums=(0, 2))
    made = prepared(step, f32(4, 64, 16), f32(4, 64, 32), bf16(4, 16, 32, 128))
    products = {op.id: op for op in made.graph.ops if op.name == "stablehlo.dot_general"}
    assert [is_outer(op) for op in products.values()].count(True) == 1
    assert [is_row_sum(op) for op in products.values()].count(True) == 1
    assert not {text for text in written(made) if text.endswith("[4, 64, 16, 32]")}
