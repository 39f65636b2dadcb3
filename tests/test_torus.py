"""Times of collectives on rings and lines, against chunks moved link by link."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost_models.torus import (
    TorusAxis,
    all_gather,
    all_reduce,
    all_to_all,
    collective_permute,
    halo_exchange,
    reduce_scatter,
)

BANDWIDTH = 1e9


def path(source, target, length, ring):
    """Directed links of the shortest way; a list of two ways where a ring has two."""
    ahead = (target - source) % length if ring else target - source
    ways = []
    if not ring:
        step = 1 if ahead > 0 else -1
        ways.append([(node, step) for node in range(source, target, step)])
    else:
        if ahead * 2 <= length:
            ways.append([((source + hop) % length, 1) for hop in range(ahead)])
        if ahead * 2 >= length:
            ways.append([((source - hop) % length, -1) for hop in range(length - ahead)])
    return ways


def groups(size, stride, length):
    """Chips of each group: `stride` of them interleave in every block of size * stride."""
    return [
        [block + offset + member * stride for member in range(size)]
        for block in range(0, length, size * stride)
        for offset in range(stride)
    ]


def gather_schedule(size, ring):
    """Steps of messages (from, to, chunk, fraction): each new chunk is passed on, both ways.

    On an even ring the two halves of the farthest chunk come from different sides.
    """
    steps = []
    for hop in range(1, size // 2 + 1 if ring else size):
        messages = []
        for chunk, way in product(range(size), (1, -1)):
            source, target = chunk + way * (hop - 1), chunk + way * hop
            if ring:
                fraction = 0.5 if 2 * hop == size else 1.0
                messages.append((source % size, target % size, chunk, fraction))
            elif 0 <= target < size:
                messages.append((source, target, chunk, 1.0))
        steps.append(messages)
    return steps


def step_seconds(messages, members, chunk_bytes, length, ring):
    load = Counter()
    for source, target, _, fraction in messages:
        for group in members:
            # A group that fills a ring passes chunks on along the side it came from.
            ways = path(group[source], group[target], length, ring)
            for way in ways:
                for link in way:
                    load[link] += chunk_bytes * fraction / len(ways)
    return max(load.values()) / BANDWIDTH


def simulate_gather(nbytes, size, stride, length, ring):
    closes = ring and size * stride == length
    schedule = gather_schedule(size, closes)
    held = [Counter({chip: 1.0}) for chip in range(size)]
    for messages in schedule:
        for _, target, chunk, fraction in messages:
            held[target][chunk] += fraction
    assert all(all(chips[chunk] == 1.0 for chunk in range(size)) for chips in held)
    members = groups(size, stride, length)
    chunk_bytes = nbytes / size
    return sum(step_seconds(step, members, chunk_bytes, length, ring) for step in schedule)


def simulate_scatter(nbytes, size, stride, length, ring):
    closes = ring and size * stride == length
    # The all-gather's messages backwards: partial sums of a chunk flow to the chip that owns it.
    schedule = [
        [(target, source, chunk, fraction) for source, target, chunk, fraction in step]
        for step in reversed(gather_schedule(size, closes))
    ]
    values = np.random.default_rng(0).normal(size=(size, size))
    partial = values.copy()
    for messages in schedule:
        sent = [
            (source, target, chunk, fraction * partial[source, chunk])
            for source, target, chunk, fraction in messages
        ]
        for _, target, chunk, value in sent:
            partial[target, chunk] += value
    np.testing.assert_allclose(np.diag(partial), values.sum(axis=0))
    members = groups(size, stride, length)
    chunk_bytes = nbytes / size
    return sum(step_seconds(step, members, chunk_bytes, length, ring) for step in schedule)


def simulate_exchange(nbytes, size, stride, length, ring):
    load = Counter()
    for group in groups(size, stride, length):
        for source, target in product(group, group):
            if source == target:
                continue
            ways = path(source, target, length, ring)
            for way in ways:
                for link in way:
                    load[link] += nbytes / size / len(ways)
    return max(load.values()) / BANDWIDTH


# Size, stride, length of the dimension, whether it wraps: whole dimensions, contiguous inner
# parts, strided outer parts and middle parts.
PLACES = [
    (2, 1, 2, False),
    (4, 1, 4, False),
    (5, 1, 5, False),
    (8, 1, 8, False),
    (3, 1, 3, True),
    (4, 1, 4, True),
    (5, 1, 5, True),
    (16, 1, 16, True),
    (4, 1, 16, True),
    (4, 1, 8, False),
    (4, 2, 8, False),
    (4, 4, 16, True),
    (8, 2, 16, True),
    (2, 8, 16, True),
    (5, 4, 20, True),
    (2, 4, 8, False),
    (4, 2, 16, True),
    (2, 2, 8, False),
]


def place(size, stride, length, wraps):
    return TorusAxis(size, wraps and size * stride == length, BANDWIDTH, stride=stride)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("formula", "simulate"),
    [(all_gather, simulate_gather), (reduce_scatter, simulate_scatter)],
    ids=["all_gather", "reduce_scatter"],
)
def test_gather_and_scatter_take_as_long_as_chunks_on_links(formula, simulate, where):
    size, stride, length, wraps = where
    modelled = formula(1e6, [place(*where)])
    simulated = simulate(1e6, size, stride, length, wraps)
    if wraps and size * stride == length and size % 2 == 0 and size > 2:
        # The textbook's ring sends the farthest chunk from both sides, whole: V / (2 B) where
        # splitting it would take (n-1)/n of that.
        assert modelled == pytest.approx(simulated * size / (size - 1))
    else:
        assert modelled == pytest.approx(simulated)


@pytest.mark.parametrize("where", PLACES)
def test_all_to_all_takes_as_long_as_messages_on_links(where):
    size, stride, length, wraps = where
    # A strided group in a ring may find the way round the other side shorter than its own line.
    simulated = simulate_exchange(1e6, size, stride, length, wraps)
    assert all_to_all(1e6, [place(*where)]) == pytest.approx(simulated)


@pytest.mark.parametrize(
    ("shape", "rings"),
    [((4, 4), (True, True)), ((4, 4), (False, False)), ((2, 8), (False, False)),
     ((8, 16), (False, True)), ((3, 5), (True, False))],
)  # fmt: skip
def test_all_to_all_over_two_dimensions_takes_the_busier_one(shape, rings):
    load = Counter()
    nodes = list(product(*map(range, shape)))
    for source, target in product(nodes, nodes):
        corners = [(source[0], target[1]), (target[0], source[1])]
        for corner, first in zip(corners, (1, 0), strict=True):
            legs = [(source, corner, first), (corner, target, 1 - first)]
            for start, end, d in legs:
                ways = path(start[d], end[d], shape[d], rings[d]) if start != end else []
                for way in ways:
                    for link in way:
                        load[(d, start[1 - d], link)] += 0.5 / len(ways)
    local = 1e6
    simulated = max(load.values()) * local / len(nodes) / BANDWIDTH
    axes = [TorusAxis(size, ring, BANDWIDTH) for size, ring in zip(shape, rings, strict=True)]
    assert all_to_all(local, axes) == pytest.approx(simulated)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("wraps", [True, False])
def test_all_gather_over_a_square_is_two_halves_gathered_in_opposite_orders(size, wraps):
    # Half of the array goes along x and then, grown, along y; the other half the other way, so
    # each phase keeps both dimensions busy.
    nbytes = 1e6
    first = simulate_gather(nbytes / 2 / size, size, 1, size, wraps)
    second = simulate_gather(nbytes / 2, size, 1, size, wraps)
    axes = [TorusAxis(size, wraps, BANDWIDTH)] * 2
    exact = first + second
    assert exact <= all_gather(nbytes, axes) * (1 + 1e-9)
    assert all_gather(nbytes, axes) <= exact * size**2 / (size**2 - 1) * (1 + 1e-9)


def test_halo_and_shift_load_a_link_with_one_array():
    ring = [TorusAxis(4, True, BANDWIDTH)]
    assert halo_exchange(1e6, ring) == pytest.approx(1e-3)
    assert collective_permute(1e6, ring) == pytest.approx(1e-3)


def test_interleaved_groups_share_a_halo_exchange():
    # Four groups of 4 on a ring of 16: every link carries the halo of each.
    assert halo_exchange(1e6, [TorusAxis(4, True, BANDWIDTH, stride=4)]) == pytest.approx(4e-3)


def test_a_random_permutation_on_a_long_ring_is_priced_by_its_mean_load():
    # 16 chips, mean distance 4, 32 directed links: 16 * 4 / 32 = 2 arrays on each.
    assert collective_permute(1e6, [TorusAxis(16, True, BANDWIDTH)]) == pytest.approx(2e-3)


def test_hops_cost_their_latency_when_bytes_are_few():
    # A line of 4 has 3 hops; a ring of 16 has 8; strided by 4, each hop passes 4 links.
    assert all_gather(1.0, [TorusAxis(4, False, BANDWIDTH, 1e-6)]) == pytest.approx(3e-6)
    assert all_gather(1.0, [TorusAxis(16, True, BANDWIDTH, 1e-6)]) == pytest.approx(8e-6)
    assert all_gather(1.0, [TorusAxis(4, True, BANDWIDTH, 1e-6, stride=4)]) == pytest.approx(8e-6)


def test_an_array_of_sizes_gives_an_array_of_seconds():
    axes = [TorusAxis(4, False, BANDWIDTH, 1e-6)]
    sizes = np.array([1.0, 1e6, 1e9])
    expected = [all_gather(float(size), axes) for size in sizes]
    np.testing.assert_array_equal(all_gather(sizes, axes), expected)


@pytest.mark.parametrize("field", ["size", "stride", "sharers", "bandwidth"])
def test_an_axis_of_nothing_is_refused(field):
    with pytest.raises(ValueError, match="at least 1"):
        TorusAxis(**({"size": 4, "wraps": True, "bandwidth": 1e9} | {field: 0}))


axes_of_torus = st.lists(
    st.builds(
        TorusAxis,
        size=st.integers(1, 16),
        wraps=st.booleans(),
        bandwidth=st.sampled_from([45e9, 90e9]),
        hop_latency=st.sampled_from([0.0, 1e-6]),
        stride=st.integers(1, 4),
        sharers=st.integers(1, 2),
    ),
    min_size=1,
    max_size=3,
)
sizes_in_bytes = st.floats(1.0, 1e12)
FUNCTIONS = [
    all_gather, reduce_scatter, all_reduce, all_to_all, collective_permute, halo_exchange,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(deadline=None)
@given(axes=axes_of_torus, small=sizes_in_bytes, factor=st.floats(1.0, 10.0))
def test_more_bytes_never_take_less_time(function, axes, small, factor):
    assert function(small * factor, axes) >= function(small, axes)


@settings(deadline=None)
@given(axes=axes_of_torus, nbytes=sizes_in_bytes)
def test_all_reduce_is_reduce_scatter_and_all_gather(axes, nbytes):
    both = reduce_scatter(nbytes, axes) + all_gather(nbytes, axes)
    assert all_reduce(nbytes, axes) == pytest.approx(both)


@settings(deadline=None)
@given(axes=axes_of_torus, nbytes=sizes_in_bytes)
def test_no_gather_beats_the_links_into_a_device(axes, nbytes):
    axes = [axis for axis in axes if axis.size > 1]
    devices = int(np.prod([axis.size for axis in axes]))
    links = sum((2 if axis.wraps else 1) * axis.bandwidth for axis in axes)
    if axes:
        bound = nbytes * (devices - 1) / devices / links
        assert all_gather(nbytes, axes) >= bound * (1 - 1e-9)


@settings(deadline=None)
@given(axes=axes_of_torus, nbytes=sizes_in_bytes)
def test_no_all_to_all_beats_the_bisection(axes, nbytes):
    # Cut an axis of even size in halves: half of each device's bytes cross for every other half.
    for axis in axes:
        if axis.size % 2 == 0:
            crossing = nbytes * axis.size / 4
            links = (2 if axis.wraps else 1) * axis.bandwidth
            assert all_to_all(nbytes, axes) >= crossing / links * (1 - 1e-9)


@settings(deadline=None)
@given(nbytes=st.floats(1e7, 1e12), wraps=st.booleans(), size=st.sampled_from([4, 8, 16]))
def test_two_dimensions_are_faster_than_one(nbytes, wraps, size):
    one = TorusAxis(size, wraps, 45e9, 1e-6)
    whole_in_one = TorusAxis(size * size, wraps, 45e9, 1e-6)
    for function in (all_gather, reduce_scatter, all_reduce, all_to_all):
        assert function(nbytes, [one, one]) < function(nbytes, [whole_in_one])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_axes_of_size_one_are_free(function):
    assert function(1e9, [TorusAxis(1, False, BANDWIDTH, 1e-6)]) == 0.0
    assert function(1e9, []) == 0.0
