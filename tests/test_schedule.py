"""Simulated schedules of small steps, against arithmetic by hand (seconds)."""

import pytest

from shardwright.cost_models.schedule import Kernel, Loop, Stage, Transfer, simulate


def transfer(seconds, when="stops", links=("x",)):
    return Transfer((Stage(tuple(links), float(seconds)),), when)


def step(*entries):
    """Seconds of a step, and those in which nothing computes."""
    made = simulate(entries)
    return made.seconds, made.exposed_s


def test_kernels_run_one_after_the_other():
    assert step(Kernel(2.0), Kernel(3.0)) == (5.0, 0.0)


def test_a_transfer_that_stops_is_exposed():
    assert step(Kernel(2.0), transfer(3), Kernel(1.0)) == (6.0, 3.0)


def test_a_transfer_ahead_hides_behind_what_comes_before_its_use():
    assert step(Kernel(2.0), transfer(1.5, "ahead"), Kernel(1.0)) == (3.0, 0.0)
    assert step(Kernel(2.0), transfer(5, "ahead"), Kernel(1.0)) == (6.0, 3.0)


def test_nothing_hides_a_transfer_that_is_wanted_first():
    assert step(transfer(2, "ahead"), Kernel(5.0)) == (7.0, 2.0)


def test_a_transfer_behind_hides_behind_what_comes_after_it():
    assert step(Kernel(1.0), transfer(2, "behind"), Kernel(5.0)) == (6.0, 0.0)
    assert step(Kernel(1.0), transfer(7, "behind"), Kernel(5.0)) == (8.0, 2.0)


def test_transfers_on_different_links_run_together():
    entries = (transfer(4, "ahead", "x"), transfer(4, "ahead", "y"))
    assert step(Kernel(4.0), *entries) == (4.0, 0.0)


def test_transfers_on_one_link_queue():
    entries = (transfer(4, "ahead", "x"), transfer(4, "ahead", "x"))
    assert step(Kernel(4.0), *entries) == (8.0, 4.0)


def test_a_transfer_over_two_links_waits_for_both():
    # The second needs x and y: it runs from 3 to 5; the third only y, but is behind it in line.
    entries = (
        transfer(3, "ahead", "x"),
        transfer(2, "ahead", "xy"),
        transfer(1, "ahead", "y"),
    )
    assert step(Kernel(1.0), *entries) == (6.0, 5.0)


def test_a_transfer_that_stops_goes_before_those_on_its_links():
    # While the kernels wait for 2 s on x, the gather on x stands still and the one on y goes on.
    entries = (Kernel(1.0), transfer(2, "stops", "x"), Kernel(3.0))
    assert step(*entries, transfer(4, "ahead", "x")) == (6.0, 2.0)
    assert step(*entries, transfer(5, "ahead", "x")) == (7.0, 3.0)
    assert step(*entries, transfer(6, "ahead", "y")) == (6.0, 2.0)


def test_stages_of_a_transfer_follow_each_other_on_their_links():
    # Two sums over slices: while the second is on ICI, the first is on the network between.
    both = Transfer((Stage(("x",), 1.0), Stage(("slice",), 3.0)), "behind")
    assert step(both, Kernel(4.0)) == (4.0, 0.0)
    again = Transfer((Stage(("x",), 1.0), Stage(("slice",), 3.0)), "behind")
    assert step(both, again, Kernel(4.0)) == (7.0, 3.0)


@pytest.mark.parametrize("passes", [1, 2, 5, 40])
def test_a_pass_gathers_for_itself(passes):
    # Nothing hides the first gather of a pass; the second hides behind the first kernel.
    loop = Loop((transfer(2, "ahead"), Kernel(3.0), transfer(3, "ahead"), Kernel(1.0)), passes)
    assert step(loop) == pytest.approx((6.0 * passes, 2.0 * passes))


@pytest.mark.parametrize("passes", [1, 2, 6, 40])
def test_what_leaves_a_pass_does_so_during_the_next(passes):
    loop = Loop((Kernel(3.0), transfer(3, "behind")), passes)
    assert step(loop) == pytest.approx((3.0 * passes + 3.0, 3.0))


def test_loops_in_loops_take_their_passes_times():
    inner = Loop((Kernel(1.0), transfer(1)), 3)
    assert step(Loop((inner, Kernel(2.0)), 4)) == pytest.approx((32.0, 12.0))


def test_what_is_told_adds_up_to_the_step():
    spans = []
    loop = Loop((transfer(5, "ahead"), Kernel(3.0), transfer(1, "stops", "y")), 7)
    made = simulate((loop, transfer(2, "ahead", "y"), Kernel(1.0)), spans.append)
    kernels = sum(span.seconds for span in spans if span.exposed is None)
    exposed = sum(span.seconds for span in spans if span.exposed)
    assert kernels == pytest.approx(7 * 3 + 1)
    assert exposed == pytest.approx(made.exposed_s)
    assert kernels + exposed == pytest.approx(made.seconds)
    assert sum(s.seconds for s in spans if s.exposed is not None) == pytest.approx(7 * 6 + 2)


def test_many_passes_are_told_in_part_and_take_as_long():
    spans = []
    loop = Loop((transfer(5, "ahead"), Kernel(3.0)), 1000, "loop")
    made = simulate((loop,), spans.append, 0.01)
    assert len(spans) < 100
    assert [span.seconds for span in spans if span.label == "loop"] == [pytest.approx(990 * 8.0)]
    assert made.seconds == pytest.approx(simulate((loop,)).seconds)


def test_what_is_left_of_a_transfer_late_in_a_long_step_ends():
    # 16 s + 1.5e-15 s is 16 s to a clock.
    entries = [Kernel(16.0), Loop((Transfer((Stage(("x",), 1.5e-15),), "ahead"), Kernel(1.0)), 2)]
    assert simulate(entries).seconds == pytest.approx(18.0)
