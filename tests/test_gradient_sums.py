"""Sums of gradients over two dimensions of a torus: priced as the papers' algorithm, and chosen.

The algorithm, of Ying et al., Image Classification at Supercomputer Scale (2018), section 3.3, and
Kumar et al., Scale MLPerf-0.6 Models on Google TPU-v3 Pods (2019), section 2: reduce-scatter in
rings along one dimension, then of what is left along the other, then gathers back. Each half of the
gradients begins with another dimension, so that the links of both are always in use.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cost_models.collectives import collective_seconds
from shardwright.hardware_profiles import load_chip, meshes_for_shape, parse_slice
from shardwright.planner.plan_schema import EstimateModel

LINK = load_chip("v5e").ici_link_bandwidth.value
FIXED = load_chip("v5e").collective_overhead_s.value
GRADIENTS = 4 * 8192 * 8192


def ring_reduce_scatter(nbytes: float, size: int, link: float) -> float:
    """Each chip sends a share to its neighbour size - 1 times, half of it each way round."""
    return (size - 1) * nbytes / size / (2 * link)


def torus_sum(nbytes: float, width: int, height: int, link: float) -> float:
    """The two-dimensional algorithm; gathers take as long as what they undo."""
    half = nbytes / 2
    first = max(ring_reduce_scatter(half, size, link) for size in (width, height))
    second = max(
        ring_reduce_scatter(half / width, height, link),
        ring_reduce_scatter(half / height, width, link),
    )
    return 2 * (first + second)


def ring_sum(nbytes: float, size: int, link: float) -> float:
    """All chips in one ring."""
    return 2 * ring_reduce_scatter(nbytes, size, link)


@pytest.mark.parametrize(
    ("topology", "shape", "side", "sharers"),
    [
        ("v5e:16x16", {"data": 256}, 16, 1),
        ("v5e:16x16", {"rows": 16, "columns": 16}, 16, 1),
        # Both cores of a chip, each with gradients of its own, share the links.
        ("v3:32x32", {"data": 1024, "model": 2}, 32, 2),
    ],
)
def test_a_sum_over_both_dimensions_takes_what_the_papers_algorithm_takes(
    topology: str, shape: dict[str, int], side: int, sharers: int
) -> None:
    mesh = meshes_for_shape(parse_slice(topology), shape)[0]
    axes = [axis for axis in shape if axis != "model"]
    assert {part.dimension for part in mesh.segments(axes)} == {"x", "y"}
    chip = mesh.slice.chip
    link = chip.ici_link_bandwidth.value / sharers
    priced = collective_seconds("all_reduce", GRADIENTS, axes, mesh)
    moving = priced - chip.collective_overhead_s.value
    # On even rings the book's formula, which prices are of, also moves the last share of each.
    assert moving == pytest.approx(torus_sum(GRADIENTS, side, side, link), rel=1.1 / side**2)
    assert moving < 0.51 * ring_sum(GRADIENTS, side**2, link)


def step(weights: jax.Array, x: jax.Array) -> jax.Array:
    grads = jax.grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w))))(weights)
    return weights - 0.1 * grads


def test_a_data_parallel_plan_sums_gradients_over_both_dimensions_at_once() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, 8192), (131072, 8192))]
    mesh = {"rows": 16, "columns": 16}
    plan = sw.plan(
        step, *shapes, topology="v5e:16x16", mesh=mesh, donate_argnums=(0,), time_limit_s=3,
        pinned={"[0]": P(), "[1]": P(("rows", "columns")), "result": P()},
    )  # fmt: skip
    one = sw.evaluate(
        step, *shapes, topology="v5e:16x16", mesh=mesh, donate_argnums=(0,),
        in_specs=(P(), P("rows")),
    )  # fmt: skip

    def moving(estimate: EstimateModel, axes: list[str]) -> float:
        """Of an all-reduce, or of a reduce-scatter and an all-gather."""
        assert estimate.collectives
        assert all(sorted(c.axes) == axes for c in estimate.collectives)
        return sum(c.seconds - FIXED for c in estimate.collectives)

    planned, ring = moving(plan.estimate, ["columns", "rows"]), moving(one, ["rows"])
    assert planned == pytest.approx(torus_sum(GRADIENTS, 16, 16, LINK), rel=5e-3)
    assert ring == pytest.approx(ring_sum(GRADIENTS, 16, LINK), rel=1.1 / 16)
    assert planned < 0.54 * ring
