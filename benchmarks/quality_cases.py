"""The programs of the quality benchmark, and four ways to shard each by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec
from small_programs import (
    Made,
    convolutions,
    encoder,
    mixture,
    scanned,
    unrolled,
    vocabulary,
)

from shardwright.planner.spec_patterns import match_specs, parse_spec

Mesh = dict[str, int]


@dataclass(frozen=True)
class ByHand:
    """A way to shard a program by hand.

    Attributes:
      meshes: on which it may be done.
      patterns: of the paths of arguments, and their shardings in the short form of `parse_spec`;
        arguments without one are replicated.
      cuts: what the program is given of how its activations are cut.
    """

    name: str
    meshes: tuple[Mesh, ...]
    patterns: dict[str, str]
    cuts: dict[str, Any] = field(default_factory=dict)

    def specs(self, args: Any) -> Any:
        """PartitionSpecs of a program's arguments."""
        flat, tree = jax.tree_util.tree_flatten_with_path(args)
        asked = {pattern: parse_spec(spec, pattern) for pattern, spec in self.patterns.items()}
        paths = [jax.tree_util.keystr(path) for path, _ in flat]
        found = match_specs(asked, paths, "specs")
        return tree.unflatten([PartitionSpec(*(spec or ())) for spec in found])


@dataclass(frozen=True)
class Case:
    """A program on a slice; `make` takes what its activations are cut by."""

    name: str
    make: Callable[..., Made]
    topology: str
    by_hand: tuple[ByHand, ...]

    @property
    def slug(self) -> str:
        """Its name as a file's."""
        return "".join(c if c.isalnum() else "-" for c in self.name)


_ALL = ({"data": 8},)
_TWO = ({"data": 4, "model": 2}, {"data": 2, "model": 4})
_ROWS = "[1]*"


def _dense(
    cut: tuple[str | None, ...], first: str, last: str, *, stacked: bool
) -> tuple[ByHand, ...]:
    """Data parallel, FSDP (Rajbhandari et al., 2020), tensor parallel (Shoeybi et al., 2019), both.

    Args:
      cut: of the activations.
      first, last: names of the weights into and out of the inner dimension.
      stacked: whether weights have a leading dimension of layers.
    """
    stack = "None," if stacked else ""

    def ways(**axes: str) -> dict[str, str]:
        return {f"*['{name}']": stack + spec for name, spec in axes.items()} | {_ROWS: "data"}

    cuts = {"cut": cut}
    return (
        ByHand("data parallel", _ALL, {_ROWS: "data"}, cuts),
        ByHand("FSDP", _ALL, ways(**{first: "data", last: "data"}), cuts),
        ByHand("tensor parallel", _TWO, ways(**{first: "None,model", last: "model"}), cuts),
        ByHand("FSDP x tensor", _TWO, ways(**{first: "data,model", last: "model,data"}), cuts),
    )


_GROUPS = {"cut": ("data", None, None)}
_MIXTURE = (
    ByHand("data parallel", _ALL, {_ROWS: "data"}, _GROUPS),
    ByHand(
        "FSDP", _ALL, {"*['up']": "None,data", "*['down']": "None,data", _ROWS: "data"}, _GROUPS
    ),
    # Experts over the devices that the batch is over, as in GShard (2020), section 3.2.
    ByHand(
        "expert parallel",
        _ALL,
        {"*['up']": "data", "*['down']": "data", _ROWS: "data"},
        _GROUPS | {"expert_cut": ("data", None, None, None)},
    ),
    ByHand(
        "tensor parallel",
        _TWO,
        {"*['up']": "None,None,model", "*['down']": "None,model", _ROWS: "data"},
        _GROUPS,
    ),
)

_CUT = ({"data": 4, "space": 2}, {"data": 2, "space": 4})
_IMAGES = {"cut": ("data", None, None, None)}
_CUT_IMAGES = {"cut": ("data", "space", None, None)}
_CONVOLUTIONS = (
    ByHand("data parallel", _ALL, {_ROWS: "data"}, _IMAGES),
    ByHand("FSDP", _ALL, {"[0]*": "None,None,data", _ROWS: "data"}, _IMAGES),
    ByHand("data x spatial", _CUT, {_ROWS: "data,space"}, _CUT_IMAGES),
    ByHand(
        "channel parallel",
        _TWO,
        {"[0]*": "None,None,None,model", _ROWS: "data"},
        {"cut": ("data", None, None, "model")},
    ),
)

CASES = (
    Case(
        "dense, scanned",
        lambda **cuts: scanned(16384, layers=4, **cuts),
        "v5e:2x4",
        _dense(("data", None), "up", "down", stacked=True),
    ),
    Case(
        "dense, unrolled",
        lambda **cuts: unrolled(32768, **cuts),
        "v5e:2x4",
        _dense(("data", None), "up", "down", stacked=False),
    ),
    Case(
        "encoder",
        lambda **cuts: encoder(64, sequence=1024, **cuts),
        "v6e:2x4",
        _dense(("data", None, None), "qkv", "out", stacked=False),
    ),
    Case("mixture of experts", lambda **cuts: mixture(64, **cuts), "v5e:2x4", _MIXTURE),
    Case("convolutions", lambda **cuts: convolutions(256, **cuts), "v5e:2x4", _CONVOLUTIONS),
    Case(
        "vocabulary",
        lambda **cuts: vocabulary(64, sequence=512, words=32768, **cuts),
        "v5p:2x2x2",
        _dense(("data", None, None), "head", "embedding", stacked=False),
    ),
)
