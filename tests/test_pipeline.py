"""`sw.pipeline`: the numbers and gradients of a plain loop over layers, in stages."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.errors import InputError

SHAPES = [
    # stages, microbatches, repeats, layers, batch
    pytest.param(4, 6, 1, 8, 12, id="two layers a stage"),
    pytest.param(3, 2, 1, 3, 6, id="fewer microbatches than stages"),
    pytest.param(1, 3, 1, 5, 3, id="one stage"),
    pytest.param(2, 4, 3, 6, 4, id="three repeats"),
    pytest.param(3, 6, 2, 12, 18, id="two repeats of two layers"),
]


def make(layers: int, batch: int, width: int = 5, seed: int = 0) -> tuple[Any, Any]:
    """Parameters and a batch as nested containers, one entry of which takes no gradient."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    params = {"w": normal(layers, width, width), "norm": [normal(layers, width)]}
    return params, {"h": normal(batch, width), "count": jnp.arange(batch)}


def layer(params: Any, x: Any) -> Any:
    # A norm without epsilon: not a number, and neither are its gradients, where its input is 0.
    h = x["h"] / jnp.linalg.norm(x["h"], axis=-1, keepdims=True)
    h = x["h"] + jnp.tanh(h @ params["w"]) * params["norm"][0]
    return {"h": h, "count": x["count"] + 1}


def plain(apply: Callable[..., Any], params: Any, x: Any) -> Any:
    return lax.scan(lambda x, one: (apply(one, x), None), x, params)[0]


def value_and_gradients(run: Callable[[Any, Any], Any], params: Any, x: Any) -> Any:
    def loss(params: Any, h: jax.Array) -> Any:
        out = run(params, x | {"h": h})
        return jnp.sum(jnp.sin(out["h"])), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x["h"])


def assert_close(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), ours, theirs)


@pytest.mark.parametrize(("stages", "microbatches", "repeats", "layers", "batch"), SHAPES)
def test_values_and_gradients_equal_a_plain_loop(
    stages: int, microbatches: int, repeats: int, layers: int, batch: int
) -> None:
    remat = layers > 5
    params, x = make(layers, batch)

    def run(params: Any, x: Any) -> Any:
        return sw.pipeline(
            layer, params, x, stages=stages, microbatches=microbatches, repeats=repeats, remat=remat
        )

    ours = value_and_gradients(run, params, x)
    theirs = value_and_gradients(lambda params, x: plain(layer, params, x), params, x)
    assert_close(ours, theirs)


@pytest.mark.parametrize(("stages", "microbatches", "repeats", "layers", "batch"), SHAPES)
def test_what_layers_return_besides_is_told_by_layer_and_microbatch(
    stages: int, microbatches: int, repeats: int, layers: int, batch: int
) -> None:
    params, x = make(layers, batch)
    x["h"] = jnp.ones((batch, 5))

    def noted(one: Any, x: Any) -> Any:
        made = layer(one, x)
        return made, {"width": one["norm"][0], "examples": x["count"]}

    @jax.jit
    def run(params: Any, x: Any) -> Any:
        return sw.pipeline(
            noted, params, x, stages=stages, microbatches=microbatches, repeats=repeats,
            has_aux=True,
        )  # fmt: skip

    _, aux = run(params, x)
    # Layer i finds that i layers have counted; microbatch m is every m-th example.
    examples = np.arange(batch).reshape(-1, microbatches).T
    for i in range(layers):
        np.testing.assert_array_equal(aux["examples"][i], examples + i)
        for m in range(microbatches):
            np.testing.assert_array_equal(aux["width"][i, m], params["norm"][0][i])


@pytest.mark.parametrize("repeats", [1, 2])
def test_every_layer_and_microbatch_has_a_key_of_its_own(repeats: int) -> None:
    params, x = make(layers=8, batch=8)
    key = jax.random.key(7)

    def dropout(one: Any, x: Any, key: jax.Array) -> Any:
        kept = jax.random.bernoulli(key, 0.5, x["h"].shape)
        return layer(one, x) | {"h": jnp.where(kept, layer(one, x)["h"], x["h"])}

    @jax.jit
    def run(params: Any, x: Any) -> Any:
        return sw.pipeline(dropout, params, x, stages=2, microbatches=4, repeats=repeats, key=key)

    @jax.jit
    def expected(params: Any, part: Any, m: jax.Array) -> Any:
        keyed = lambda one, x: dropout(one["params"], x, one["key"])  # noqa: E731
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), m))(jnp.arange(8))
        return plain(keyed, {"params": params, "key": keys}, part)

    out = run(params, x)
    for m in range(4):
        ours, part = (jax.tree.map(lambda leaf, m=m: leaf[m::4], tree) for tree in (out, x))
        assert_close(ours, expected(params, part, jnp.asarray(m)))


def test_copies_of_the_weights_add_up_their_gradients_once() -> None:
    params, x = make(layers=4, batch=24)

    def run(params: Any, x: Any) -> Any:
        return sw.pipeline(
            layer, params, x, stages=2, microbatches=4, replicas=3, remat=True, has_aux=False
        )

    theirs = value_and_gradients(lambda params, x: plain(layer, params, x), params, x)
    assert_close(value_and_gradients(run, params, x), theirs)

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "data"))

    def loss(params: Any, x: Any) -> jax.Array:
        out = sw.pipeline(
            layer, params, x, stages=2, microbatches=2, replicas=4, stage_axis="stage"
        )
        return jnp.sum(out["h"])

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x))
    with jax.set_mesh(mesh):
        text = (
            jax.jit(
                jax.grad(loss),
                in_shardings=(NamedSharding(mesh, P("stage")), NamedSharding(mesh, P("data"))),
            )
            .lower(*shapes)
            .compile()
            .as_text()
        )
    sums = [line for line in text.splitlines() if " all-reduce(" in line]
    assert sums and not any("while/body" in line for line in sums)


def test_a_policy_says_what_remat_keeps() -> None:
    params, x = make(layers=4, batch=4)

    def saved(remat: Any) -> int:
        def loss(params: Any) -> jax.Array:
            out = sw.pipeline(layer, params, x, stages=2, microbatches=2, remat=remat)
            return jnp.sum(out["h"])

        _, backward = jax.eval_shape(lambda params: jax.vjp(loss, params), params)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    nothing, dots, everything = (
        saved(True),
        saved(jax.checkpoint_policies.dots_saveable),
        saved(False),
    )
    assert nothing < dots < everything


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_step_of_sharded_stages_is_one_collective_permute_each_way(repeats: int) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "data"))
    params, x = make(layers=8, batch=16)
    weights = NamedSharding(mesh, P("stage") if repeats == 1 else P())
    params, x = jax.device_put(params, weights), jax.device_put(x, NamedSharding(mesh, P("data")))

    def loss(params: Any, x: Any) -> jax.Array:
        out = sw.pipeline(
            layer, params, x, stages=4, microbatches=4, repeats=repeats, stage_axis="stage"
        )
        return jnp.sum(out["h"])

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, allow_int=True)).lower(params, x).compile()
    # Devices are numbered along "data" first, so the next stage is two further on.
    last = [] if repeats == 1 else [(6, 0), (7, 1)]
    forward = {(d, d + 2) for d in range(6)} | set(last)
    backward = {(b, a) for a, b in forward}
    in_loop = [
        {(int(a), int(b)) for a, b in re.findall(r"\{(\d),(\d)\}", line)}
        for line in step.as_text().splitlines()
        if " collective-permute(" in line and "while/body" in line and " f32[" in line
    ]
    assert sorted(in_loop, key=sorted) == sorted([forward, backward], key=sorted)
    got, want = (jax.tree.map(np.asarray, grads) for grads in (
        step(params, x), jax.grad(lambda w: jnp.sum(plain(layer, w, x)["h"]))(params)
    ))  # fmt: skip
    assert_close(got, want)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_plan_combines_stages_with_data_and_tensor_axes(repeats: int) -> None:
    def block(one: Any, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ one["in"]) @ one["out"]

    def step(run: Callable[[Any, Any], Any], params: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda params: jnp.sum(jnp.sin(run(params, x))))(params)
        return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads)

    def staged(params: Any, x: jax.Array) -> Any:
        return sw.pipeline(
            block, params, x, stages=2, microbatches=4, repeats=repeats, remat=True,
            stage_axis="stage",
        )  # fmt: skip

    rng = np.random.default_rng(0)
    shapes = {"in": (4, 16, 32), "out": (4, 32, 16)}
    params = {k: jnp.asarray(rng.normal(0, 0.2, s), jnp.float32) for k, s in shapes.items()}
    x = jnp.asarray(rng.standard_normal((16, 16)), jnp.float32)
    pinned = {"[0]['in']": P("stage" if repeats == 1 else None, None, "model"), "[1]": P("data")}
    plan = sw.plan(
        partial(step, staged), params, x, topology="v5e:2x4", pinned=pinned, time_limit_s=3,
        mesh={"stage": 2, "data": 2, "model": 2},
    )  # fmt: skip
    if repeats == 1:
        permutes = [c for c in plan.estimate.collectives if c.kind == "collective_permute"]
        assert {(*c.axes, c.count) for c in permutes} == {("stage", 5)}
    ours = plan.jit(partial(step, staged))(params, x)
    assert_close(ours, jax.jit(partial(step, partial(plain, block)))(params, x))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"stages": 3}, "stages=3 does not divide the 8 layers"),
        ({"stages": 4, "repeats": 4}, "stages=4 x repeats=4 does not divide the 8 layers"),
        ({"microbatches": 5}, "microbatches=5 does not divide the batch of 12"),
        ({"microbatches": 3, "repeats": 2}, "microbatches=3 is not a multiple of stages=2"),
        ({"stages": 0}, "stages=0 is not a whole number above 0"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changed: dict[str, int], told: str) -> None:
    params, x = make(layers=8, batch=12)
    with pytest.raises(InputError, match=told):
        sw.pipeline(layer, params, x, **({"stages": 2, "microbatches": 4} | changed))


def test_a_stage_axis_that_no_mesh_has_is_refused() -> None:
    params, x = make(layers=8, batch=12)
    staged = partial(sw.pipeline, layer, stages=2, microbatches=4, stage_axis="zz")
    for mesh in (None, {"data": 4}):
        with pytest.raises(InputError, match=r"stage_axis='zz' cannot.*an axis zz"):
            sw.plan(staged, params, x, topology="v5e:2x2", mesh=mesh)


def test_arrays_that_disagree_and_layers_that_change_their_x_are_refused() -> None:
    params, x = make(layers=8, batch=12)
    with pytest.raises(InputError, match=r"x has leading dimensions of \[12, 13\]"):
        sw.pipeline(layer, params, x | {"count": jnp.arange(13)}, stages=2, microbatches=4)
    with pytest.raises(InputError, match="the layer is 3, and a function is wanted"):
        sw.pipeline(3, params, x, stages=2, microbatches=4)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="params has no arrays"):
        sw.pipeline(layer, {}, x, stages=2, microbatches=4)
    with pytest.raises(InputError, match=r"takes .*int32.* and returns .*float32"):
        sw.pipeline(
            lambda one, x: layer(one, x) | {"count": x["h"][:, 0]},
            params, x, stages=2, microbatches=4,
        )  # fmt: skip
