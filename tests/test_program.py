"""One program from three kinds of input, and what is refused."""

import functools
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jaxlib.mlir.dialects import stablehlo

import shardwright as sw
from shardwright.planner.program import Program, Tensor

F32 = jnp.float32
STATE = {"w": jax.ShapeDtypeStruct((8, 4), F32), "step": jax.ShapeDtypeStruct((), jnp.int32)}
BATCH = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)


def step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    y = batch.astype(F32) @ state["w"]
    return {"w": state["w"] - 0.1 * y.mean(), "step": state["step"] + 1}, y.sum()


def lowered(fn: Callable[..., Any] = step, donate: tuple[int, ...] = (0,)) -> jax.stages.Lowered:
    traced = jax.jit(fn, donate_argnums=donate).trace(STATE, BATCH)
    return traced.lower(lowering_platforms=("tpu",))


def exported(donate: tuple[int, ...] = (0,), **options: Any) -> bytes:
    make = export.export(jax.jit(step, donate_argnums=donate), **{"platforms": ["tpu"], **options})
    return bytes(make(STATE, BATCH).serialize())


def bytecode() -> bytes:
    buffer = io.BytesIO()
    lowered().compiler_ir("stablehlo").operation.write_bytecode(buffer)
    return buffer.getvalue()


def portable_artifact() -> bytes:
    with lowered().compiler_ir("stablehlo").context:
        artifact: bytes = stablehlo.serialize_portable_artifact_str(lowered().as_text(), "1.0.0")
    return artifact


KINDS: dict[str, Callable[[], Program]] = {
    "traced": lambda: Program.trace(step, STATE, BATCH, donate_argnums=(0,)),
    "exported": lambda: Program.from_exported(exported()),
    "text": lambda: Program.from_stablehlo(lowered().as_text()),
    "bytecode": lambda: Program.from_stablehlo(bytecode()),
    "portable artifact": lambda: Program.from_stablehlo(portable_artifact()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_gives_the_same_inputs_outputs_and_aliases(kind: str) -> None:
    program = KINDS[kind]()
    shapes = [(t.shape, t.dtype) for t in program.inputs]
    assert shapes == [((), "i32"), ((8, 4), "f32"), ((16, 8), "bf16")]
    assert [(t.shape, t.dtype) for t in program.outputs] == [
        ((), "i32"),
        ((8, 4), "f32"),
        ((), "f32"),
    ]
    assert program.aliases == {0: 0, 1: 1}


@pytest.mark.parametrize("kind", ["traced", "exported"])
def test_inputs_are_named_by_their_paths_as_keystr_writes_them(kind: str) -> None:
    program = KINDS[kind]()
    leaves = jax.tree_util.tree_leaves_with_path((STATE, BATCH))
    assert [t.path for t in program.inputs] == [jax.tree_util.keystr(p) for p, _ in leaves]
    assert program.inputs[1] == Tensor("[0]['w']", (8, 4), "f32")
    assert [t.path for t in program.outputs] == ["[0]['step']", "[0]['w']", "[1]"]


def test_inputs_of_stablehlo_are_numbered() -> None:
    program = KINDS["text"]()
    assert [t.path for t in program.inputs] == ["arg0", "arg1", "arg2"]
    assert [t.path for t in program.outputs] == ["result0", "result1", "result2"]


def test_fingerprint_is_that_of_the_operations_alone() -> None:
    same = {KINDS[kind]().fingerprint for kind in ("traced", "text", "bytecode")}
    assert len(same) == 1
    other = Program.trace(
        functools.partial(lambda state, batch: step(state, batch * 2)), STATE, BATCH
    )
    assert other.fingerprint not in same


def test_unused_arguments_are_kept() -> None:
    program = Program.trace(lambda used, unused: used * 2, BATCH, STATE)
    assert [t.path for t in program.inputs] == ["[0]", "[1]['step']", "[1]['w']"]


def test_arguments_that_an_export_dropped_are_left_out() -> None:
    fn = jax.jit(lambda unused, used: used * 2)
    data = export.export(fn, platforms=["tpu"])(BATCH, STATE["w"]).serialize()
    assert [t.path for t in Program.from_exported(bytes(data)).inputs] == ["[1]"]


DONORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "argnums given": (step, {"donate_argnums": (0,)}),
    "one number": (step, {"donate_argnums": 0}),
    "jitted with argnums": (jax.jit(step, donate_argnums=0), {}),
    "jitted with argnames": (jax.jit(step, donate_argnames="state"), {}),
    "both": (jax.jit(step, donate_argnums=0), {"donate_argnums": (0,)}),
}


@pytest.mark.parametrize("how", DONORS)
def test_donation_is_respected_whoever_asks_for_it(how: str) -> None:
    fn, options = DONORS[how]
    program = Program.trace(fn, STATE, BATCH, **options)
    assert program.donate_argnums == (0,)
    assert program.aliases == {0: 0, 1: 1}


def test_donation_without_a_result_of_its_shape_aliases_nothing() -> None:
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        program = Program.trace(lambda x: x.sum(), BATCH, donate_argnums=(0,))
    assert program.aliases == {}


def test_plan_of_a_jitted_donating_step_donates_when_it_runs() -> None:
    plan = sw.plan(jax.jit(step, donate_argnums=0), STATE, BATCH, topology="v5e:2x4")
    state = {"w": jnp.ones((8, 4)), "step": jnp.zeros((), jnp.int32)}
    # The plan of the jitted function is a plan of the function too.
    planned = plan.compile(step, state, jnp.ones((16, 8), jnp.bfloat16))
    donated = {i for i, leaf in enumerate(jax.tree.leaves(planned.args_info)) if leaf.donated}
    assert donated == {0, 1}


MODULE = "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {{ {} }}"
NEGATE = "%0 = stablehlo.negate %a : tensor<4xf32>\nreturn %0 : tensor<4xf32>"
DYNAMIC = """func.func @main(%a: tensor<4xf32>, %n: tensor<1xi32>) -> tensor<f32> {
  %0 = stablehlo.dynamic_reshape %a, %n : (tensor<4xf32>, tensor<1xi32>) -> tensor<?xf32>
  %c = stablehlo.constant dense<0.0> : tensor<f32>
  %1 = stablehlo.reduce(%0 init: %c) applies stablehlo.add across dimensions = [0]
    : (tensor<?xf32>, tensor<f32>) -> tensor<f32>
  return %1 : tensor<f32>
}"""
CALL = "%0 = func.call @g(%a) : (tensor<4xf32>) -> tensor<4xf32>\nreturn %0 : tensor<4xf32>"


def function(name: str, body: str) -> str:
    return MODULE.replace("@main", f"@{name}").format(body)


def symbolic() -> bytes:
    (n,) = export.symbolic_shape("n")
    batch = jax.ShapeDtypeStruct((n, 8), jnp.bfloat16)
    return bytes(export.export(jax.jit(step), platforms=["tpu"])(STATE, batch).serialize())


def call_back(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda value: value, x, x)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "function that raises": (
        lambda: Program.trace(lambda x: x @ x, BATCH),
        "<lambda>: the function does not trace .* TypeError: dot_general requires",
    ),
    "static argument": (
        lambda: Program.trace(lambda x, mode: x, BATCH, "relu"),
        "does not trace .* bind static arguments with functools.partial",
    ),
    "no function": (lambda: Program.trace(3, BATCH), "does not trace .* callable"),  # type: ignore[arg-type]
    "argument beyond counting": (
        lambda: Program.trace(lambda x: x * 2, jax.ShapeDtypeStruct((1 << 62, 4), F32)),
        r"argument \[0\] has 7.38e\+19 bytes, more than",
    ),
    "intermediate beyond counting": (
        lambda: Program.trace(
            lambda x: (x[:, None] * x).sum(), jax.ShapeDtypeStruct((1 << 30,), F32)
        ),
        r"the tensor<1073741824x1073741824xf32> that .* makes has 4.61e\+18 bytes",
    ),
    "callback": (
        lambda: Program.trace(call_back, BATCH),
        "calls back to Python.*Leave out callbacks that return something",
    ),
    "truncated export": (
        lambda: Program.from_exported(exported()[:500]),
        "not a jax.export artifact",
    ),
    "empty export": (lambda: Program.from_exported(b""), "not a jax.export artifact"),
    "foreign export": (
        lambda: Program.from_exported(b"PK\x03\x04" + bytes(100)),
        "not a jax.export artifact",
    ),
    "export for two platforms": (
        lambda: Program.from_exported(exported(platforms=["tpu", "cpu"])),
        "exported for tpu, cpu. Export it for one platform",
    ),
    "export with symbolic shapes": (
        lambda: Program.from_exported(symbolic()),
        "symbolic shapes.*Export it with concrete shapes",
    ),
    "text of something else": (
        lambda: Program.from_stablehlo("HloModule jit_f"),
        "not a StableHLO module that parses",
    ),
    "binary of something else": (
        lambda: Program.from_stablehlo(b"\xff\xfe\x00\x01"),
        "neither MLIR bytecode nor text",
    ),
    "truncated bytecode": (
        lambda: Program.from_stablehlo(bytecode()[:200]),
        "not a StableHLO module that parses",
    ),
    "no main": (lambda: Program.from_stablehlo(function("f", NEGATE)), "no function called main"),
    "nothing": (lambda: Program.from_stablehlo(""), "no function called main"),
    "main without a body": (
        lambda: Program.from_stablehlo("func.func private @main(tensor<4xf32>)"),
        "main has 0 blocks",
    ),
    "call of a function without a body": (
        lambda: Program.from_stablehlo(
            "func.func private @g(tensor<4xf32>) -> tensor<4xf32>\n" + function("main", CALL)
        ),
        "g has 0 blocks",
    ),
    "recursion": (
        lambda: Program.from_stablehlo(function("g", CALL) + function("main", CALL)),
        "call each other in a circle",
    ),
    "jumps": (
        lambda: Program.from_stablehlo(
            function("main", "cf.br ^after\n^after:\nreturn %a : tensor<4xf32>")
        ),
        "main has 2 blocks",
    ),
    "dynamic shape outside": (
        lambda: Program.from_stablehlo(function("main", NEGATE).replace("4x", "?x")),
        r"tensor<\?xf32>.*known shape",
    ),
    "dynamic shape inside": (
        lambda: Program.from_stablehlo(DYNAMIC),
        r"dynamic_reshape makes a tensor<\?xf32>.*known shape",
    ),
    "argument that is no tensor": (
        lambda: Program.from_stablehlo("func.func @main(%a: f32) -> f32 { return %a : f32 }"),
        "arg0 has type f32",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_one_line_that_says_what_and_what_to_do(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(sw.InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_functions_called_twice_are_inlined_twice() -> None:
    double = jax.jit(lambda x: x * 2)
    program = Program.trace(lambda x: double(double(x)), BATCH)
    with program.module() as module:
        names = [op.operation.name for op in module.body.operations]
        main = str(module)
    assert names == ["func.func"]
    assert main.count("stablehlo.multiply") == 2
