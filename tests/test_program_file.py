"""A program written to bytes is planned as the function that it was traced from."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir

import shardwright as sw
from shardwright.models import build
from shardwright.planner.annotated import annotated_stablehlo
from shardwright.planner.program import Program

MESH = {"data": 2, "model": 4}
ENOUGH_S = 300.0
"""So that the search ends by itself and finds the same however busy the machine is."""
DECODER = {
    "layers": 2, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 64, "vocab": 64, "batch": 8,
    "sequence": 16, "compute_dtype": "float32",
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, P]]] = {
    "scanned decoder with optax state": (
        "llama3-8b", DECODER, {"[0]['params']['layers']['w_up']": P(None, "data", "model")},
    ),
    "mlp": (
        "mlp", {"features": 16, "hidden": 32, "layers": 3, "classes": 8, "batch": 16},
        {"[0]['params']['layers'][1]['w']": P("data", "model")},
    ),
}  # fmt: skip
KEPT = [
    f.name for f in dataclasses.fields(Program) if f.name not in ("bytecode", "in_tree", "out_tree")
]


def traced(name: str) -> tuple[Any, Program]:
    model = build(MODELS[name][0], **MODELS[name][1])
    return model, Program.trace(
        model.train_step, *model.example_args, donate_argnums=model.donate_argnums
    )


@pytest.mark.parametrize("name", MODELS)
def test_program_read_from_its_bytes_is_the_same_but_for_pytrees(name: str) -> None:
    _, program = traced(name)
    again = Program.from_stablehlo(program.to_stablehlo())
    assert [getattr(again, field) for field in KEPT] == [getattr(program, f) for f in KEPT]
    assert again.in_tree is None and again.out_tree is None


def test_bytes_are_the_same_wherever_the_function_is_traced_from() -> None:
    _, here = traced("mlp")
    _, there = traced("mlp")
    assert here.to_stablehlo() == there.to_stablehlo()


@pytest.mark.parametrize("name", MODELS)
def test_plan_of_the_bytes_is_the_plan_of_the_function(name: str) -> None:
    _, program = traced(name)
    sent = Program.from_stablehlo(program.to_stablehlo())
    plans = [
        sw.plan(
            p, topology="v5e:2x4", mesh=MESH, pinned=MODELS[name][2], time_limit_s=ENOUGH_S
        ).data
        for p in (program, sent)
    ]
    ours, theirs = (
        plan.model_dump(exclude={"solver": {"wall_time_s"}, "program": {"in_tree", "out_tree"}})
        for plan in plans
    )
    assert theirs == ours
    assert plans[1].constraints


def test_plan_of_the_bytes_runs_the_function() -> None:
    model, program = traced("mlp")
    plan = sw.plan(
        Program.from_stablehlo(program.to_stablehlo()),
        topology="v5e:2x4", mesh=MESH, pinned=MODELS["mlp"][2],
    )  # fmt: skip
    batch = model.make_batch(0)
    ours = plan.jit(model.train_step)(model.init(0), batch)
    expected = jax.jit(model.train_step)(model.init(0), batch)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)  # bfloat16 inside


def written(**changes: Any) -> bytes:
    """A program's text with other names in its attribute."""
    program = Program.trace(lambda x, y: x + y, *(jax.ShapeDtypeStruct((4,), np.float32),) * 2)
    names = {"name": "f", "in_paths": ["[0]", "[1]"], "out_paths": [""], "donate_argnums": []}
    with program.module() as module:
        text = changes.get("text") or json.dumps(names | changes)
        module.operation.attributes["shardwright.program"] = ir.StringAttr.get(text)
        return str(module).encode()


def test_names_are_read_from_text_too() -> None:
    program = Program.from_stablehlo(written(in_paths=["[0]['x']", "[0]['y']"], name="sum"))
    assert program.name == "sum"
    assert [t.path for t in program.inputs] == ["[0]['x']", "[0]['y']"]


DAMAGED: dict[str, dict[str, Any]] = {
    "not JSON": {"text": "{"},
    "fewer paths than arguments": {"in_paths": ["[0]"]},
    "the same path twice": {"in_paths": ["[0]", "[0]"]},
    "more paths than results": {"out_paths": ["[0]", "[1]"]},
    "a path that is no text": {"in_paths": ["[0]", 1]},
    "a path without end": {"in_paths": ["[0]", "x" * 10_000]},
    "a field of another version": {"color": "red"},
    "donated argument that is no number": {"donate_argnums": ["0"]},
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_names_are_refused_in_one_line(what: str) -> None:
    with pytest.raises(sw.InputError, match=r"shardwright\.program of the module is dam") as caught:
        Program.from_stablehlo(written(**DAMAGED[what]))
    assert "\n" not in str(caught.value)


def test_kernels_are_planned_from_the_bytes_and_run() -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    kernel = sw.kernel(product, rule="m k, k n -> m n", whole="k", flops="2 * m * k * n")

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return kernel(x, w).sum(0)

    arrays = [np.random.default_rng(i).standard_normal((32, 32)).astype(np.float32) for i in (0, 1)]
    program = Program.trace(step, *arrays)
    sent = Program.from_stablehlo(program.to_stablehlo())
    ours, theirs = (
        sw.plan(p, topology="v5e:2x4", mesh=MESH, time_limit_s=ENOUGH_S).data.model_dump(
            exclude={"solver": {"wall_time_s"}, "program": {"in_tree", "out_tree"}}
        )
        for p in (program, sent)
    )
    assert theirs == ours
    plan = sw.plan(sent, topology="v5e:2x4", mesh=MESH)
    np.testing.assert_allclose(plan.jit(step)(*arrays), step(*arrays), rtol=1e-4, atol=1e-4)
    assert "sdy.sharding_constraint" in annotated_stablehlo(sent, plan)
