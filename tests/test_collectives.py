"""Collectives on logical meshes, against arithmetic written out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost_models.collectives import (
    COLLECTIVES,
    collective_model,
    collective_seconds,
    lowered_collective,
    splits_lane_tiles,
)
from shardwright.errors import InputError
from shardwright.hardware_profiles import (
    AxisRef,
    enumerate_meshes,
    load_chip,
    meshes_for_shape,
    parse_slice,
)

V5E_FIXED = load_chip("v5e").collective_overhead_s.value
V5E_LINK = 45e9
MB = 1e6


def mesh_of(topology, describe="", **shape):
    meshes = meshes_for_shape(parse_slice(topology), shape)
    return next(mesh for mesh in meshes if describe in mesh.describe())


POD = mesh_of("v5e:16x16", data=16, model=16)


def moving(kind, nbytes, axes, mesh):
    """Seconds without the fixed part."""
    return (
        collective_seconds(kind, nbytes, axes, mesh) - mesh.slice.chip.collective_overhead_s.value
    )


def test_all_gather_over_a_ring_of_a_pod():
    assert moving("all_gather", 100 * MB, ["data"], POD) == pytest.approx(100 * MB / 90e9)


def test_all_gather_over_the_whole_pod_uses_both_dimensions():
    assert moving("all_gather", 100 * MB, ["data", "model"], POD) == pytest.approx(100 * MB / 180e9)


def test_all_gather_on_a_slice_without_wraparound():
    mesh = mesh_of("v5e:8x8", data=8, model=8)
    assert moving("all_gather", 100 * MB, ["data"], mesh) == pytest.approx(100 * MB * 7 / 8 / 45e9)


def test_reduce_scatter_and_all_reduce_follow_from_the_all_gather():
    gather = moving("all_gather", 64 * MB, ["data"], POD)
    assert moving("reduce_scatter", 64 * MB, ["data"], POD) == pytest.approx(gather)
    assert moving("all_reduce", 64 * MB, ["data"], POD) == pytest.approx(2 * gather)


def test_all_to_all_of_local_arrays():
    # Ring of 16: a link carries 16 / 8 arrays.
    assert moving("all_to_all", 10 * MB, ["data"], POD) == pytest.approx(10 * MB * 2 / 45e9)


def test_a_contiguous_part_of_a_ring_is_a_line():
    mesh = mesh_of("v5e:16x16", "b=4 on x (inner 4 of 16)", a=64, b=4)
    assert moving("all_gather", 100 * MB, ["b"], mesh) == pytest.approx(100 * MB * 3 / 4 / 45e9)


def test_a_strided_part_of_a_ring_is_a_ring_whose_links_are_shared():
    mesh = mesh_of("v5e:16x16", "b=4 on x (outer 4 of 16)", a=64, b=4)
    assert moving("all_gather", 100 * MB, ["b"], mesh) == pytest.approx(100 * MB / (90e9 / 4))


def test_a_sub_axis_is_priced_where_it_lies():
    split = mesh_of("v5e:16x16", "b=4 on x (inner 4 of 16)", a=64, b=4)
    for kind in COLLECTIVES:
        inner = collective_seconds(kind, 10 * MB, [AxisRef("data", 4, 4)], POD)
        assert inner == collective_seconds(kind, 10 * MB, ["b"], split)


def test_both_parts_of_a_dimension_together_are_the_whole():
    mesh = mesh_of("v5e:16x16", "a=4 on x (outer 4 of 16), b=4 on x (inner 4", a=4, b=4, c=16)
    for kind in COLLECTIVES:
        assert collective_seconds(kind, 10 * MB, ["a", "b"], mesh) == collective_seconds(
            kind, 10 * MB, ["data"], POD
        )


def test_hops_and_the_fixed_part_bound_a_tiny_collective():
    # 8 hops round half the ring; 16 for two rings; twice for the two halves of an all-reduce.
    assert collective_seconds("all_gather", 64.0, ["data"], POD) == V5E_FIXED + 8e-6
    both = collective_seconds("all_gather", 64.0, ["data", "model"], POD)
    assert both == pytest.approx(V5E_FIXED + 16e-6)
    assert collective_seconds("all_reduce", 64.0, ["data"], POD) == V5E_FIXED + 16e-6


def test_two_devices_of_a_chip_share_its_links():
    mesh = mesh_of("tpu7x:4x4x4", "data=4 on x, model=16 on y, z, core=2 on core",
                   data=4, model=16, core=2)  # fmt: skip
    # Each core gathers for itself over x: 90e9 both ways, shared by the two cores.
    gather = moving("all_gather", 100 * MB, ["data"], mesh)
    assert gather == pytest.approx(100 * MB / (180e9 / 2))


def test_a_group_of_both_devices_takes_each_byte_in_once():
    mesh = mesh_of("tpu7x:4x4x4", "data=8 on x, core", data=8, model=16)
    gather = moving("all_gather", 100 * MB, ["data"], mesh)
    assert gather == pytest.approx(100 * MB / 180e9)
    # In an all-to-all every device has bytes of its own: two arrays a chip, 4 / 8 of each a link.
    exchange = moving("all_to_all", 100 * MB, ["data"], mesh)
    assert exchange == pytest.approx(2 * 100 * MB * 4 / 8 / 90e9)


def test_the_link_between_the_devices_of_a_chip():
    mesh = mesh_of("tpu7x:4x4x4", data=64, core=2)
    assert moving("all_gather", 100 * MB, ["core"], mesh) == pytest.approx(50 * MB / 540e9)


def test_two_slices_gather_over_the_data_centre_network():
    mesh = mesh_of("2*v5e:16x16", dcn=2, data=16, model=16)
    # Half of the array comes from the other slice, over the chip's share of its host's network.
    gather = moving("all_gather", 100 * MB, ["dcn"], mesh)
    assert gather == pytest.approx(50 * MB / 3.125e9)


def test_an_axis_over_slices_and_chips_crosses_the_network_in_shards():
    mesh = mesh_of("2*v5e:16x16", data=32, model=16)
    assert mesh.describe() == "data=32 on slice, x, model=16 on y"
    # Each chip moves 1/16 of the array between slices, then all of it within.
    across, within = 100 * MB / 16 / 2 / 3.125e9, 100 * MB / 90e9
    assert moving("all_gather", 100 * MB, ["data"], mesh) == pytest.approx(across + within)
    assert moving("all_reduce", 100 * MB, ["data"], mesh) == pytest.approx(2 * (across + within))


def test_two_devices_share_their_chips_part_of_the_network():
    mesh = mesh_of("2*tpu7x:4x4x4", dcn=2, data=64, core=2)
    assert moving("all_gather", 100 * MB, ["dcn"], mesh) == pytest.approx(50 * MB / 6.25e9)


def test_a_halo_goes_to_the_next_chip():
    assert moving("halo_exchange", 9 * MB, ["data"], POD) == pytest.approx(9 * MB / 45e9)


def test_links_in_use_are_those_of_the_axes():
    mesh = mesh_of("2*v5e:16x16", data=32, model=16)
    assert collective_model("all_gather", ("model",), mesh).dimensions == ("y",)
    model = collective_model("all_gather", ("data",), mesh)
    occupied = model.occupied_s(100 * MB)
    assert occupied == {
        "x": pytest.approx(100 * MB / 90e9),
        "slice": pytest.approx(100 * MB / 32 / 3.125e9),
    }
    assert model.seconds(100 * MB) == pytest.approx(model.overhead_s + sum(occupied.values()))
    cores = mesh_of("tpu7x:4x4x4", "data=8 on x, core", data=8, model=16)
    assert collective_model("all_gather", ("data",), cores).dimensions == ("core", "x")


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_an_array_of_sizes_gives_an_array_of_seconds(kind):
    sizes = np.array([0.0, 1.0, 1e5, 1e9])
    for axes in (["data"], ["data", "model"]):
        expected = [collective_seconds(kind, float(size), axes, POD) for size in sizes]
        np.testing.assert_array_equal(collective_seconds(kind, sizes, axes, POD), expected)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_nothing_to_send_and_nobody_to_send_to_are_free(kind):
    assert collective_seconds(kind, 0, ["data"], POD) == 0.0
    assert collective_seconds(kind, MB, [], POD) == 0.0
    lonely = mesh_of("v5e:16x16", one=1, rest=256)
    assert collective_seconds(kind, MB, ["one"], lonely) == 0.0
    assert collective_seconds(kind, np.array([MB]), ["one"], lonely).tolist() == [0.0]


def test_an_unknown_collective_or_axis_is_refused():
    with pytest.raises(InputError, match=r"no collective 'broadcast'.*all_gather"):
        collective_seconds("broadcast", MB, ["data"], POD)
    with pytest.raises(InputError, match="no mesh axis 'expert'"):
        collective_seconds("all_gather", MB, ["expert"], POD)


MESHES = [
    mesh
    for topology in ("v5e:8x16", "v5p:4x4x8", "2*v5e:4x8", "tpu7x:2x2x2", "2*tpu7x:4x4x4")
    for mesh in enumerate_meshes(parse_slice(topology), limit=20)
]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_properties_on_every_kind_of_mesh(data):
    mesh = data.draw(st.sampled_from(MESHES))
    axes = data.draw(st.lists(st.sampled_from(list(mesh.shape)), min_size=1, unique=True))
    nbytes = data.draw(st.floats(1.0, 1e11))
    fixed = mesh.slice.chip.collective_overhead_s.value
    seconds = {kind: collective_seconds(kind, nbytes, axes, mesh) for kind in COLLECTIVES}
    # An all-reduce is its two halves with one fixed part.
    halves = seconds["reduce_scatter"] + seconds["all_gather"]
    assert seconds["all_reduce"] == pytest.approx(halves - fixed)
    for kind in COLLECTIVES:
        assert seconds[kind] >= fixed
        assert collective_seconds(kind, 2 * nbytes, axes, mesh) >= seconds[kind]
        assert collective_seconds(kind, nbytes, axes[::-1], mesh) == seconds[kind]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_gather_beats_the_links_into_a_chip(data):
    mesh = data.draw(st.sampled_from(MESHES))
    axes = data.draw(st.lists(st.sampled_from(list(mesh.shape)), min_size=1, unique=True))
    segments = {s.dimension: s.size for s in mesh.segments(axes)}
    chips = int(np.prod([size for name, size in segments.items() if name in ("x", "y", "z")]))
    chip = mesh.slice.chip
    links = chip.ici_links_per_chip.value * chip.ici_link_bandwidth.value
    bound = 1e9 * (chips - 1) / chips / links
    assert collective_seconds("all_gather", 1e9, axes, mesh) >= bound


# AI-Hypercomputer/tpu-recipes at c8cfe2f, microbenchmarks/ironwood/collectives/all_gather.md, on
# TPU7x: bytes of the gathered array, and seconds as data transferred by bandwidth achieved, where
# the data are what both devices of a chip receive. Each device gathers with one of each of the
# other three chips of a 2x2. The fixed part of TPU7x was set from the first three rows.
MEASURED_GATHERS = [
    (4 * 65536 * 4, 0.001572864 / 71.7703034),
    (4 * 262144 * 4, 0.006291456 / 129.1869148),
    (4 * 1048576 * 4, 0.025165824 / 161.9040742),
    (4 * 4194304 * 4, 0.100663296 / 174.765465),
    (4 * 16777216 * 4, 0.402653184 / 178.7714158),
]


@pytest.mark.parametrize(("gathered", "measured_s"), MEASURED_GATHERS)
def test_all_gather_of_both_devices_of_four_chips_as_measured(gathered, measured_s):
    mesh = mesh_of("tpu7x:2x2x1", chips=4, core=2)
    assert mesh.describe() == "chips=4 on x, y, core=2 on core"
    modelled = collective_seconds("all_gather", gathered, ["chips"], mesh)
    assert modelled == pytest.approx(measured_s, rel=0.03)


# Read off programs that libtpu compiled; see the source in the chips' profiles.
@pytest.mark.parametrize(
    "case",
    [
        ("reduce_scatter", "v5e:16x16", ["x"], MB, "reduce_scatter"),
        ("reduce_scatter", "v5e:16x16", ["x", "y"], MB, "all_reduce"),
        ("reduce_scatter", "v5e:2x2", ["x", "y"], MB, "reduce_scatter"),
        ("reduce_scatter", "tpu7x:4x4x4", ["x", "y", "z_core"], MB, "reduce_scatter"),
        ("all_gather", "v5e:16x16", ["x"], MB, "all_gather"),
        ("all_gather", "v5e:16x16", ["x", "y"], 16.7 * MB, "all_reduce"),
        ("all_gather", "v5e:16x16", ["x", "y"], 17.8 * MB, "all_gather"),
        ("all_gather", "v5e:8x8", ["x", "y"], 2 * MB, "all_reduce"),
        ("all_gather", "v5e:4x8", ["x", "y"], 2 * MB, "all_gather"),
        ("all_gather", "v5p:4x4x4", ["x", "y", "z"], 2000 * MB, "all_reduce"),
        ("all_gather", "v5p:2x4x4", ["x", "y", "z"], 2 * MB, "all_gather"),
        ("all_reduce", "v5e:16x16", ["x", "y"], MB, "all_reduce"),
        ("all_to_all", "v5e:16x16", ["x", "y"], MB, "all_to_all"),
    ],
)
def test_the_collective_that_the_compiler_emits(case):
    kind, topology, axes, nbytes, lowered = case
    mesh = next(
        mesh for mesh in enumerate_meshes(parse_slice(topology)) if set(axes) <= set(mesh.shape)
    )
    assert lowered_collective(kind, nbytes, axes, mesh) == lowered


# What libtpu made of products of bf16 and f32 whose contraction is cut, scattered along columns.
@pytest.mark.parametrize(
    ("chip", "width", "element_bytes", "splits"),
    [
        *(("v5e", width, 2, False) for width in (64, 96, 192, 256, 320, 512, 768, 1024)),
        *(("v5e", width, 2, True) for width in (128, 384, 640)),
        *((chip, 128, 2, True) for chip in ("v4", "v5p", "v6e")),
        ("tpu7x", 128, 2, False),
        ("v5e", 128, 4, False),
    ],
)
def test_which_shards_a_reduce_scatter_cannot_halve(chip, width, element_bytes, splits):
    assert splits_lane_tiles(width, element_bytes, load_chip(chip)) == splits
