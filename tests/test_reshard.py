"""Changes of sharding: the collectives are those of Shardy, the prices those of the torus."""

import re
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from jax._src.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir, passmanager

from shardwright.cost_models.collectives import collective_seconds
from shardwright.hardware_profiles.mesh import LogicalMesh, meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner import reshard_answers
from shardwright.planner.reshard import ReshardCosts
from shardwright.planner.reshard_patterns import Changes
from shardwright.planner.strategies import encode

MESHES = {
    "2x2": ("v5e:2x2", {"x": 2, "y": 2}),
    "2x4": ("v5e:2x4", {"x": 2, "y": 4}),
    "4x2": ("v5e:2x4", {"x": 4, "y": 2}),
    "8": ("v5e:2x4", {"x": 8}),
    "2x2x2": ("v5p:2x2x2", {"x": 2, "y": 2, "z": 2}),
}
SHAPES = [(16,), (16, 24), (16, 16, 8), (6, 16), (4, 2, 8), (2, 2, 2), (12, 5)]
"""Even ones, and ones with dimensions that hold only some of the axes or not evenly."""

Sharding = tuple[tuple[str, ...], ...]


def mesh_of(name: str) -> LogicalMesh:
    topology, shape = MESHES[name]
    return meshes_for_shape(parse_slice(topology), shape)[0]


def shardings(shape: tuple[int, ...], axes: dict[str, int]) -> list[Sharding]:
    """Every sharding with axes in mesh order that leaves each shard an element."""
    found = []
    for dims in product(range(-1, len(shape)), repeat=len(axes)):
        on = tuple(
            tuple(a for a, d in zip(axes, dims, strict=True) if d == dim)
            for dim in range(len(shape))
        )
        if all(prod(axes[a] for a in o) <= s for o, s in zip(on, shape, strict=True)):
            found.append(on)
    return found


def code_of(sharding: Sharding, axes: dict[str, int]) -> int:
    names = list(axes)
    return encode([[names.index(a) for a in dim] for dim in sharding], len(axes))


def ask_shardy(
    shape: tuple[int, ...], axes: dict[str, int], pairs: list[tuple[Sharding, Sharding]]
) -> list[list[tuple[str, str, int]]]:
    """Kind, axes and parts of the told array for each collective of each pair, from the text."""
    tensor = f"tensor<{''.join(f'{n}x' for n in shape)}f32>"
    mesh = ", ".join(f'"{name}"={size}' for name, size in axes.items())
    text = [f"sdy.mesh @mesh = <[{mesh}]>"]
    for i, (before, after) in enumerate(pairs):
        start, end = (
            "<@mesh, [" + ", ".join("{" + ", ".join(f'"{a}"' for a in d) + "}" for d in s) + "]>"
            for s in (before, after)
        )
        text.append(
            f"func.func @f{i}(%a: {tensor} {{sdy.sharding = #sdy.sharding{start}}}) -> {tensor}"
            f" {{\n%0 = sdy.reshard %a {end} : {tensor}\nreturn %0 : {tensor}\n}}"
        )
    with make_ir_context():
        module = ir.Module.parse("\n".join(text))
        pipeline = "builtin.module(func.func(sdy-reshard-to-collectives))"
        passmanager.PassManager.parse(pipeline).run(module.operation)
        _, *functions = str(module).split("func.func @f")
    return [
        _read(function.splitlines()[1:], before, axes)
        for function, (before, _) in zip(functions, pairs, strict=True)
    ]


def _read(lines: list[str], start: Sharding, axes: dict[str, int]) -> list[tuple[str, str, int]]:
    found = []
    parts = prod(axes[a] for dim in start for a in dim)
    for line in lines:
        if "out_sharding=" not in line:
            continue
        kind, rest = re.search(r"sdy\.(\w+) (.*?)%", line).groups()  # type: ignore[union-attr]
        out = line[line.index("out_sharding=") :].split("[", 1)[1].split("]", 1)[0]
        after = prod(
            int(size) if size else axes[name]
            for name, size in re.findall(r'"(\w+)"(?::\(\d+\)(\d+))?', out)
        )
        moved = re.sub(r"[^\w,:()]", "", ",".join(re.findall(r'"\w+"(?::\(\d+\)\d+)?', rest)))
        if kind == "all_gather":
            found += _dimension_by_dimension(rest, parts, axes)
        else:
            told = after if kind == "all_slice" else parts
            found.append((kind, "" if kind == "collective_permute" else moved, told))
        parts = after
    return found


def _dimension_by_dimension(
    gathered: str, parts: int, axes: dict[str, int]
) -> list[tuple[str, str, int]]:
    """The all-gathers that one of several dimensions is made of, that over fewest devices first."""
    dims = []
    for dim in re.findall(r"\{([^{}]+)\}", gathered):
        refs = re.findall(r'"(\w+)"(?::\(\d+\)(\d+))?', dim)
        devices = prod(int(size) if size else axes[name] for name, size in refs)
        dims.append((devices, re.sub(r'[" ]', "", dim)))
    found = []
    for devices, moved in sorted(dims, key=lambda d: d[0]):
        parts //= devices
        found.append(("all_gather", moved, parts))
    return found


def steps_of(costs: ReshardCosts, shape: tuple[int, ...], before: int, after: int) -> Any:
    return [
        (
            step.kind,
            ""
            if step.kind == "collective_permute"
            else ",".join(
                a.name if a.size is None else f"{a.name}:({a.pre_size}){a.size}" for a in step.axes
            ),
            step.divisor,
        )
        for step in costs.steps_between(shape, before, after)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_pair_changes_with_the_collectives_of_shardy(
    mesh: str, shape: tuple[int, ...]
) -> None:
    axes = MESHES[mesh][1]
    costs = ReshardCosts(mesh_of(mesh))
    every = shardings(shape, axes)
    pairs = [(before, after) for before in every for after in every if before != after]
    expected = ask_shardy(shape, axes, pairs)
    codes = np.array([code_of(sharding, axes) for sharding in every])
    costs.ask([(shape, codes, codes)])
    wrong = [
        (before, after, steps, ours)
        for (before, after), steps in zip(pairs, expected, strict=True)
        if (ours := steps_of(costs, shape, code_of(before, axes), code_of(after, axes))) != steps
    ]
    assert not wrong, wrong[:3]


NBYTES = 64e6
MESH = mesh_of("2x4")
AXES = MESHES["2x4"][1]
ROWS, COLUMNS = (("x",), ()), ((), ("x",))
WHOLE, BOTH = ((), ()), (("x",), ("y",))


def seconds(before: Sharding, after: Sharding, shape: tuple[int, ...] = (64, 64)) -> Any:
    """All-gather seconds and the rest."""
    start, end = np.array([code_of(before, AXES)]), np.array([code_of(after, AXES)])
    gathers, rest = ReshardCosts(MESH).seconds(shape, NBYTES, start, end)
    return gathers[0, 0], rest[0, 0]


@pytest.mark.parametrize("sizes", [(8, 2, 4), (6, 4, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("size", [2**20, 12])
def test_axes_that_share_no_dimension_change_alike_in_any_order(
    sizes: tuple[int, ...], size: int
) -> None:
    """What is asked of a mesh with its axes in order of size is what Shardy says of this one."""
    axes, ranks = len(sizes), range(1, 3)
    for rank in ranks:
        rows = []
        for digits in product(range(-1, rank), repeat=2 * axes):
            used = {d for d in digits if d >= 0}
            alone = all(digits[k::2].count(d) <= 1 for k in (0, 1) for d in used)
            moved = all(max(digits[2 * a : 2 * a + 2]) >= 0 for a in range(axes))
            if alone and moved and len(used) == rank:
                rows.append(digits)
        if not rows:
            continue
        dims = (size,) * rank
        asked = reshard_answers.ask_shardy(sizes, [(dims, digits) for digits in rows])
        ours = Changes(sizes)
        padded = [(*dims, *(0,) * (2 * axes - rank), *digits) for digits in rows]
        numbers = ours._number(np.array(padded, dtype=np.int64))
        for answer, number in zip(asked, numbers.tolist(), strict=True):
            steps = tuple(ours.steps[i] for i in ours.step_rows()[number].tolist() if i >= 0)
            assert [(s.kind, set(s.axes), s.divisor) for s in steps] == [
                (s.kind, set(s.axes), s.divisor) for s in answer.steps
            ]


def test_keeping_a_sharding_costs_nothing() -> None:
    every = np.arange(9)
    gathers, rest = ReshardCosts(MESH).seconds((64, 64), NBYTES, every, every)
    assert not np.diagonal(gathers).any() and not np.diagonal(rest).any()


def test_slicing_costs_nothing() -> None:
    assert seconds(WHOLE, BOTH) == (0, 0)


def test_gathering_costs_an_all_gather_of_the_whole() -> None:
    assert seconds(ROWS, WHOLE) == (collective_seconds("all_gather", NBYTES, ["x"], MESH), 0)


def test_gathering_one_of_two_axes_leaves_the_other_cut() -> None:
    gathered = NBYTES / 4
    expected = collective_seconds("all_gather", gathered, ["x"], MESH)
    assert seconds(BOTH, ((), ("y",))) == (expected, 0)


def test_moving_an_axis_costs_an_all_to_all_of_the_local_array() -> None:
    expected = collective_seconds("all_to_all", NBYTES / 2, ["x"], MESH)
    assert seconds(ROWS, COLUMNS) == (0, expected)


def test_some_change_of_a_small_dimension_costs_more_than_of_a_large_one() -> None:
    # 2 rows cannot hold both axes on the way, so that another exchange is needed.
    small = seconds((("x",), ()), ((), ("x", "y")), shape=(2, 64))
    large = seconds((("x",), ()), ((), ("x", "y")), shape=(64, 64))
    assert sum(small) > sum(large)


def partial(mask: int, before: Sharding, after: Sharding, shape: tuple[int, ...] = (64, 64)) -> Any:
    start, end = np.array([code_of(before, AXES)]), np.array([code_of(after, AXES)])
    return ReshardCosts(MESH).partial_seconds(shape, NBYTES, np.array([mask]), start, end)[0, 0]


X, Y = 0b01, 0b10


def test_partial_sums_that_stay_whole_are_all_reduced() -> None:
    expected = collective_seconds("all_reduce", NBYTES, ["x"], MESH)
    assert partial(X, WHOLE, WHOLE) == expected


def test_partial_sums_that_are_cut_over_the_same_axis_are_reduce_scattered() -> None:
    expected = collective_seconds("reduce_scatter", NBYTES, ["x"], MESH)
    assert partial(X, WHOLE, ROWS) == expected
    assert partial(X, WHOLE, COLUMNS) == expected


def test_scatter_of_shards_that_no_ring_halves_is_an_all_reduce() -> None:
    start, end = np.array([code_of(WHOLE, AXES)]), np.array([code_of(COLUMNS, AXES)])
    for width, element_bytes, kind in (
        (256, 2, "reduce_scatter"),
        (128, 4, "reduce_scatter"),
        (64, 2, "reduce_scatter"),
        (128, 2, "all_reduce"),
        (384, 2, "all_reduce"),
    ):
        shape = (64, width * AXES["x"])
        nbytes = float(element_bytes * prod(shape))
        priced = ReshardCosts(MESH).partial_seconds(shape, nbytes, np.array([X]), start, end)[0, 0]
        assert priced == collective_seconds(kind, nbytes, ["x"], MESH)


def test_partial_sums_that_are_cut_over_another_axis_are_all_reduced() -> None:
    expected = collective_seconds("all_reduce", NBYTES, ["x"], MESH)
    assert partial(X, WHOLE, ((), ("y",))) == expected


def test_partial_sums_are_reduced_in_shards_where_the_rest_is_cut() -> None:
    expected = collective_seconds("all_reduce", NBYTES / 2, ["y"], MESH)
    assert partial(Y, ROWS, ROWS) == expected


def test_cut_over_a_part_of_the_axis_is_no_reduce_scatter() -> None:
    # From x on the rows to y on the rows: Shardy slices over half of y only, then permutes.
    assert any("y:(" in moved for _, moved, _ in steps_of(
        ReshardCosts(MESH), (64,), code_of((("x",),), AXES), code_of((("y",),), AXES)
    ))  # fmt: skip
    expected = collective_seconds("all_reduce", NBYTES / 2, ["y"], MESH)
    assert partial(Y, (("x",),), (("y",),), shape=(64,)) == expected


def test_axes_that_shard_nothing_do_not_change_the_collectives() -> None:
    # Answers are shared between meshes on this ground: asked of Shardy with the idle axis there.
    axes = {"x": 2, "y": 4, "z": 4}
    costs = ReshardCosts(meshes_for_shape(parse_slice("v5p:2x4x4"), axes)[0])
    every = shardings((16, 24), {"x": 2, "y": 4})
    pairs = [(before, after) for before in every for after in every if before != after]
    codes = np.array([code_of(sharding, axes) for sharding in every])
    costs.ask([((16, 24), codes, codes)])
    for (before, after), steps in zip(pairs, ask_shardy((16, 24), axes, pairs), strict=True):
        assert steps_of(costs, (16, 24), code_of(before, axes), code_of(after, axes)) == steps
