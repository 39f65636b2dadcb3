"""Sizes of published models.

Batches are the published tokens per step, or of that order where a paper gives none for the size.

Sources:
  gpt2: Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3, and
    the released `hparams.json` of 124M.
  gpt3: Brown et al., Language Models are Few-Shot Learners (2020), table 2.1, with d_model 5120 for
    13B, which is its 40 heads of 128 and gives its 12,850M parameters (the table prints 5140).
    Attention here is dense in every layer where GPT-3 alternates with banded sparse layers.
  llama2: Touvron et al., Llama 2 (2023), section 2.2, and the released `params.json`.
  llama3: Llama Team, The Llama 3 Herd of Models (2024), table 3 and section 3.4.1. Trained on 8192
    tokens a sequence, which `sequence=8192` gives. The default is 2048, since attention here writes
    its scores to memory: for one sequence of 8192 and 32 heads in float32, 8.6 GB.
"""

from typing import Any

_GPT: dict[str, Any] = {
    "norm": "layer",
    "mlp": "gelu",
    "positions": "learned",
    "biases": True,
    "tied_embedding": True,
    "vocab": 50257,
}
_LLAMA2: dict[str, Any] = {"vocab": 32000, "sequence": 4096, "batch": 1024}
_LLAMA3: dict[str, Any] = {
    "vocab": 128256,
    "sequence": 2048,
    "batch": 1024,
    "kv_heads": 8,
    "rope_theta": 500_000.0,
}


def _sizes(layers: int, d_model: int, heads: int, d_ff: int) -> dict[str, Any]:
    return {"layers": layers, "d_model": d_model, "heads": heads, "d_ff": d_ff}


DECODERS: dict[str, dict[str, Any]] = {
    "gpt2-124m": _GPT
    | _sizes(12, 768, 12, 3072)
    | {"sequence": 1024, "max_positions": 1024, "batch": 512},
    "gpt3-13b": _GPT
    | _sizes(40, 5120, 40, 20480)
    | {"sequence": 2048, "max_positions": 2048, "batch": 1024},
    "gpt3-175b": _GPT
    | _sizes(96, 12288, 96, 49152)
    | {"sequence": 2048, "max_positions": 2048, "batch": 1536},
    "llama2-7b": _LLAMA2 | _sizes(32, 4096, 32, 11008),
    "llama2-70b": _LLAMA2 | _sizes(80, 8192, 64, 28672) | {"kv_heads": 8},
    "llama3-8b": _LLAMA3 | _sizes(32, 4096, 32, 14336),
    "llama3-70b": _LLAMA3 | _sizes(80, 8192, 64, 28672),
    "llama3-405b": _LLAMA3 | _sizes(126, 16384, 128, 53248) | {"batch": 2048},
}

MLPS: dict[str, dict[str, Any]] = {
    "mlp": {"features": 4096, "hidden": 16384, "layers": 4, "classes": 1024, "batch": 8192},
}
