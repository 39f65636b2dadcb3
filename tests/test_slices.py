"""Slices: names, product names, wraparound, and those that do not exist."""

import pytest

from shardwright.errors import InputError
from shardwright.hardware_profiles import (
    Slice,
    chip_names,
    legal_slices,
    load_chip,
    parse_chip,
    parse_slice,
    product_name,
)


@pytest.mark.parametrize(
    ("text", "shape", "count", "totals"),
    [
        ("v5e:16x16", (16, 16), 1, (256, 256, 32)),
        ("2*v5e:16x16", (16, 16), 2, (512, 512, 64)),
        ("v5e:1x1", (1, 1), 1, (1, 1, 1)),
        ("v6e:2x4", (2, 4), 1, (8, 8, 1)),
        ("v3:4x4", (4, 4), 1, (16, 32, 4)),
        ("v4:4x4x8", (4, 4, 8), 1, (128, 128, 32)),
        ("v5p:16x20x28", (16, 20, 28), 1, (8960, 8960, 2240)),
        ("tpu7x:2x2x1", (2, 2, 1), 1, (4, 8, 1)),
        (" 4 * TPU7X:4x4x4 ", (4, 4, 4), 4, (256, 512, 64)),
    ],
)
def test_a_slice_by_its_shape(text, shape, count, totals):
    one = parse_slice(text)
    assert (one.shape, one.count) == (shape, count)
    assert (one.chips, one.devices, one.hosts) == totals


# AI-Hypercomputer/maxtext, accelerator_to_spec_map.py, and Google's pages on each generation.
PRODUCTS = {
    "v2-8": "v2:2x2",
    "v2-512": "v2:16x16",
    "v3-8": "v3:2x2",
    "v3-32": "v3:4x4",
    "v3-64": "v3:4x8",
    "v3-2048": "v3:32x32",
    "v4-8": "v4:2x2x1",
    "v4-32": "v4:2x2x4",
    "v4-64": "v4:2x4x4",
    "v4-384": "v4:4x4x12",
    "v4-1536": "v4:8x8x12",
    "v4-4096": "v4:8x16x16",
    "v5litepod-1": "v5e:1x1",
    "v5litepod-16": "v5e:4x4",
    "v5litepod-256": "v5e:16x16",
    "v5e-128": "v5e:8x16",
    "v5p-8": "v5p:2x2x1",
    "v5p-32": "v5p:2x2x4",
    "v5p-128": "v5p:4x4x4",
    "v5p-768": "v5p:4x8x12",
    "v5p-1408": "v5p:4x4x44",
    "v5p-3072": "v5p:8x12x16",
    "v5p-6912": "v5p:12x12x24",
    "v5p-11520": "v5p:12x20x24",
    "v5p-12288": "v5p:16x16x24",
    "v5p-17920": "v5p:16x20x28",
    "v6e-64": "v6e:8x8",
    "tpu7x-2": "tpu7x:1x1x1",
    "tpu7x-8": "tpu7x:2x2x1",
    "tpu7x-128": "tpu7x:4x4x4",
    "tpu7x-2048": "tpu7x:8x8x16",
    "tpu7x-18432": "tpu7x:16x24x24",
}


@pytest.mark.parametrize(("product", "topology"), PRODUCTS.items())
def test_a_slice_by_its_product_name(product, topology):
    assert parse_slice(product) == parse_slice(topology)
    assert parse_slice(f"2*{product}").name == f"2*{topology}"


@pytest.mark.parametrize("product", [name for name in PRODUCTS if not name.startswith("v5e-")])
def test_the_product_name_of_a_slice(product):
    assert product_name(parse_slice(product)) == product


@pytest.mark.parametrize("chip", chip_names())
def test_every_legal_slice_is_read_back_from_its_name(chip):
    slices = legal_slices(load_chip(chip))
    assert [parse_slice(one.name) for one in slices] == list(slices)
    assert [one.chips for one in slices] == sorted(one.chips for one in slices)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_all_two_dimensional_slices_of_the_lite_chips(chip):
    shapes = [one.shape for one in legal_slices(load_chip(chip))]
    assert shapes == [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]


def test_three_dimensional_slices_are_four_small_ones_and_whole_cubes():
    shapes = {one.shape for one in legal_slices(load_chip("v4"))}
    # cubes of at most 4096 / 64 = 64 blocks of 4x4x4, sides in ascending order
    cubes = {
        (4 * a, 4 * b, 4 * c)
        for a in range(1, 65)
        for b in range(a, 65)
        for c in range(b, 65)
        if a * b * c <= 64
    }
    assert shapes == {(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)} | cubes


@pytest.mark.parametrize(
    ("topology", "wraps"),
    [
        ("v2:8x16", (False, True)),
        ("v2:16x16", (True, True)),
        ("v3:16x16", (False, False)),
        ("v3:16x32", (False, True)),
        ("v5e:8x8", (False, False)),
        ("v5e:8x16", (False, True)),
        ("v5e:16x16", (True, True)),
        ("v6e:8x16", (False, True)),
        ("v4:2x2x4", (False, False, False)),
        ("v4:2x4x4", (False, False, False)),
        ("v4:4x4x4", (True, True, True)),
        ("v5p:4x4x12", (True, True, True)),
        ("tpu7x:2x4x4", (False, False, False)),
        ("tpu7x:4x4x8", (True, True, True)),
    ],
)
def test_which_dimensions_wrap(topology, wraps):
    assert parse_slice(topology).wraps == wraps


# Google's page on v5p, column "Supports twisted?".
@pytest.mark.parametrize(
    ("shape", "twisted"),
    [
        ("2x2x4", False), ("4x4x4", False), ("4x4x8", True), ("4x8x8", True), ("8x8x8", False),
        ("8x8x16", True), ("8x16x16", True), ("16x16x16", False), ("16x16x24", False),
    ],
)  # fmt: skip
def test_which_slices_can_be_twisted(shape, twisted):
    assert parse_slice(f"v5p:{shape}").twisted is twisted


def test_generations_without_twisted_tori_have_none():
    assert not any(one.twisted for one in legal_slices(load_chip("tpu7x")))


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("v5e:16x8", "v5e:8x16"),
        ("v5e:3x5", "v5e:4x4"),
        ("v5e:32x32", "v5e:16x16"),
        ("v5e-250", "v5e:16x16"),
        ("v4:4x4x6", "v4:4x4x8"),
        ("v4:8x4x4", "v4:4x4x8"),
        ("v5p-130", "v5p:4x4x4"),
        ("v5p-7", "v5p:2x2x1"),
        ("v5p:4x4", "v5p:2x2x4"),
        ("2*v6e:5x5", "v6e:4x8"),
        ("v6e-4x4", "v6e:4x4"),
    ],
)
def test_an_illegal_slice_is_refused_with_the_nearest_first(text, nearest):
    with pytest.raises(InputError, match=f"is not a slice of .* nearest first: {nearest}"):
        parse_slice(text)


def test_a_long_list_of_legal_slices_is_cut():
    with pytest.raises(InputError, match=r"and \d+ more"):
        parse_slice("v5p:5x5x5")


@pytest.mark.parametrize("text", ["", "v5e", "v5e:", "16x16", "v5e:16xx16", "v5e 16x16", "v5e:-4"])
def test_text_that_is_no_topology_is_refused_with_examples(text):
    with pytest.raises(InputError, match=r"is not a topology.*v5e:16x16.*v5litepod-256"):
        parse_slice(text)


def test_an_unknown_chip_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"names no known chip.*v2, v3, v4, v5e"):
        parse_slice("v9:2x2")


def test_no_slices_at_all_are_refused():
    with pytest.raises(InputError, match="at least 1"):
        parse_slice("0*v5e:4x4")


def test_a_profile_of_ones_own_names_its_slices():
    profile = load_chip("v5e").model_dump(mode="json") | {"name": "mine"}
    mine = parse_chip(profile)
    assert parse_slice("4x8", mine) == Slice(mine, (4, 8))
    assert parse_slice("2*mine:4x8", mine).name == "2*mine:4x8"
    with pytest.raises(InputError, match="names no known chip"):
        parse_slice("v4:4x4x4", mine)
