"""The tensors of a program as a tree by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.planner.plan_schema import TensorModel
from shardwright.reports.facts import local_bytes, local_shape
from shardwright.reports.tensors import path_keys


@dataclass(frozen=True)
class Leaf:
    """One tensor.

    Attributes:
      key: the last part of its path.
      local_shape: of its largest shard.
      local_bytes: of that shard.
    """

    key: str
    tensor: TensorModel
    local_shape: list[int]
    local_bytes: float
    pinned: bool


@dataclass(frozen=True)
class Branch:
    """A part of the tree: branches first, then its own tensors, in the order of the program."""

    key: str
    branches: list[Branch] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Tensors below."""
        return len(self.leaves) + sum(branch.count for branch in self.branches)

    @property
    def local_bytes(self) -> float:
        """Bytes on one device of the tensors below."""
        own = sum(leaf.local_bytes for leaf in self.leaves)
        return own + sum(branch.local_bytes for branch in self.branches)


def tensor_tree(
    tensors: Sequence[TensorModel],
    mesh_axes: Mapping[str, int],
    is_pinned: Callable[[str], bool] = lambda path: False,
) -> Branch:
    """Tensors by the parts of their paths; a part with a single branch is joined with it.

    Args:
      tensors: in the order of the program.
      mesh_axes: size of each mesh axis.
      is_pinned: whether the sharding of a path was given by the user.
    """
    root = Branch("")
    for tensor in tensors:
        *parents, key = path_keys(tensor.path) or ("",)
        at = root
        for parent in parents:
            known = next((branch for branch in at.branches if branch.key == parent), None)
            if known is None:
                known = Branch(parent)
                at.branches.append(known)
            at = known
        at.leaves.append(
            Leaf(
                key=key,
                tensor=tensor,
                local_shape=local_shape(tensor, mesh_axes),
                local_bytes=local_bytes(tensor, mesh_axes),
                pinned=is_pinned(tensor.path),
            )
        )
    return _joined(root)


def _joined(branch: Branch) -> Branch:
    branches = [_joined(child) for child in branch.branches]
    if len(branches) == 1 and not branch.leaves and branch.key:
        only = branches[0]
        return Branch(branch.key + only.key, only.branches, only.leaves)
    return Branch(branch.key, branches, branch.leaves)
