"""The time of a scheduled program, by hand: cycles, collectives, and what runs beside what."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.cost_models.collectives import collective_seconds
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh, meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.compiled_schedule import CompiledTime, compiled_time, group_refs
from shardwright.planner.hlo import parse_hlo

MEBI = 1 << 20
ARRAY = f"f32[{8 * MEBI}]"
"""32 MiB."""
START = "(f32[1], u32[]) fusion(%p), kind=kCustom, calls=%begin"


@pytest.fixture
def mesh() -> LogicalMesh:
    return meshes_for_shape(parse_slice("v5e:2x4"), {"x": 2, "y": 4})[0]


def kernel(name: str, cycles: int, operand: str = "p") -> str:
    return (
        f"  %{name} = {ARRAY} fusion(%{operand}), kind=kLoop, calls=%inner, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}'
    )


def time_of(mesh: LogicalMesh, entry: list[str], *others: str) -> CompiledTime:
    head = [f"%inner (q: f32[1]) -> {ARRAY} {{", f"  ROOT %n = {ARRAY} negate(%q)", "}"]
    body = [f"ENTRY %main (p: {ARRAY}) -> {ARRAY} {{", f"  %p = {ARRAY} parameter(0)"]
    lines = ["HloModule m, is_scheduled=true", *head, *others, *body, *entry, "}"]
    return compiled_time(parse_hlo("\n".join(lines)), mesh)


def gathered(mesh: LogicalMesh) -> float:
    return collective_seconds("all_gather", 32 * MEBI, ["y"], mesh)


def beginning(groups: str = "{{0,1,2,3},{4,5,6,7}}") -> str:
    return "\n".join(
        [
            "%begin (q: f32[1]) -> f32[1] {",
            f"  %g = {ARRAY} all-gather(%q), channel_id=1, replica_groups={groups}",
            "  ROOT %c = (f32[1], u32[]) custom-call(%g), custom_call_target="
            '"AsyncCollectiveStart"',
            "}",
        ]
    )


def begun_and_done(cycles: int) -> list[str]:
    return [
        f"  %async-collective-start = {START}",
        "  %part = f32[1] get-tuple-element(%async-collective-start), index=0",
        kernel("k", cycles),
        f"  %async-collective-done = {ARRAY} fusion(%part), kind=kCustom, calls=%inner",
        f"  ROOT %r = {ARRAY} copy(%async-collective-done)",
    ]


def test_kernels_take_their_cycles_and_what_is_not_asynchronous_is_exposed(
    mesh: LogicalMesh,
) -> None:
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    found = time_of(
        mesh,
        [
            kernel("a", 3000),
            f"  %s = {ARRAY} all-reduce(%a), channel_id=1, {groups}, to_apply=%inner",
            kernel("b", 1000, "s"),
        ],
    )
    clock = mesh.slice.chip.clock_hz.value
    reduced = collective_seconds("all_reduce", 32 * MEBI, ["y"], mesh)
    assert found.compute_s == pytest.approx(4000 / clock)
    assert found.exposed_s == pytest.approx(reduced)
    assert found.step_s == pytest.approx(4000 / clock + reduced)


def test_what_runs_beside_a_kernel_is_hidden_as_far_as_the_kernel_lasts(mesh: LogicalMesh) -> None:
    clock, seconds = mesh.slice.chip.clock_hz.value, gathered(mesh)
    for part in (0.25, 4.0):
        cycles = round(part * seconds * clock)
        found = time_of(mesh, begun_and_done(cycles), beginning())
        assert found.collective_s == pytest.approx(seconds)
        assert found.exposed_s == pytest.approx(max(0.0, seconds - cycles / clock), abs=1e-9)


def test_collectives_on_the_same_links_wait_for_each_other(mesh: LogicalMesh) -> None:
    both = begun_and_done(1000)
    both.insert(1, f"  %async-collective-start.1 = {START}.1")
    both.insert(
        5, f"  %async-collective-done.1 = {ARRAY} fusion(%async-collective-start.1), kind=k"
    )
    same = beginning().replace("%begin", "%begin.1")
    other = beginning("{{0,4},{1,5},{2,6},{3,7}}").replace("%begin", "%begin.1")
    short = collective_seconds("all_gather", 32 * MEBI, ["x"], mesh)
    assert time_of(mesh, both, beginning(), same).step_s == pytest.approx(2 * gathered(mesh))
    apart = time_of(mesh, both, beginning(), other).step_s
    assert apart == pytest.approx(max(short, gathered(mesh)))


def test_a_loop_takes_its_body_times_its_trips(mesh: LogicalMesh) -> None:
    body = "\n".join([f"%body (q: {ARRAY}) -> {ARRAY} {{", kernel("k", 500, "q"), "}"])
    loop = (
        f"  %w = {ARRAY} while(%p), condition=%inner, body=%body, "
        'backend_config={"known_trip_count":{"n":"12"}}'
    )
    found = time_of(mesh, [loop, kernel("after", 100)], body)
    assert found.step_s == pytest.approx(6100 / mesh.slice.chip.clock_hz.value)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], (AxisRef("y"),)),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], (AxisRef("x"),)),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], (AxisRef("y", 2, 2),)),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], (AxisRef("y", 1, 2),)),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], (AxisRef("x"), AxisRef("y", 2, 2))),
        ([[0, 3], [1, 2], [4, 7], [5, 6]], (AxisRef("y"),)),
    ],
)
def test_groups_of_devices_are_axes_and_parts_of_axes(
    mesh: LogicalMesh, groups: list[list[int]], axes: tuple[AxisRef, ...]
) -> None:
    assert group_refs(np.array(groups), mesh) == axes
