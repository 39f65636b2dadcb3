"""What is said where nothing fits: what fills the memory, and only what could help."""

import pytest

from shardwright.cost_models.memory import Buffer, PeakMemory
from shardwright.hardware_profiles import parse_slice
from shardwright.planner.misfit import does_not_fit

ON = parse_slice("v5e:2x2")
LIMIT = 15e9


def peak(**by_kind: float) -> PeakMemory:
    live = tuple(Buffer(kind, 0, 1, nbytes, kind) for kind, nbytes in by_kind.items())
    return PeakMemory(sum(by_kind.values()), 0, live)


def advice(least: PeakMemory, share: PeakMemory, proven: bool = False, untried: int = 0) -> str:
    return does_not_fit("step", ON, LIMIT, least, share, proven=proven, untried=untried).do


def test_more_time_is_advised_where_meshes_were_not_tried() -> None:
    told = advice(peak(state=5e9, loop=25e9), peak(state=4e9, loop=10e9), untried=3)
    assert "more time, as 3 meshes were not tried" in told


def test_no_time_is_advised_where_an_even_share_of_every_tensor_is_too_much() -> None:
    least, share = peak(state=5e9, loop=25e9), peak(state=4e9, loop=12e9)
    error = does_not_fit("step", ON, LIMIT, least, share, proven=False, untried=3)
    assert "more time" not in error.do
    assert "no sharding of step fits:" in error.what


def test_no_time_is_advised_far_from_what_was_found() -> None:
    assert "more time" not in advice(peak(state=5e9, loop=25e9), peak(state=4e9, loop=10e9))
    assert "more time" in advice(peak(state=5e9, loop=11e9), peak(state=4e9, loop=10e9))


def test_a_batch_is_told_how_much_smaller_it_would_have_to_be() -> None:
    # 30 GB of which 5 stay: 25 GB have to shrink into 10.
    told = advice(peak(state=5e9, loop=25e9), peak(state=5e9, loop=9e9), proven=True)
    assert "A batch 3 times smaller" in told
    assert told.index("rematerialise") < told.index("microbatches")


def test_temporaries_are_helped_by_microbatches_first() -> None:
    told = advice(peak(state=5e9, temporary=25e9), peak(state=5e9, temporary=9e9), proven=True)
    assert told.index("microbatches") < told.index("rematerialise")


@pytest.mark.parametrize("kind", ["state", "input"])
def test_what_does_not_grow_with_the_batch_is_not_helped_by_a_smaller_one(kind: str) -> None:
    told = advice(peak(**{kind: 30e9}), peak(**{kind: 16e9, "loop": 1e9}), proven=True)
    assert "A smaller batch does not help" in told and "16.00 GB" in told


def test_the_smallest_slice_with_as_much_memory_in_all_is_named() -> None:
    # 30 GB on each of 4 devices are 120 GB: eight of 17.2 GB, of which 15 may be used.
    told = advice(peak(loop=30e9), peak(loop=20e9), proven=True)
    assert "v5e:2x4" in told
