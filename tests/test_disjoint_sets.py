"""Disjoint sets against the ones of networkx."""

from hypothesis import given
from hypothesis import strategies as st
from networkx.utils import UnionFind

from shardwright.planner.disjoint_sets import DisjointSets

NUMBERS = st.integers(0, 9)


@given(st.lists(st.tuples(NUMBERS, NUMBERS)))
def test_what_is_joined_has_one_root(pairs: list[tuple[int, int]]) -> None:
    sets: DisjointSets[int] = DisjointSets()
    told: UnionFind[int] = UnionFind()
    for a, b in pairs:
        sets.join(a, b)
        told.union(a, b)
    assert set(sets) == set(told.parents)
    for a in sets:
        for b in sets:
            assert (sets.root(a) == sets.root(b)) == (told[a] == told[b])
