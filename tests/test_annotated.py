"""A whole module with its plan on it compiles as it is and computes what it did."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jax.extend.backend import get_backend
from jax.sharding import Mesh, NamedSharding
from jaxlib import _jax

import shardwright as sw
from shardwright.errors import InputError
from shardwright.planner.annotated import annotated_stablehlo
from shardwright.planner.plan import Plan
from shardwright.planner.plan_data import partition_spec
from shardwright.planner.program import Program

MESH = {"data": 2, "model": 4}


def run_text(text: str, plan: Plan, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Compiles the text with XLA's client alone, and runs it on eight devices."""
    client = get_backend("cpu")
    devices = np.array(client.devices())
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=8, device_assignment=devices.reshape(1, 8)
    )
    compiled = client.compile_and_load(text, _jax.DeviceList(tuple(devices)), options)
    mesh = Mesh(devices.reshape(tuple(plan.mesh_axes.values())), tuple(plan.mesh_axes))

    def shardings(tensors: Any) -> list[NamedSharding]:
        return [NamedSharding(mesh, partition_spec(tensor.spec)) for tensor in tensors]

    placed = jax.device_put(list(args), shardings(plan.data.program.inputs))
    shards = compiled.execute_sharded(placed).disassemble_into_single_device_arrays()
    return [
        jax.make_array_from_single_device_arrays(result.shape, sharding, list(arrays))
        for result, sharding, arrays in zip(
            results, shardings(plan.data.program.outputs), shards, strict=True
        )
    ]


def scanned_step(state: Any, x: Any) -> tuple[Any, Any]:
    """Descent on layers in a loop, whose backward pass is a loop too."""

    def loss(weights: Any) -> Any:
        last, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.sum(last**2)

    value, gradient = jax.value_and_grad(loss)(state)
    return state - 1e-3 * gradient, value


@pytest.mark.parametrize("exported", [False, True], ids=["traced", "exported"])
def test_the_annotated_module_of_a_train_step_runs_on_eight_devices_as_on_one(
    exported: bool,
) -> None:
    """The module is for TPU and has nothing of TPU in it, so that the CPU takes it too."""
    keys = jax.random.split(jax.random.key(0))
    args = (jax.random.normal(keys[0], (4, 64, 64)) / 8, jax.random.normal(keys[1], (32, 64)))
    expected = jax.jit(scanned_step)(*args)
    if exported:
        jitted = jax.jit(scanned_step, donate_argnums=0)
        artifact = jax.export.export(jitted, platforms=["tpu"])(*args)
        program = Program.from_exported(bytes(artifact.serialize()))
    else:
        program = Program.trace(scanned_step, *args, donate_argnums=(0,))
    plan = sw.plan(
        program, topology="v5e:2x4", mesh=MESH, time_limit_s=1,
        pinned={program.inputs[0].path: jax.P(None, "data", "model")},
    )  # fmt: skip
    text = annotated_stablehlo(program, plan)
    found = run_text(text, plan, args, expected)
    for one, eight in zip(expected, found, strict=True):
        np.testing.assert_allclose(np.asarray(eight), np.asarray(one), rtol=1e-4, atol=1e-5)


def test_arguments_results_and_values_inside_are_sharded_as_planned() -> None:
    def step(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w) @ w.T

    program = Program.trace(
        step, jax.ShapeDtypeStruct((512, 2048), "float32"), jax.ShapeDtypeStruct((4096, 512), "f4")
    )
    plan = sw.plan(
        program, topology="v5e:2x4", mesh={"data": 8}, time_limit_s=1, pinned={"[1]": jax.P("data")}
    )
    text = annotated_stablehlo(program, plan)
    assert 'sdy.mesh @mesh = <["data"=8]>' in text
    assert "%arg0: tensor<512x2048xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}" in text
    assert (
        '%arg1: tensor<4096x512xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}' in text
    )
    assert "mhlo.num_partitions = 8" in text
    assert "sdy.sharding_constraint" in text


def test_the_plan_of_another_program_is_refused() -> None:
    def program(size: int) -> Program:
        return Program.trace(lambda x: x @ x, jax.ShapeDtypeStruct((size, size), "float32"))

    plan = sw.plan(program(256), topology="v5e:2x4", time_limit_s=1)
    with pytest.raises(InputError, match="another program"):
        annotated_stablehlo(program(512), plan)


def test_prints_are_left_out_of_what_a_compiler_is_given() -> None:
    def fn(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x)
        return x * 2

    program = Program.trace(fn, jax.ShapeDtypeStruct((16, 8), jnp.float32))
    plan = sw.plan(program, topology="v5e:2x4", mesh={"data": 8}, time_limit_s=1)
    assert any("print" in op for op in plan.data.replicated_ops)
    assert "custom_call" not in annotated_stablehlo(program, plan)
