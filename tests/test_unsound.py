"""Convolutions that the compiler partitions wrongly are never planned; the others are right."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.planner.graph_reader import build_graph
from shardwright.planner.nodes import build_nodes
from shardwright.planner.pricing import node_strategies
from shardwright.planner.program import Program

AXES = {"x": 2, "y": 4}
IMAGE, KERNEL = (4, 16, 8, 16), (3, 3, 16, 8)
INPUTS, OUTPUTS = "b h w i", "b h w o"


def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def normal(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


def sharding(on: dict[str, str], dims: str) -> NamedSharding:
    """Mesh axes on the dimensions that they are assigned to; kernel windows stay whole."""
    entries = [tuple(a for a in AXES if on.get(a) == dim) or None for dim in dims.split()]
    return NamedSharding(mesh(), P(*entries))


def sharded_convolution(on: dict[str, str]) -> tuple[Any, Any]:
    """What XLA computes with everything sharded as told, and on one device."""
    image, kernel = normal(IMAGE), normal(KERNEL, 1)
    ins = sharding(on, INPUTS), sharding(on, "kh kw i o")
    compiled = jax.jit(convolve, in_shardings=ins, out_shardings=sharding(on, OUTPUTS))
    return compiled(image, kernel), convolve(image, kernel)


def planned_assignments() -> list[dict[str, str]]:
    """Every strategy of a convolution, as the dimension that each axis shards."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (IMAGE, KERNEL)]
    nodes = build_nodes(build_graph(Program.trace(convolve, *args)))
    (op,) = [op for op in nodes.graph.ops if op.name == "stablehlo.convolution"]
    assert op.rule is not None
    node = nodes.node_of_op[op.id]
    factors = nodes.nodes[node].ops[op.id]
    names: dict[int, str] = {}
    pairs = [(op.rule.results[0], OUTPUTS), (op.rule.operands[0], INPUTS)]
    for mapping, dims in pairs:
        for dim, name in zip(mapping, dims.split(), strict=True):
            names.update({factors[f]: name for f in dim})
    rows = node_strategies(nodes, tuple(AXES.values()), {})[node]
    return [
        {axis: names[f] for axis, f in zip(AXES, row, strict=True) if f >= 0}
        for row in rows.tolist()
    ]


@pytest.mark.parametrize("on", [{"x": "h", "y": "o"}, {"x": "w", "y": "o"}], ids=str)
def test_rows_and_output_features_together_are_computed_wrongly(on: dict[str, str]) -> None:
    # When this fails, the compiler has been mended and `unsound` has done its duty.
    ours, right = sharded_convolution(on)
    np.testing.assert_allclose(ours, AXES["y"] * right, rtol=1e-3, atol=1e-3)


def test_such_strategies_are_never_planned() -> None:
    planned = planned_assignments()
    for on in planned:
        if "h" in on.values() or "w" in on.values():
            assert len(on) == 2 and "o" not in on.values()
    assert {"x": "b", "y": "o"} in planned
    assert {"x": "b", "y": "h"} in planned
    assert {"x": "i", "y": "w"} in planned


@pytest.mark.parametrize("on", planned_assignments(), ids=str)
def test_every_planned_strategy_is_computed_rightly(on: dict[str, str]) -> None:
    ours, right = sharded_convolution(on)
    np.testing.assert_allclose(ours, right, rtol=1e-3, atol=1e-3)


def test_gradient_of_the_kernel_counts_each_idle_device() -> None:
    image, cotangent = normal(IMAGE), normal((4, 16, 8, 8), 2)
    rows = sharding({"x": "h"}, INPUTS)

    def gradient(image: jax.Array, cotangent: jax.Array) -> jax.Array:
        (found,) = jax.vjp(lambda k: convolve(image, k), normal(KERNEL, 1))[1](cotangent)
        return found

    ours = jax.jit(gradient, in_shardings=(rows, rows), out_shardings=NamedSharding(mesh(), P()))
    right = gradient(image, cotangent)
    assert not np.allclose(ours(image, cotangent), right, rtol=1e-3, atol=1e-2)
