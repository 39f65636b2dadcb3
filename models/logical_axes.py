"""Logical names of the dimensions of the reference models' arguments.

The names are those of MaxText's decoders where it has one.
"""

from __future__ import annotations

from collections.abc import Sequence

_DECODER = {
    "embedding": ("vocab", "embed"),
    "positions": ("positions", "embed"),
    "head": ("embed", "vocab"),
    "wq": ("embed", "q_heads", "kv"),
    "wk": ("embed", "kv_heads", "kv"),
    "wv": ("embed", "kv_heads", "kv"),
    "wo": ("q_heads", "kv", "embed"),
    "w_gate": ("embed", "mlp"),
    "w_up": ("embed", "mlp"),
    "w_down": ("mlp", "embed"),
    "bq": ("q_heads", "kv"),
    "bk": ("kv_heads", "kv"),
    "bv": ("kv_heads", "kv"),
    "b_up": ("mlp",),
}
_BATCH = "[1]"


def decoder_names(paths: Sequence[str], ranks: Sequence[int]) -> dict[str, tuple[str | None, ...]]:
    """Path -> a logical name for each dimension, for arguments of a decoder's train step.

    Args:
      paths: of the arguments.
      ranks: their numbers of dimensions; one more than usual is the stack of layers.
    """
    found: dict[str, tuple[str | None, ...]] = {}
    for path, rank in zip(paths, ranks, strict=True):
        key = path.rpartition("['")[2].removesuffix("']")
        if path.startswith(_BATCH) and rank:
            found[path] = ("activation_batch", "activation_length")[:rank]
        elif key in _DECODER and rank - len(_DECODER[key]) in (0, 1):
            stacked: tuple[str | None, ...] = ("layers",)
            found[path] = (stacked if rank > len(_DECODER[key]) else ()) + _DECODER[key]
    return found
