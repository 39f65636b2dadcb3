"""Server-sent events are put together from pieces of any size."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwright.client_events import Event, EventParser

STREAM = (
    "retry: 2000\n\n: comment\n\nid: 1\nevent: progress\ndata: {\ndata:}\n\n"
    "data: a\u2028b\r\n\r\nid: 7\rdata:  two spaces\r\revent: empty\n\nid: 8\ndata: x\n\n"
)
# By hand, by the rules of the standard: an id stays until another comes, one space is dropped.
EXPECTED = [
    Event("progress", "{\n}", "1"),
    Event("message", "a\u2028b", "1"),
    Event("message", " two spaces", "7"),
    Event("message", "x", "8"),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    parser = EventParser()
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(places)]
    assert [e for piece in pieces for e in parser.feed(piece)] == EXPECTED
