"""Shifts along a sharded dimension: one collective-permute of what crosses between shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.graph_reader import build_graph
from shardwright.planner.program import Program

Function = Callable[[jax.Array], jax.Array]
BUFFER = jax.ShapeDtypeStruct((8, 4096, 8192), jnp.bfloat16)
ROW = 4096 * 8192 * 2


def pad(low: int, high: int, interior: int = 0) -> Function:
    ends = [(low, high, interior), (0, 0, 0), (0, 0, 0)]
    return lambda x: lax.pad(x, jnp.zeros((), x.dtype), ends)


def turn(cut: int, axis: int = 0, other: float | None = None) -> Function:
    def turned(x: jax.Array) -> jax.Array:
        end = lax.slice_in_dim(x, cut, x.shape[axis], axis=axis)
        start = lax.slice_in_dim(x if other is None else x * other, 0, cut, axis=axis)
        return lax.concatenate([end, start], axis)

    return turned


SHIFTS: dict[str, tuple[Function, dict[str, list[dict[int, int]]]]] = {
    "to the next": (pad(1, -1), {"pad": [{0: 1}]}),
    "two back": (pad(-2, 2), {"pad": [{0: 2}]}),
    "the last becomes the first": (turn(7), {"concatenate": [{0: 1}], "slice": [{0: 0}] * 2}),
    "the first becomes the last": (turn(1), {"concatenate": [{0: 1}], "slice": [{0: 0}] * 2}),
    "along rows": (turn(4090, 1), {"concatenate": [{1: 6}], "slice": [{1: 0}] * 2}),
    "jnp.roll": (lambda x: jnp.roll(x, 3, 0), {"concatenate": [{0: 3}], "slice": [{0: 0}] * 2}),
}


@pytest.mark.parametrize("case", SHIFTS)
def test_what_crosses_from_shard_to_shard(case: str) -> None:
    fn, expected = SHIFTS[case]
    found: dict[str, list[Any]] = {}
    for op in build_graph(Program.trace(fn, BUFFER)).ops:
        if "shift" in op.detail:
            found.setdefault(op.name.removeprefix("stablehlo."), []).append(op.detail["shift"])
    assert found == expected


OTHERS: dict[str, Function] = {
    "a pad that grows": pad(1, 0),
    "a pad between elements": pad(1, -8, 1),
    "parts in their order": lambda x: lax.concatenate([x[:3], x[3:]], 0),
    "parts of two tensors": turn(3, other=2.0),
    "parts with a gap": lambda x: lax.concatenate([x[4:], x[:3]], 0),
}


@pytest.mark.parametrize("case", OTHERS)
def test_nothing_else_is_a_shift(case: str) -> None:
    graph = build_graph(Program.trace(OTHERS[case], BUFFER))
    assert not any("shift" in op.detail for op in graph.ops)


@pytest.mark.parametrize("shift", [pad(1, -1), turn(7)], ids=["pad", "turn"])
def test_a_shift_over_a_mesh_axis_is_priced_as_one_collective_permute(shift: Function) -> None:
    estimate = sw.evaluate(
        lambda x: shift(x * 2) + 1,
        BUFFER,
        topology="v5e:4x4",
        mesh={"stage": 4, "data": 4},
        in_specs=(P("stage", "data"),),
        out_specs=P("stage", "data"),
    )
    (permute,) = estimate.collectives
    assert (permute.kind, permute.axes) == ("collective_permute", ["stage"])
    # Each device holds two rows and sends one, of which "data" cuts the second dimension, over a
    # link of 45 GB/s.
    assert permute.nbytes == ROW / 4
    assert permute.seconds == pytest.approx(permute.nbytes / 45e9, rel=0.05)


def test_no_shift_is_paid_for_where_the_dimension_is_whole() -> None:
    estimate = sw.evaluate(
        pad(1, -1), BUFFER, topology="v5e:2x2", mesh={"data": 4}, in_specs=(P(None, "data"),),
        out_specs=P(None, "data"),
    )  # fmt: skip
    assert estimate.collectives == []


def test_a_shift_between_slices_is_priced_over_the_data_centre_network() -> None:
    estimate = sw.evaluate(
        pad(1, -1), BUFFER, topology="2*v5e:1x1", mesh={"stage": 2},
        in_specs=(P("stage"),), out_specs=P("stage"),
    )  # fmt: skip
    (permute,) = estimate.collectives
    assert permute.nbytes == ROW
    across = parse_slice("2*v5e:1x1").chip.device_dcn_bandwidth
    assert permute.seconds == pytest.approx(permute.nbytes / across, rel=0.05)
