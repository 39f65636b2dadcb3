"""Slices by pattern."""

import pytest

from shardwright.errors import InputError
from shardwright.hardware_profiles import legal_slices, load_chip
from shardwright.planner.slice_choice import choose_slices, parse_chip_range


def names(*patterns, chips=None):
    limits = None if chips is None else parse_chip_range(chips)
    return [one.name for one in choose_slices(patterns, limits)]


def test_a_generation_is_all_its_legal_slices():
    # The slices of v5e in Google's documentation of TPU v5e.
    shapes = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
    assert names("v5e") == names("v5e:*") == [f"v5e:{shape}" for shape in shapes]


def test_a_range_keeps_sizes_within_it_both_ends_included():
    assert names("v5e:*", chips="16..64") == ["v5e:4x4", "v5e:4x8", "v5e:8x8"]
    assert names("v5e", chips="128..") == ["v5e:8x16", "v5e:16x16"]
    assert names("v5e", chips="..4") == ["v5e:1x1", "v5e:2x2"]
    assert names("v5e", chips="8") == ["v5e:2x4"]


def test_a_range_leaves_exact_slices_alone():
    assert names("v5e:1x1", "v6e", chips="64") == ["v5e:1x1", "v6e:8x8"]


def test_all_is_every_generation():
    generations = {name.partition(":")[0] for name in names("all", chips="64")}
    assert generations == {"v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"}


def test_globs_match_names_across_generations():
    assert names("v?e:8x8") == ["v5e:8x8", "v6e:8x8"]


def test_a_number_in_front_joins_slices_by_the_network():
    assert names("2*v5e:16x16") == ["2*v5e:16x16"]
    assert names("2*v6e:*", chips="512") == ["2*v6e:16x16"]


def test_each_slice_comes_once_in_the_order_given():
    assert names("v6e:8x8", "v5e:8x8", "v?e:8x8") == ["v6e:8x8", "v5e:8x8"]


def test_a_profile_of_the_users_own_takes_the_place_of_the_bundled_one():
    own = load_chip("v5e").model_copy(update={"name": "v5e"})
    own = own.model_copy(update={"hbm_bytes": own.hbm_bytes.model_copy(update={"value": 1 << 30})})
    chosen = choose_slices(["v5e"], profiles=[own])
    assert {one.chip.hbm_bytes.value for one in chosen} == {1 << 30}
    assert len(chosen) == len(legal_slices(own))


@pytest.mark.parametrize(
    ("patterns", "chips", "words"),
    [
        (["v5e:*x3"], None, "no legal slice matches"),
        (["v5e:*"], "3", "no slice of v5e:"),
        (["v9"], None, "v9"),
        (["all"], None, "too many"),
        (["v5e:3x3"], None, "nearest first"),
        (["v5e"], "64..8", "holds no number"),
        (["v5e"], "many", "not a range"),
        ([], None, "none is given"),
    ],
)
def test_what_names_no_slice_is_refused_with_what_to_do(patterns, chips, words):
    with pytest.raises(InputError, match=words) as caught:
        names(*patterns, chips=chips)
    assert caught.value.do
