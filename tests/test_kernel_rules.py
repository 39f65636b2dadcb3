"""How kernels are told: the notation of rules, the ways to give costs, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import InputError
from shardwright.planner.graph import Op
from shardwright.planner.graph_reader import build_graph
from shardwright.planner.kernel_costs import evaluate_cost

ATTENTION = "b h t d, b h s d, b h s d -> b h t d"


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bhtd,bhsd->bhts", q, k))
    return jnp.einsum("bhts,bhsd->bhtd", weights, v)


def kernel_op(kernel: Any, *args: Any) -> Op:
    graph = build_graph(sw.Program.trace(kernel, *args))
    (op,) = [op for op in graph.ops if op.name.startswith("custom_call:")]
    return op


ARGS = (f32(2, 4, 128, 16), f32(2, 4, 256, 16), f32(2, 4, 256, 16))


def test_dimensions_of_one_name_are_one_factor() -> None:
    rule = kernel_op(sw.kernel(attend, rule=ATTENTION, flops=1.0), *ARGS).rule
    assert rule is not None
    b, h, t, d, s = range(5)
    assert rule.sizes == (2, 4, 128, 16, 256)
    assert rule.operands == (((b,), (h,), (t,), (d,)), *[((b,), (h,), (s,), (d,))] * 2)
    assert rule.results == (((b,), (h,), (t,), (d,)),)


def test_a_factor_that_the_result_lacks_stays_whole() -> None:
    rule = kernel_op(sw.kernel(attend, rule=ATTENTION, flops=1.0), *ARGS).rule
    assert rule is not None
    assert rule.replicated == {4}
    assert rule.reduction == set()


def test_a_factor_of_the_result_alone_stays_whole() -> None:
    wide = sw.kernel(lambda x: jnp.stack([x, x], 1), rule="n -> n two", flops=0.0)
    rule = kernel_op(wide, f32(8)).rule
    assert rule is not None
    assert rule.replicated == {1}


def test_a_factor_that_one_of_two_results_lacks_stays_whole() -> None:
    both = sw.kernel(lambda x: (x, x.sum(1)), rule="m n -> m n, m", flops=0.0)
    rule = kernel_op(both, f32(8, 4)).rule
    assert rule is not None
    assert rule.replicated == {1}


def test_whole_and_reduction_are_as_the_user_says() -> None:
    product = sw.kernel(
        jnp.matmul, rule="m k, k n -> m n", whole="n", reduction="k", flops="2 * m * k * n"
    )
    rule = kernel_op(product, f32(8, 16), f32(16, 4)).rule
    assert rule is not None
    assert (rule.replicated, rule.reduction) == ({2}, {1})


def test_a_dimension_of_two_factors() -> None:
    grouped = sw.kernel(
        lambda q, k: q * jnp.repeat(k, 3, 0), rule="(k g) d, k d -> (k g) d", flops=0.0
    )
    rule = kernel_op(grouped, f32(12, 8), f32(4, 8)).rule
    assert rule is not None
    assert rule.sizes == (4, 3, 8)
    assert rule.results == (((0, 1), (2,)),)


WRONG_RULES = {
    "b h t d": "no '->'",
    "a -> b -> c": "several '->'",
    "b h h -> b h": "has h twice",
    "b h+ -> b": r"'\+' .* is no dimension",
    "b (k g -> b": r"'\(' .* is no dimension",
    "b () -> b": r"'\(\)' .* is no dimension",
    "b max -> b": "max cannot name a factor",
}


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_rule_that_does_not_parse_is_refused(rule: str) -> None:
    with pytest.raises(InputError, match=rf"kernel mine: .*{WRONG_RULES[rule]}"):
        sw.kernel(attend, rule=rule, flops=1.0, name="mine")


WRONG_MARKS: dict[str, tuple[dict[str, str], str]] = {
    "whole": ({"whole": "d x"}, "whole= names x, .* Its factors are b, h, t, d, s"),
    "reduction": ({"reduction": "z"}, "reduction= names z"),
    "reduction in the result": ({"reduction": "h"}, "h is a reduction, but a result has it"),
    "both": ({"reduction": "s", "whole": "s"}, "s is a reduction, but it is to stay whole"),
}


@pytest.mark.parametrize("case", WRONG_MARKS)
def test_a_mark_on_a_wrong_factor_is_refused(case: str) -> None:
    marks, told = WRONG_MARKS[case]
    with pytest.raises(InputError, match=told):
        sw.kernel(attend, rule=ATTENTION, flops=1.0, **marks)  # type: ignore[arg-type]


WRONG_CALLS: dict[str, tuple[str, str]] = {
    "operands": ("b h t d, b h s d -> b h t d", "there are 3 operands and .* tells 2"),
    "results": (f"{ATTENTION}, b h t", "there are 1 results and .* tells 2"),
    "rank": ("b h t d, b h s d, b h s -> b h t d", r"operand 2 has shape \(2, 4, 256, 16\)"),
    "sizes": ("b h t d, b h t d, b h s d -> b h t d", "t is 128 in one dimension and 256"),
    "parts": ("(b c) h t d, b h s d, b h s d -> (x y) h t d", "x and y .* do not follow"),
    "remainder": ("b h (s t) d, b h s d, b h s d -> b h t d", "consists of 256 and 128"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_arrays_that_do_not_fit_the_rule_are_refused(case: str) -> None:
    rule, told = WRONG_CALLS[case]
    kernel = sw.kernel(attend, rule=rule, flops=1.0, name="mine")
    with pytest.raises(InputError, match=rf"kernel mine: .*{told}"):
        jax.eval_shape(kernel, *ARGS)


COSTS: dict[str, Any] = {
    "number": 4.0 * 2 * 4 * 128 * 256 * 16,
    "expression": "4 * b * h * t * s * d",
    "function": lambda q, k, v: 4 * q.size * k.shape[2],
}


@pytest.mark.parametrize("case", COSTS)
def test_costs_are_of_the_local_shapes_in_whatever_way_they_are_given(case: str) -> None:
    kernel = sw.kernel(attend, rule=ATTENTION, whole="d", flops=COSTS[case])
    info = kernel_op(kernel, *ARGS).detail["kernel"]
    assert info.needed_flops() == 4 * 2 * 4 * 128 * 256 * 16
    local = {"b": np.array([1, 2]), "h": np.array([2, 4]), "t": 64, "s": 256, "d": 16}
    assert evaluate_cost(info.flops, local).tolist() == [
        4 * 1 * 2 * 64 * 256 * 16,
        4 * 2 * 4 * 64 * 256 * 16,
    ]


def test_a_cost_function_knows_bytes_of_the_local_operands() -> None:
    kernel = sw.kernel(
        attend, rule=ATTENTION, flops=0.0,
        hbm_bytes=lambda q, k, v: 2 * q.nbytes + (k.nbytes + v.nbytes) * (q.shape[2] // 64),
    )  # fmt: skip
    info = kernel_op(kernel, *ARGS).detail["kernel"]
    queries, keys = 2 * 4 * 128 * 16 * 4, 2 * 4 * 256 * 16 * 4
    assert evaluate_cost(info.hbm_bytes, info.sizes) == 2 * queries + 2 * keys * 2


WRONG_COSTS: dict[str, tuple[Any, str]] = {
    "unknown factor": ("2 * b * x", "names 'x', which is not a factor .* b, h, t, d, s"),
    "syntax": ("2 * (b", "cannot be computed"),
    "code": ("__import__('os').getcwd()", "is not understood"),
    "attribute": ("b.real", "is not understood"),
    "power": ("9 ** 9 ** 9", "is not understood"),
    "division by zero": ("b / (h - 4)", "a finite number"),
    "negative": ("b - 100", "is -98"),
    "negative number": (-1.0, "is -1.0"),
    "no number": (lambda q, k, v: "much", "str is no number"),
    "comparison": (lambda q, k, v: max(q.size, 1), "does not compute with sizes alone"),
}


@pytest.mark.parametrize("case", WRONG_COSTS)
def test_a_cost_that_cannot_be_computed_is_refused(case: str) -> None:
    cost, told = WRONG_COSTS[case]
    kernel = sw.kernel(attend, rule=ATTENTION, flops=cost, name="mine")
    with pytest.raises(InputError, match=rf"kernel mine: .*{told}"):
        sw.Program.trace(kernel, *ARGS)


def test_efficiency_is_a_fraction() -> None:
    with pytest.raises(InputError, match=r"efficiency=1.5 is not a fraction"):
        sw.kernel(attend, rule=ATTENTION, flops=1.0, efficiency=1.5)


def test_check_finds_the_factor_that_needs_other_shards() -> None:
    arrays = [np.random.default_rng(i).standard_normal((2, 4, 8, 6)) for i in range(3)]
    right = sw.kernel(attend, rule=ATTENTION, whole="d", flops=1.0)
    right.check(*arrays)
    with pytest.raises(InputError, match="from part 0 of 2 along d, result 0 differs by up to"):
        sw.kernel(attend, rule=ATTENTION, flops=1.0).check(*arrays)


def test_check_adds_up_reductions() -> None:
    x, w = np.ones((4, 6)), np.ones((6, 8))
    rule = "m k, k n -> m n"
    sw.kernel(jnp.matmul, rule=rule, reduction="k", flops=1.0).check(x, w)
    with pytest.raises(InputError, match="along k, result 0 differs"):
        tanh = sw.kernel(lambda x, w: jnp.tanh(x @ w), rule=rule, reduction="k", flops=1.0)
        tanh.check(x, w)


def test_check_cuts_one_factor_of_a_dimension() -> None:
    rule = "(k g) d, k d -> (k g) d"
    q, k = np.random.default_rng(0).standard_normal((12, 3)), np.ones((4, 3))
    sw.kernel(lambda q, k: q * jnp.repeat(k, q.shape[0] // k.shape[0], 0), rule=rule, flops=0.0)\
        .check(q, k)  # fmt: skip
    with pytest.raises(InputError, match="along g, result 0"):
        sw.kernel(
            lambda q, k: q * jnp.tile(k, (q.shape[0] // k.shape[0], 1))
            * jnp.arange(q.shape[0])[:, None],
            rule=rule, whole="k", flops=0.0,
        ).check(q, k)  # fmt: skip
