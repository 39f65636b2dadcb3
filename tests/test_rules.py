"""Sharding rules of operations that Shardy has none for."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardwright as sw
from shardwright.hardware_profiles.mesh import AxisRef
from shardwright.planner import rules
from shardwright.planner.graph import Op
from shardwright.planner.graph_reader import build_graph
from shardwright.planner.hand_made import evaluate
from shardwright.planner.partitioning import partition
from shardwright.planner.program import Program
from shardwright.planner.rules import Rule

MATRIX = jax.ShapeDtypeStruct((16, 32), jnp.float32)


def op_of(program: Program, name: str) -> Op:
    (op,) = [op for op in build_graph(program).ops if op.name == name]
    return op


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "chlo.erf_inv": lax.erf_inv,
    "chlo.lgamma": lax.lgamma,
    "chlo.digamma": lax.digamma,
    "chlo.asin": lax.asin,
    "chlo.next_after": lambda x: lax.nextafter(x, x + 1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_chlo_function_shards_like_any_elementwise_one(name: str) -> None:
    rule = op_of(Program.trace(ELEMENTWISE[name], MATRIX), name).rule
    assert rule is not None
    assert rule.sizes == (16, 32)
    assert {*rule.operands, *rule.results} == {((0,), (1,))}
    assert rule.passes_through


def test_top_k_shards_the_batch_and_keeps_the_rest_whole() -> None:
    rule = op_of(Program.trace(lambda x: lax.top_k(x, 4), MATRIX), "chlo.top_k").rule
    assert rule is not None
    assert rule.operands == (((0,), (1,)),)
    assert rule.results == (((0,), (2,)),) * 2
    assert (rule.sizes, rule.replicated) == ((16, 32, 4), {1, 2})


def shardings_of(fn: Callable[..., Any]) -> Any:
    """What Shardy makes of a function whose first rows are sharded over four devices."""
    program = Program.trace(fn, MATRIX)
    graph = build_graph(program)
    rows = ((AxisRef("x"),), ())
    done = partition(program, graph, {"x": 4}, in_shardings=[rows])
    return rows, done


@pytest.mark.parametrize(
    "fn", [lambda x: lax.erf_inv(x) * 2, lambda x: lax.top_k(x, 4)[0] * 2], ids=["erf_inv", "top_k"]
)
def test_shardy_carries_a_sharding_through_by_our_rule(fn: Callable[..., Any]) -> None:
    rows, done = shardings_of(fn)
    assert done.outputs == (rows,)
    assert done.communications == ()


@pytest.fixture
def registered() -> Iterator[Callable[[str, rules.RuleMaker], None]]:
    before = dict(rules._REGISTERED)
    yield sw.register_rule
    rules._REGISTERED.clear()
    rules._REGISTERED.update(before)


CUSTOM_CALL = """func.func @main(%x: tensor<16x32xf32>) -> tensor<16x32xf32> {
  %0 = stablehlo.custom_call @my_kernel(%x) : (tensor<16x32xf32>) -> tensor<16x32xf32>
  return %0 : tensor<16x32xf32>
}"""


def test_custom_call_has_no_rule_unless_one_is_registered(
    registered: Callable[[str, rules.RuleMaker], None],
) -> None:
    program = Program.from_stablehlo(CUSTOM_CALL)
    assert op_of(program, "custom_call:my_kernel").rule is None
    rule = Rule((16, 32), (((0,), (1,)),), (((0,), (1,)),), replicated=frozenset({1}))
    registered("custom_call:my_kernel", lambda op: rule)
    assert op_of(program, "custom_call:my_kernel").rule == rule


def test_registered_rule_spares_a_gather(
    registered: Callable[[str, rules.RuleMaker], None],
) -> None:
    def kinds() -> set[str]:
        estimate = evaluate(
            Program.from_stablehlo(CUSTOM_CALL), topology="v5e:2x2", mesh={"x": 4},
            in_specs=[jax.P("x")], out_specs=[jax.P("x")],
        )  # fmt: skip
        return {c.kind for c in estimate.collectives}

    assert kinds() == {"all_gather"}
    registered("custom_call:my_kernel", lambda op: Rule((16, 32), (((0,), (1,)),), (((0,), (1,)),)))
    assert kinds() == set()


def test_operations_without_a_rule_are_told_with_the_plan() -> None:
    plan = sw.plan(Program.from_stablehlo(CUSTOM_CALL), topology="v5e:2x2", mesh={"x": 4})
    (told,) = plan.data.replicated_ops
    assert told.startswith("custom_call:my_kernel at ")
