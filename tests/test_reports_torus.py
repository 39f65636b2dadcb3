"""The picture of the torus: groups are those of the device mesh, links are those of the torus."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray

from shardwright.hardware_profiles.mesh import (
    LogicalMesh,
    meshes_for_shape,
    order_devices,
    physical_dimensions,
)
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.reports.torus import AxisGroups, axis_groups, describe_axis, lay_out, members
from shardwright.reports.torus_svg import torus_data, torus_svg


@dataclass(frozen=True)
class Device:
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int


def devices_of(mesh: LogicalMesh) -> NDArray[np.object_]:
    """All devices of a slice, arranged by the function that arranges real ones."""
    on = mesh.slice
    shape = (*on.shape, 1)[:3]
    cores = on.chip.jax_devices_per_chip.value
    every = [
        Device((x, y, z), core, index)
        for index in range(on.count)
        for x in range(shape[0])
        for y in range(shape[1])
        for z in range(shape[2])
        for core in range(cores)
    ]
    return order_devices(mesh, every)


def place(device: Device, mesh: LogicalMesh) -> tuple[int, ...]:
    known = {"slice": device.slice_index, "core": device.core_on_chip}
    known |= dict(zip("xyz", device.coords, strict=True))
    return tuple(known[dimension.name] for dimension in physical_dimensions(mesh.slice))


CASES = [
    ("v5e:16x16", {"data": 16, "model": 16}),
    ("v5e:16x16", {"data": 64, "model": 4}),
    ("v5e:4x8", {"a": 2, "b": 4, "c": 4}),
    ("v5p:4x4x8", {"data": 16, "model": 8}),
    ("2*v5e:4x4", {"slices": 2, "data": 4, "model": 4}),
    ("tpu7x:2x2x4", {"data": 16, "model": 2}),
]


def mesh_of(topology: str, shape: dict[str, int]) -> LogicalMesh:
    return meshes_for_shape(parse_slice(topology), shape)[0]


@pytest.mark.parametrize(("topology", "shape"), CASES)
def test_groups_are_the_rows_of_the_device_mesh(topology: str, shape: dict[str, int]) -> None:
    mesh = mesh_of(topology, shape)
    devices = devices_of(mesh)
    for number, (name, size) in enumerate(shape.items()):
        groups = axis_groups(mesh, name)
        rows = np.moveaxis(devices, number, -1).reshape(-1, size)
        expected = [[place(device, mesh) for device in row] for row in rows]
        assert groups.count == len(expected) == prod(shape.values()) // size
        assert [members(groups, group) for group in range(groups.count)] == expected


@pytest.mark.parametrize(("topology", "shape"), CASES)
def test_groups_up_to_eight_have_a_colour_each_and_neighbours_differ(
    topology: str, shape: dict[str, int]
) -> None:
    mesh = mesh_of(topology, shape)
    for name in shape:
        groups = axis_groups(mesh, name)
        colour_of = dict(zip(groups.group.ravel(), groups.colour.ravel(), strict=True))
        if groups.count <= 8:
            assert len(set(colour_of.values())) == groups.count
        assert all(colour_of[g] != colour_of[g + 1] for g in range(min(groups.count, 4) - 1))


@pytest.mark.parametrize(
    ("topology", "shape", "axis", "words"),
    [
        ("v5e:16x16", {"data": 16, "model": 16}, "data", "ring of 16 along x"),
        ("v5e:4x4", {"data": 4, "model": 4}, "data", "line of 4 along x"),
        ("v5p:4x4x8", {"data": 16, "model": 8}, "model", "ring of 8 along z"),
        ("2*v5e:4x4", {"slices": 2, "data": 16}, "slices", "2 slices over the data-centre network"),
        ("tpu7x:2x2x4", {"data": 16, "model": 2}, "model", "the 2 devices of a chip"),
    ],
)
def test_axes_are_told_in_words(
    topology: str, shape: dict[str, int], axis: str, words: str
) -> None:
    assert describe_axis(axis_groups(mesh_of(topology, shape), axis)) == words


def squares(svg: str) -> int:
    layers = re.findall(r'<path class="c\d" d="([^"]*)"', svg)
    return sum(layer.count("z") for layer in layers)


@pytest.mark.parametrize(("topology", "shape"), [*CASES, ("v5p:16x16x24", {"a": 256, "b": 24})])
def test_every_device_is_drawn_once(topology: str, shape: dict[str, int]) -> None:
    mesh = mesh_of(topology, shape)
    for axis in shape:
        assert squares(torus_svg(mesh, axis)) == mesh.slice.devices


def stubs_and_links(svg: str, css_class: str) -> int:
    found = re.search(rf'<path class="{css_class}"[^>]*? d="([^"]*)"', svg)
    return found[1].count("M") if found else 0


def test_a_ring_has_a_link_more_than_a_line_drawn_as_a_stub_at_each_end() -> None:
    ring = torus_svg(mesh_of("v5e:16x16", {"data": 16, "model": 16}), "data")
    line = torus_svg(mesh_of("v5e:4x4", {"data": 4, "model": 4}), "data")
    assert stubs_and_links(ring, "used") == 16 * (15 + 2)
    assert stubs_and_links(line, "used") == 4 * 3
    assert stubs_and_links(ring, "links") == 2 * 16 * (15 + 2)
    assert stubs_and_links(line, "links") == 2 * 4 * 3


def outlined(svg: str) -> int:
    found = re.search(r'<path class="picked"[^>]*? d="([^"]*)"', svg)
    assert found
    return found[1].count("z")


def test_one_group_is_outlined() -> None:
    mesh = mesh_of("v5p:4x4x8", {"data": 16, "model": 8})
    assert outlined(torus_svg(mesh, "data")) == 16
    assert outlined(torus_svg(mesh, "model")) == 8


def test_large_slices_stay_within_a_page_and_chips_within_sight() -> None:
    layout = lay_out(mesh_of("v5p:16x16x24", {"a": 256, "b": 24}))
    assert layout.width <= 1100
    assert layout.cell >= 7
    assert len(layout.panels) == 16
    assert layout.left_out == 0


def test_slices_too_many_to_draw_are_counted() -> None:
    layout = lay_out(mesh_of("64*v5e:16x16", {"slices": 64, "data": 256}))
    assert len(layout.panels) + layout.left_out == 64
    assert layout.left_out > 0


def group_by_script(data: dict[str, list[list[object]]], groups: AxisGroups) -> NDArray[np.int64]:
    """The position along each axis as the page's script reckons it from the segments."""
    names = [name for name, _ in data["dimensions"]]
    axis = next(one for one in data["axes"] if one["name"] == groups.axis.name)  # type: ignore[call-overload]
    positions = np.zeros(groups.group.shape, dtype=np.int64)
    for at in np.ndindex(groups.group.shape):
        index = 0
        for dimension, parts, stride in axis["segments"]:  # type: ignore[call-overload]
            index = index * parts + at[names.index(dimension)] // stride % parts
        positions[at] = index
    return positions


@pytest.mark.parametrize(("topology", "shape"), CASES)
def test_the_data_for_the_script_gives_the_same_positions(
    topology: str, shape: dict[str, int]
) -> None:
    mesh = mesh_of(topology, shape)
    for name in shape:
        groups = axis_groups(mesh, name)
        assert (group_by_script(torus_data(mesh), groups) == groups.position).all()
