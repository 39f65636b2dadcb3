"""Programs with `shard_map` regions of their own: planned around, one device's numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardwright as sw

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def mesh_of(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def normal(*shape: int) -> np.ndarray:
    return np.asarray(jax.random.normal(jax.random.key(sum(shape)), shape))


OWN = mesh_of(x=2, y=4)
X, W, LAYERS = normal(16, 32), normal(32, 32), normal(3, 32, 32)


def local(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh(a @ b)


def region(a: jax.Array, b: jax.Array, mesh: Mesh = OWN) -> jax.Array:
    specs = {"in_specs": (P("x"), P(None, "y")), "out_specs": P("x", "y")}
    return jax.shard_map(local, mesh=mesh, **specs)(a, b)


def manual_over_x(body: Callable[..., Any]) -> Callable[..., Any]:
    """A region that is manual over x, and leaves y to the partitioner."""
    return jax.shard_map(body, mesh=OWN, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})


def in_scan(x: jax.Array, layers: jax.Array) -> jax.Array:
    return lax.scan(lambda c, w: (region(c, w), None), x, layers)[0]


def in_remat_in_scan(x: jax.Array, layers: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda c, w: region(c, w) * 2)

    def loss(layers: jax.Array) -> jax.Array:
        return lax.scan(lambda c, w: (layer(c, w), None), x, layers)[0].sum()

    return jax.grad(loss)(layers)


def constrained_inside(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.with_sharding_constraint(jnp.tanh(a @ b), P(None, "y"))


def nested(a: jax.Array, b: jax.Array) -> jax.Array:
    inner = jax.shard_map(
        lambda a, b: a @ b, in_specs=(P(), P(None, "y")), out_specs=P(None, "y"), axis_names={"y"}
    )
    return jnp.tanh(inner(a, b))


def several(x: jax.Array, w: jax.Array) -> jax.Array:
    exchange = jax.shard_map(
        lambda a: lax.all_to_all(a, "y", 0, 1, tiled=True), mesh=OWN, in_specs=P("x", "y"),
        out_specs=P(("x", "y")),
    )  # fmt: skip
    return exchange(region(x, w)) @ w


def ring(x: jax.Array, w: jax.Array) -> jax.Array:
    def body(a: jax.Array) -> jax.Array:
        n = lax.axis_size("y")
        to_next = [(i, (i + 1) % n) for i in range(n)]
        step = lambda c, _: (lax.ppermute(c, "y", to_next) + a, None)  # noqa: E731
        return lax.scan(step, a, None, length=3)[0]

    return jax.shard_map(body, mesh=OWN, in_specs=P("x", "y"), out_specs=P("x", "y"))(x) @ w


def kernel(a: jax.Array, b: jax.Array) -> jax.Array:
    def multiply(a: Any, b: Any, out: Any) -> None:
        out[...] = a[...] @ b[...]

    def call(a: jax.Array, b: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
        return pl.pallas_call(multiply, out_shape=shape, interpret=True)(a, b)

    specs = {"in_specs": (P("x"), P(None, "y")), "out_specs": P("x", "y")}
    return jax.shard_map(call, mesh=OWN, check_vma=False, **specs)(a, b) * 2


PROGRAMS: dict[str, Program] = {
    "in a scan": (in_scan, (X, LAYERS)),
    "in remat in a scan, with its gradient": (in_remat_in_scan, (X, LAYERS)),
    "in a branch": (
        lambda p, x, w: lax.cond(p, region, local, x, w), (np.array(True), X, W),
    ),
    "in a counted loop": (
        lambda x, w: lax.fori_loop(0, 3, lambda _, c: region(c, w) * 0.5, x), (X, W),
    ),
    "under vmap": (jax.vmap(region, in_axes=(0, None)), (normal(4, 16, 32), W)),
    "partly manual": (manual_over_x(local), (X, W)),
    "partly manual, with a constraint inside": (manual_over_x(constrained_inside), (X, W)),
    "a region in a region": (manual_over_x(nested), (X, W)),
    "two regions of one mesh": (several, (X, W)),
    "a ring of permutes": (ring, (X, W)),
    "around a kernel": (kernel, (X, W)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_regions_is_planned_around_them_and_runs(name: str) -> None:
    fn, args = PROGRAMS[name]
    expected = jax.jit(fn)(*args)
    plan = sw.plan(fn, *args, topology="v5e:2x4", time_limit_s=1)
    assert plan.mesh_axes == {"x": 2, "y": 4}
    np.testing.assert_allclose(plan.jit(fn)(*args), expected, rtol=1e-4, atol=5e-4)


def test_a_region_of_fewer_devices_than_the_slice_is_refused() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return region(x, w, mesh_of(x=2, y=2))

    with pytest.raises(sw.InputError, match=r"own shardings are for the mesh .* of 4 devices"):
        sw.plan(fn, X, W, topology="v5e:2x4")
