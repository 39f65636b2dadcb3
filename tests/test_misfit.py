"""What is said where nothing fits: what fills the memory, and only what could help."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.cost_models.memory import Buffer, PeakMemory
from shardwright.errors import DoesNotFitError
from shardwright.hardware_profiles import parse_slice
from shardwright.planner.misfit import ArgumentFacts, argument_facts, does_not_fit
from shardwright.planner.prepared import prepare
from shardwright.planner.program import Program

ON = parse_slice("v5e:2x2")
LIMIT = 15e9
NOTHING = ArgumentFacts()


def peak(**by_kind: float) -> PeakMemory:
    live = tuple(Buffer(kind, 0, 1, nbytes, kind) for kind, nbytes in by_kind.items())
    return PeakMemory(sum(by_kind.values()), 0, live)


def misfit(
    least: PeakMemory,
    share: PeakMemory,
    *,
    proven: bool = False,
    untried: int = 0,
    arguments: ArgumentFacts = NOTHING,
) -> DoesNotFitError:
    return does_not_fit(
        "step", ON, LIMIT, least, share, arguments=arguments, proven=proven, untried=untried
    )


def advice(least: PeakMemory, share: PeakMemory, **facts: Any) -> str:
    return misfit(least, share, **facts).do


def test_more_time_is_advised_where_meshes_were_not_tried() -> None:
    told = advice(peak(state=5e9, loop=25e9), peak(state=4e9, loop=10e9), untried=3)
    assert "more time, as 3 meshes were not tried" in told


def test_no_time_is_advised_where_an_even_share_of_every_tensor_is_too_much() -> None:
    least, share = peak(state=5e9, loop=25e9), peak(state=4e9, loop=12e9)
    error = misfit(least, share, untried=3)
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


@pytest.mark.parametrize("moments", [True, False])
def test_state_is_not_helped_by_a_smaller_batch(moments: bool) -> None:
    share = peak(state=16e9, loop=1e9)
    told = advice(peak(state=30e9), share, proven=True, arguments=ArgumentFacts(moments=moments))
    assert "A smaller batch does not help" in told and "16.00 GB" in told
    assert ("moments in bf16" in told) == moments


def test_arguments_may_be_a_batch() -> None:
    told = advice(peak(input=30e9), peak(input=16e9, loop=1e9), proven=True)
    assert "helps only as far as they shrink with it" in told and "16.00 GB" in told


def test_donation_is_advised_where_results_have_the_shape_of_an_argument() -> None:
    shape = jax.ShapeDtypeStruct((1 << 20, 1 << 14), jnp.float32)
    with pytest.raises(DoesNotFitError) as caught:
        sw.plan(lambda a, b: a * b, shape, shape, topology="v5e:2x2", mesh={"x": 4})
    # Each is 17.18 GB a device; one result takes over one of the two.
    assert "Donate [0] (donate_argnums, --donate)" in caught.value.do
    assert "take over the memory, 17.18 GB a device" in caught.value.do
    assert "take 34.36 GB a device" in caught.value.do
    assert "moments" not in caught.value.do


def test_moments_are_known_by_their_names() -> None:
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    for name, moments in (("mu", True), ("multi", False)):
        program = Program.trace(
            lambda state: jax.tree.map(lambda x: x + 1, state), {name: shape}, donate_argnums=0
        )
        assert argument_facts(prepare(program).graph, 4) == ArgumentFacts(moments=moments)


def test_the_smallest_slice_with_as_much_memory_in_all_is_named() -> None:
    # 30 GB on each of 4 devices are 120 GB: eight of 17.2 GB, of which 15 may be used.
    told = advice(peak(loop=30e9), peak(loop=20e9), proven=True)
    assert "v5e:2x4" in told
