"""Disjoint sets of things, joined two at a time.

NetworkX has this too, but importing it takes half a second of every plan's start.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class DisjointSets(Generic[Item]):
    """Sets of items; an item that is asked for is in one of its own until it is joined."""

    def __init__(self) -> None:
        self._parents: dict[Item, Item] = {}

    def __iter__(self) -> Iterator[Item]:
        """All items, in the order in which they were first asked for."""
        return iter(list(self._parents))

    def root(self, item: Item) -> Item:
        """The item that stands for the set of this one."""
        parents = self._parents
        parents.setdefault(item, item)
        root = item
        while parents[root] != root:
            root = parents[root]
        while item != root:  # shorter ways for later
            parents[item], item = root, parents[item]
        return root

    def join(self, a: Item, b: Item) -> None:
        """Makes the sets of two items one."""
        self._parents[self.root(a)] = self.root(b)
