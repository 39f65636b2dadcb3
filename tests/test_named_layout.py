"""Named layouts: one name, the same mesh axes everywhere; the rules, and what they cost."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.export_rules import logical_rules
from shardwright.planner.logical_names import logical_names_of
from shardwright.planner.named_layout import named_layout, tie_names
from shardwright.planner.prepared import prepare
from shardwright.planner.problem import ShardingProblem
from shardwright.planner.solver import solve

MESH = {"data": 2, "model": 4}
MEMORY = 3.5e6
AXES = {
    "[0]['w1']": ("embed", "mlp"),
    "[0]['w2']": ("mlp", "embed"),
    "[0]['table']": ("vocab", "embed"),
    "[1]": ("batch", None),
}
PARAMS = {
    "w1": jax.ShapeDtypeStruct((256, 1024), jnp.float32),
    "w2": jax.ShapeDtypeStruct((1024, 256), jnp.float32),
    "table": jax.ShapeDtypeStruct((512, 256), jnp.float32),
}
TOKENS = jax.ShapeDtypeStruct((64, 16), jnp.int32)


def step(params: dict[str, jax.Array], tokens: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(p: dict[str, jax.Array]) -> jax.Array:
        x = p["table"][tokens]
        return jnp.square(jax.nn.relu(x @ p["w1"]) @ p["w2"]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def planned(**asked: Any) -> sw.Plan:
    return sw.plan(
        step, PARAMS, TOKENS, topology="v5e:2x4", donate_argnums=0, time_limit_s=3,
        **{"mesh": MESH, "layout": "named", "logical_axes": AXES, **asked},
    )  # fmt: skip


@pytest.fixture(scope="module")
def named() -> sw.Plan:
    # Little memory, so that weights are cut.
    return planned(memory_fraction=MEMORY / 17.2e9)


def test_a_name_is_sharded_over_the_same_axes_in_every_argument_and_result(named: sw.Plan) -> None:
    rules = named.layout_rules
    assert set(rules) == {"embed", "mlp", "vocab", "batch"} and any(rules.values())
    program = named.data.program
    for tensor in (*program.inputs, *program.outputs):
        for name, axes in zip(AXES.get(tensor.path, ()), tensor.spec, strict=False):
            assert name is None or tuple(axes) == rules[name]


def test_the_plan_tells_what_the_rule_costs_against_the_free_plan(named: sw.Plan) -> None:
    free = planned(memory_fraction=MEMORY / 17.2e9, layout="free", logical_axes=None)
    assert named.data.layout is not None
    assert named.data.layout.free_step_time_s == pytest.approx(free.estimate.step_time_s, rel=0.01)
    assert named.estimate.step_time_s >= named.data.layout.free_step_time_s


def test_exported_rules_say_all_of_a_named_plan(named: sw.Plan) -> None:
    assert named.data.layout is not None
    names = {path: tuple(of) for path, of in named.data.layout.names.items()}
    for deviation in logical_rules(named.data, names).deviations:
        # Dimensions without a name are free, and told where they are cut.
        of = zip(names[deviation.path], deviation.ruled, deviation.planned, strict=True)
        assert all(name is None or ruled == planned for name, ruled, planned in of)


def test_no_map_of_names_to_axes_is_better_than_the_one_that_is_chosen() -> None:
    """Brute force over every map to sets of axes, arguments fixed to what it says."""
    program = sw.Program.trace(step, PARAMS, TOKENS, donate_argnums=0)
    prepared = prepare(program)
    (mesh, *_) = meshes_for_shape(parse_slice("v5e:2x4"), {"all": 8})
    layout, nodes = named_layout(program, AXES), prepared.nodes

    def best(problem: ShardingProblem) -> float:
        return solve(problem.weighed(0.3, MEMORY), time_limit_s=20, gap=1e-6).cost

    costs = []
    for chosen in itertools.product([False, True], repeat=len(layout.names)):
        cut = dict(zip(layout.names, chosen, strict=True)) | {None: False}
        fixed = {}
        for value, node, names in zip(
            nodes.graph.arguments, nodes.argument_nodes, layout.inputs, strict=True
        ):
            dims = zip(nodes.whole_dims(value), names or (), strict=True)
            factors = [factor for (factor,), name in dims if cut[name]]
            fixed[node] = factors or [-1]
        if all(len(factors) == 1 for factors in fixed.values()):
            given = {node: (frozenset(factors),) for node, factors in fixed.items()}
            costs.append(best(prepared.problem(mesh, given)))
    assert np.isfinite(min(costs)) and max(costs) > 1.01 * min(costs)
    assert best(tie_names(prepared.problem(mesh, {}), layout)) == pytest.approx(
        min(costs), rel=1e-3
    )


def test_a_planned_step_computes_the_numbers_of_one_device(named: sw.Plan) -> None:
    rng = np.random.default_rng(0)
    params = {k: rng.standard_normal(v.shape).astype(np.float32) * 0.05 for k, v in PARAMS.items()}
    tokens = rng.integers(0, 512, TOKENS.shape).astype(np.int32)
    expected, value = jax.jit(step)(params, tokens)
    ours, same = named.jit(step)(params, tokens)
    np.testing.assert_allclose(same, value, rtol=1e-5)
    for key, array in expected.items():
        np.testing.assert_allclose(ours[key], array, rtol=1e-4, atol=1e-6)


def test_names_are_read_from_flax_boxes_in_arguments() -> None:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    layer = nn.Dense(8, kernel_init=init)
    state = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 4)))
    assert logical_names_of([state]) == {"[0]['params']['kernel'].value": ("embed", "mlp")}


def test_names_are_read_from_the_metadata_of_nnx_variables() -> None:
    from flax import nnx

    kernel = nnx.Param(jnp.ones((4, 8)), out_sharding=("embed", "mlp"), eager_sharding=False)
    state = nnx.State({"kernel": kernel, "bias": nnx.Param(jnp.ones(8))})
    (names,) = logical_names_of([state]).values()
    assert names == ("embed", "mlp")


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        (None, "the arguments carry none"),
        ({"[0]['w1']": ("embed",)}, "1 names for 2 dimensions"),
        ({"[0]['w9']": ("embed", "mlp")}, r"no path matches \[0\]\['w9'\]"),
    ],
)
def test_names_that_do_not_suit_are_told(axes: Any, reason: str) -> None:
    with pytest.raises(sw.InputError, match=reason):
        planned(logical_axes=axes)


def test_a_free_plan_has_no_layout_rules() -> None:
    plan = sw.plan(jnp.sin, TOKENS, topology="v5e:2x4")
    with pytest.raises(sw.InputError, match='Plan with layout="named"'):
        _ = plan.layout_rules
