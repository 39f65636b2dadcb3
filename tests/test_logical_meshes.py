"""Logical meshes: which layouts there are, where their devices lie, how they are written."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import prod

import numpy as np
import pytest

from shardwright.errors import InputError
from shardwright.hardware_profiles import (
    AxisRef,
    LogicalMesh,
    MeshAxis,
    Segment,
    device_coordinates,
    enumerate_meshes,
    meshes_for_shape,
    order_devices,
    parse_chip,
    parse_slice,
    physical_dimensions,
)

TOPOLOGIES = [
    "v5e:1x1", "v5e:2x2", "v5e:4x8", "v5e:8x16", "v5e:16x16", "v5p:4x4x8", "v5p:4x8x12",
    "v4:2x2x1", "v3:4x4", "tpu7x:2x2x1", "2*v5e:4x4", "3*tpu7x:2x2x2",
]  # fmt: skip


def layouts(topology, **options):
    return [mesh.describe() for mesh in enumerate_meshes(parse_slice(topology), **options)]


def test_physical_dimensions_are_slice_torus_core():
    dimensions = physical_dimensions(parse_slice("2*tpu7x:4x4x8"))
    assert [(d.name, d.size, d.wraps) for d in dimensions] == [
        ("slice", 2, False), ("x", 4, True), ("y", 4, True), ("z", 8, True), ("core", 2, False),
    ]  # fmt: skip
    assert [d.name for d in physical_dimensions(parse_slice("v5e:8x16"))] == ["x", "y"]


def test_all_meshes_of_one_chip():
    assert layouts("v5e:1x1") == ["x=1"]


def test_all_meshes_of_a_square_of_four():
    # x and y are alike, so one of each.
    assert layouts("v5e:2x2") == ["x=2 on x, y=2 on y", "xy=4 on x, y"]


def test_all_meshes_of_a_rectangle_of_eight():
    assert layouts("v5e:2x4") == [
        "x=2 on x, y=4 on y",
        "xy=8 on x, y",
        "x_y_outer=4 on x, y (outer 2 of 4), y_inner=2 on y (inner 2 of 4)",
        "x_y_inner=4 on x, y (inner 2 of 4), y_outer=2 on y (outer 2 of 4)",
        "x=2 on x, y_outer=2 on y (outer 2 of 4), y_inner=2 on y (inner 2 of 4)",
    ]


def test_all_meshes_of_four_chips_with_two_devices_each():
    assert set(layouts("tpu7x:2x2x1")) == {
        "x=2 on x, y_core=4 on y, core",
        "xy=4 on x, y, core=2 on core",
        "xy_core=8 on x, y, core",
        "x=2 on x, y=2 on y, core=2 on core",
    }


def test_all_meshes_of_two_slices_of_four():
    assert set(layouts("2*v5e:2x2")) == {
        "slice_x=4 on slice, x, y=2 on y",
        "slice=2 on slice, xy=4 on x, y",
        "slice_xy=8 on slice, x, y",
        "slice=2 on slice, x=2 on x, y=2 on y",
    }


def test_whole_dimensions_come_first():
    assert layouts("v5p:4x8x8")[0] == "x=4 on x, y=8 on y, z=8 on z"
    assert layouts("v5e:16x16")[:2] == ["x=16 on x, y=16 on y", "xy=256 on x, y"]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_meshes_have_at_most_the_axes_asked_for(most):
    meshes = enumerate_meshes(parse_slice("v5p:4x4x8"), max_axes=most)
    assert max(len(mesh.axes) for mesh in meshes) == most


@pytest.mark.parametrize(
    ("topology", "least", "most"), [("v5e:16x16", 10, 60), ("v5p:8x16x16", 10, 64)]
)
def test_the_list_is_of_a_size_to_search(topology, least, most):
    assert least <= len(enumerate_meshes(parse_slice(topology), limit=10**6)) <= most


def test_the_limit_leaves_out_the_least_plausible():
    everything = layouts("2*v5e:16x16", limit=10**6)
    assert layouts("2*v5e:16x16", limit=20) == everything[:20]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_mesh_uses_each_device_exactly_once(topology):
    one = parse_slice(topology)
    extents = [dimension.size for dimension in physical_dimensions(one)]
    for mesh in enumerate_meshes(one):
        coordinates = device_coordinates(mesh)
        assert coordinates.shape == (*mesh.sizes, len(extents))
        places = Counter(map(tuple, coordinates.reshape(-1, len(extents))))
        assert len(places) == one.devices == prod(extents)
        assert max(places.values()) == 1
        assert (coordinates < extents).all()


def groupings(mesh, order):
    """For each axis the groups of devices along it, with torus dimensions exchanged by `order`."""
    coordinates = device_coordinates(mesh)[..., list(order)]
    places = np.ravel_multi_index(
        np.moveaxis(coordinates, -1, 0),
        tuple(coordinates.max(axis=tuple(range(len(mesh.axes)))) + 1),
    )
    return frozenset(
        frozenset(map(frozenset, np.moveaxis(places, axis, -1).reshape(-1, size).tolist()))
        for axis, size in enumerate(mesh.sizes)
    )


@pytest.mark.parametrize(
    ("topology", "alike"), [("v5e:4x8", 1), ("v5e:4x4", 2), ("v5p:4x4x4", 6), ("v5p:4x4x8", 2)]
)
def test_no_two_meshes_group_devices_alike_whatever_equal_dimensions_are_called(topology, alike):
    one = parse_slice(topology)
    orders = [
        order
        for order in permutations(range(len(one.shape)))
        if [one.shape[d] for d in order] == list(one.shape)
    ]
    assert len(orders) == alike
    meshes = enumerate_meshes(one, limit=10**6)
    seen = [{groupings(mesh, order) for order in orders} for mesh in meshes]
    assert all(first.isdisjoint(second) for first, second in combinations(seen, 2))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_mesh_is_read_back_from_json(topology):
    for mesh in enumerate_meshes(parse_slice(topology)):
        text = json.dumps(mesh.to_json())
        assert LogicalMesh.from_json(json.loads(text)) == mesh
        assert hash(LogicalMesh.from_json(json.loads(text))) == hash(mesh)


def test_a_mesh_on_a_profile_of_ones_own_is_read_back_with_it():
    profile = parse_slice("v5e:2x2").chip.model_dump(mode="json") | {"name": "mine"}
    mine = parse_chip(profile)
    mesh = enumerate_meshes(parse_slice("2x2", mine))[0]
    assert LogicalMesh.from_json(mesh.to_json(), mine) == mesh


@pytest.mark.parametrize(
    "data",
    [{}, {"slice": "v5e:2x2"}, {"slice": "v5e:2x2", "axes": [{"name": "x"}]},
     {"slice": "v5e:2x2",
      "axes": [{"name": "x", "segments": [{"dimension": "w", "size": 4, "stride": 1}]}]}],
)  # fmt: skip
def test_a_malformed_mesh_is_refused(data):
    with pytest.raises(InputError, match="malformed"):
        LogicalMesh.from_json(data)


def on_x(name, size, stride=1, extent=4):
    return MeshAxis(name, (Segment("x", size, stride, extent, False),))


ON_Y = MeshAxis("y", (Segment("y", 4, 1, 4, False),))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((ON_Y,), "dimension 'x'"),
        ((on_x("a", 4), on_x("b", 2), ON_Y), "dimension 'x'"),
        ((on_x("a", 2, stride=1), ON_Y), "dimension 'x'"),
        ((on_x("a", 2, stride=2), on_x("b", 2, stride=2), ON_Y), "dimension 'x'"),
        ((on_x("y", 4), ON_Y), "not distinct names"),
        ((on_x("two words", 4), ON_Y), "not distinct names"),
        ((on_x("größe", 4), ON_Y), "letters from A to Z"),
        ((on_x("a", 8, extent=8), ON_Y), "not on v5e:4x4"),
    ],
)
def test_axes_that_do_not_tile_the_slice_are_refused(axes, message):
    with pytest.raises(InputError, match=message):
        LogicalMesh(parse_slice("v5e:4x4"), axes)


def test_a_shape_of_ones_own_lies_on_whole_dimensions_first():
    meshes = meshes_for_shape(parse_slice("v5e:16x16"), {"data": 16, "model": 16})
    assert meshes[0].describe() == "data=16 on x, model=16 on y"
    assert meshes[0].shape == {"data": 16, "model": 16}


@pytest.mark.parametrize(
    ("topology", "shape", "best"),
    [
        ("v5e:8x16", {"data": 16, "model": 8}, "data=16 on y, model=8 on x"),
        ("v5e:16x16", {"d": 1, "m": 256}, "d=1, m=256 on x, y"),
        (
            "v5e:16x16",
            {"data": 64, "model": 4},
            "data=64 on x (outer 4 of 16), y, model=4 on x (inner 4 of 16)",
        ),
        ("2*v5e:16x16", {"data": 32, "model": 16}, "data=32 on slice, x, model=16 on y"),
        (
            "2*v5e:4x4",
            {"dcn": 2, "data": 4, "model": 4},
            "dcn=2 on slice, data=4 on x, model=4 on y",
        ),
        ("tpu7x:4x4x4", {"data": 64, "model": 2}, "data=64 on x, y, z, model=2 on core"),
    ],
)
def test_the_best_layout_of_a_shape(topology, shape, best):
    assert meshes_for_shape(parse_slice(topology), shape)[0].describe() == best


def test_all_layouts_of_a_shape_of_a_rectangle():
    # 4 = 2 on x times 2 on y, or all of y; the parts of y in either order.
    meshes = meshes_for_shape(parse_slice("v5e:2x4"), {"a": 4, "b": 2})
    assert {mesh.describe() for mesh in meshes} == {
        "a=4 on y, b=2 on x",
        "a=4 on x, y (outer 2 of 4), b=2 on y (inner 2 of 4)",
        "a=4 on x, y (inner 2 of 4), b=2 on y (outer 2 of 4)",
    }


@pytest.mark.parametrize(
    ("topology", "shape"),
    [("v5p:4x8x12", {"a": 6, "b": 8, "c": 8}), ("3*tpu7x:2x2x2", {"a": 24, "b": 2})],
)
def test_layouts_of_a_shape_use_each_device_once(topology, shape):
    one = parse_slice(topology)
    for mesh in meshes_for_shape(one, shape, limit=200):
        assert mesh.shape == shape
        places = device_coordinates(mesh).reshape(one.devices, -1)
        assert len(np.unique(places, axis=0)) == one.devices


def test_the_limit_leaves_out_the_worst_layouts():
    everything = meshes_for_shape(parse_slice("v5p:4x8x8"), {"a": 8, "b": 32}, limit=10**6)
    assert len(everything) > 7
    assert meshes_for_shape(parse_slice("v5p:4x8x8"), {"a": 8, "b": 32}, limit=7) == everything[:7]


def test_a_shape_of_the_wrong_product_is_refused_with_ones_that_fit():
    with pytest.raises(
        InputError, match=r"make 128 devices and v5e:16x16 has 256.*data=16, model=16 or data=8"
    ):
        meshes_for_shape(parse_slice("v5e:16x16"), {"data": 8, "model": 16})


@pytest.mark.parametrize("shape", [{}, {"data": 0, "model": 16}])
def test_a_shape_without_sizes_is_refused(shape):
    with pytest.raises(InputError, match="whose product is 256"):
        meshes_for_shape(parse_slice("v5e:16x16"), shape)


def test_an_axis_is_found_by_name_or_refused():
    mesh = enumerate_meshes(parse_slice("v5e:2x4"))[0]
    assert mesh.axis("y").size == 4
    with pytest.raises(InputError, match=r"no mesh axis 'model'.*x, y"):
        mesh.axis("model")


def test_a_sub_axis_is_the_matching_part_of_a_dimension():
    mesh = enumerate_meshes(parse_slice("v5e:16x16"))[0]
    # x seen as [2, 4, 2]: the middle part has neighbours 2 chips apart.
    assert mesh.segments([AxisRef("x", 2, 4)]) == (Segment("x", 4, 2, 16, True),)
    assert mesh.segments([AxisRef("x", 1, 4)]) == (Segment("x", 4, 4, 16, True),)
    assert mesh.segments([AxisRef("x", 4, 4)]) == (Segment("x", 4, 1, 16, True),)


def test_a_sub_axis_of_a_merged_axis_spans_dimensions():
    mesh = meshes_for_shape(parse_slice("v5e:4x8"), {"all": 32})[0]
    # 4x8 seen as [2, 8, 2]: the inner half of x and the outer four of y.
    assert mesh.segments([AxisRef("all", 2, 8)]) == (
        Segment("x", 2, 1, 4, False),
        Segment("y", 4, 2, 8, False),
    )


@pytest.mark.parametrize(("pre_size", "size"), [(1, 2), (2, 2), (4, 4), (1, 32), (8, 2), (2, 16)])
def test_a_sub_axis_groups_the_devices_that_differ_in_its_digits(pre_size, size):
    mesh = meshes_for_shape(parse_slice("v5e:4x8"), {"all": 32})[0]
    groups = device_coordinates(mesh).reshape(pre_size, size, -1, 2)[0, :, 0]
    along = {
        segment.dimension: {segment.stride * index for index in range(segment.size)}
        for segment in mesh.segments([AxisRef("all", pre_size, size)])
    }
    for position, dimension in enumerate(("x", "y")):
        assert set(groups[:, position]) == along.get(dimension, {0})


def test_parts_of_a_dimension_that_continue_each_other_are_joined():
    outer, inner = ("a", "b")
    mesh = next(
        mesh
        for mesh in meshes_for_shape(parse_slice("v5e:16x16"), {outer: 4, inner: 64})
        if "a=4 on x (outer 4 of 16), b=64 on x (inner 4 of 16), y" in mesh.describe()
    )
    whole = (Segment("x", 16, 1, 16, True), Segment("y", 16, 1, 16, True))
    assert mesh.segments([outer, inner]) == whole
    assert all(segment.closes for segment in whole)


def test_a_sub_axis_that_does_not_divide_is_refused():
    mesh = enumerate_meshes(parse_slice("v5e:16x16"))[0]
    with pytest.raises(InputError, match=r"\(2\)3 does not divide axis 'x' of 16"):
        mesh.segments([AxisRef("x", 2, 3)])


@dataclass(frozen=True)
class FakeDevice:
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0


def fake_devices(shape, cores=1, slices=1):
    return [
        FakeDevice((x, y, z), core, index)
        for index in range(slices)
        for z in range(shape[2])
        for y in range(shape[1])
        for x in range(shape[0])
        for core in range(cores)
    ]


def test_real_devices_are_ordered_by_their_coordinates():
    mesh = meshes_for_shape(parse_slice("v5e:2x4"), {"data": 4, "model": 2})[0]
    assert mesh.describe() == "data=4 on y, model=2 on x"
    ordered = order_devices(mesh, fake_devices((2, 4, 1)))
    assert ordered.shape == (4, 2)
    assert [[device.coords for device in row] for row in ordered] == [
        [(x, y, 0) for x in range(2)] for y in range(4)
    ]


def test_slices_and_cores_have_their_place():
    mesh = meshes_for_shape(parse_slice("2*tpu7x:2x2x1"), {"data": 8, "model": 2})[0]
    assert mesh.describe() == "data=8 on slice, x, y, model=2 on core"
    devices = fake_devices((2, 2, 1), cores=2, slices=2)
    # Slices of a larger job need not be numbered from zero, nor chips of a slice of a pod.
    moved = [
        replace(d, slice_index=d.slice_index + 3, coords=(d.coords[0] + 4, *d.coords[1:]))
        for d in devices
    ]
    for given in (devices, moved[::-1]):
        ordered = order_devices(mesh, given)
        assert [device.core_on_chip for device in ordered[0]] == [0, 1]
        assert len({device.slice_index for device in ordered[:4].flat}) == 1
        assert len({device.coords for device in ordered[:4, 0]}) == 4


@pytest.mark.parametrize(
    "devices", [[], fake_devices((2, 2, 1)), fake_devices((4, 2, 1)), fake_devices((2, 4, 1), 2)]
)
def test_devices_of_another_slice_are_refused(devices):
    mesh = enumerate_meshes(parse_slice("v5e:2x4"))[0]
    with pytest.raises(InputError, match=r"do not make up v5e:2x4, which has 8"):
        order_devices(mesh, devices)
