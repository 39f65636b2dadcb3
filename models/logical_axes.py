"""Logical names of the dimensions of language models' arguments, by the names of the arguments.

Those of the reference models, and of models that call their parameters as Flax, MaxText, T5, GPT-2
and Llama do. The logical names are those of MaxText's decoders where it has one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_Q, _KV = ("embed", "q_heads", "kv"), ("embed", "kv_heads", "kv")
_MLP_IN, _MLP_OUT = ("embed", "mlp"), ("mlp", "embed")
_OUT = ("q_heads", "kv", "embed")

_KEYS: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("embedding", "embed_tokens", "tok_embed", "wte", "token_embedder"): (("vocab", "embed"),),
    ("positions", "wpe", "position_embedder"): (("positions", "embed"),),
    ("head", "lm_head", "unembed", "logits_dense"): (("embed", "vocab"),),
    ("wq", "query"): (_Q, ("embed", "q_heads")),
    ("wk", "wv", "key", "value"): (_KV, ("embed", "kv_heads")),
    ("q_proj",): (("embed", "q_heads"),),
    ("k_proj", "v_proj"): (("embed", "kv_heads"),),
    ("wqkv", "qkv", "c_attn", "qkv_proj"): (("embed", "qkv", "q_heads", "kv"), ("embed", "qkv")),
    ("wo", "out"): (_OUT, ("q_heads", "embed")),
    ("o_proj", "out_proj"): (("q_heads", "embed"),),
    ("w_gate", "w_up", "gate_proj", "up_proj", "wi", "wi_0", "wi_1", "w1", "w3", "c_fc", "fc1"): (
        _MLP_IN,
    ),
    ("w_down", "down_proj", "w2", "fc2"): (_MLP_OUT,),
    ("bq",): (("q_heads", "kv"),),
    ("bk", "bv"): (("kv_heads", "kv"),),
    ("b_up", "b_gate"): (("mlp",),),
    ("bo", "b_down"): (("embed",),),
    ("router", "gate"): (("embed", "exp"),),
    ("relative",): (("relpos_buckets", "q_heads"),),
}
_NAMES = {key: names for keys, names in _KEYS.items() for key in keys}
_EXPERTS = {key: (("exp", *_NAMES[key][0]),) for key in ("w_gate", "w_up", "w_down")}
_LEAVES = ("kernel", "embedding", "weight", "w", "scale", "bias", "b")
"""What a parameter is called within its module, which then has the name that tells."""
_NORM = re.compile(r"norm|^ln(_|\d|$)|layernorm", re.IGNORECASE)
_KEY = re.compile(r"\['([^']*)'\]|\.(\w+)|\[(\d+)\]")
_BATCH = "[1]"


def decoder_names(paths: Sequence[str], ranks: Sequence[int]) -> dict[str, tuple[str | None, ...]]:
    """Path -> a logical name for each dimension, for the arguments of a language model's step.

    Arguments whose names tell nothing are left out.

    Args:
      paths: of the arguments.
      ranks: their numbers of dimensions; one more than usual is the stack of layers.
    """
    found: dict[str, tuple[str | None, ...]] = {}
    for path, rank in zip(paths, ranks, strict=True):
        names = _names_of(path, rank)
        if names is not None:
            found[path] = names
    return found


def _names_of(path: str, rank: int) -> tuple[str | None, ...] | None:
    if rank == 0:
        return ()
    if path.startswith(_BATCH):
        return ("activation_batch", "activation_length")[:rank] if rank <= 2 else None
    keys = [next(filter(None, match)) for match in _KEY.findall(path)]
    leaf = keys[-1] if keys else ""
    owner = leaf
    if leaf in _LEAVES and len(keys) > 1 and (_tells(keys[-2]) or leaf not in _NAMES):
        owner = keys[-2]
    for alone in _choices(owner, leaf, keys):
        if rank - len(alone) in (0, 1):
            return (("layers",) if rank > len(alone) else ()) + alone
    return None


def _tells(key: str) -> bool:
    return key in _NAMES or bool(_NORM.search(key))


def _choices(owner: str, leaf: str, keys: Sequence[str]) -> Sequence[tuple[str, ...]]:
    """What a parameter's dimensions may be called, without the stack of layers."""
    if _NORM.search(owner):
        return (("norm",),)
    if "routed" in keys and owner in _EXPERTS:
        return _EXPERTS[owner]
    known = _NAMES.get(owner, ())
    if leaf in ("bias", "b") and owner != leaf:
        return tuple(names[1:] if names[0] == "embed" else names[-1:] for names in known)
    return known
