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
    its scores to memory unless `attention="flash"`: for one sequence of 8192 and 32 heads in
    float32, 8.6 GB.
  lamda: Thoppilan et al., LaMDA (2022), section 4 (64 layers, relative positions of T5, gated GELU,
    256K tokens a step). Sequences of 1024 and the vocabulary of 32,000 are ours.
  bert: Devlin et al., BERT (2018), section 3 (its layers normalise after, ours before), with the
    batch and optimizer of You et al., Large Batch Optimization for Deep Learning (2019), table 1.
  t5: Raffel et al., Exploring the Limits of Transfer Learning (2020), sections 3.1 and 3.7 (sizes,
    sources of 512 tokens in batches of 2^11), and t5x `configs/models/t5_1_0_*.gin`: targets of
    spans cut from 512 tokens take 114. Trained with Adafactor; here AdamW.
  transformer: Vaswani et al., Attention Is All You Need (2017), table 3, with its vocabulary of
    English and German (section 5.1). Lengths and batch are ours: 25,000 target tokens a step there.
  conformer: Gulati et al., Conformer (2020), table 1, without its LSTM decoder (our loss is CTC),
    with its 80 features (section 3.1) and 1,024 word pieces (3.2). Utterances of 16 s and the batch
    of 2,048 are ours.
  gnmt: Wu et al., Google's Neural Machine Translation System (2016), sections 3.1, 4.1 and 8.3, and
    the four layers and batch of MLPerf Training v0.6 (mlcommons/training, rnn_translator; 32,320
    word pieces). Lengths are ours.
  resnet: He et al., Deep Residual Learning (2015), table 1.
  ssd: Liu et al., SSD (2016), section 3.1, with the backbone, layers and 81 classes of MLPerf
    Training v0.6 (mlcommons/training, single_stage_detector) and the batch of Kumar et al., Scale
    MLPerf-0.6 Models on Google TPU-v3 Pods (2019).
  amoebanet: Real et al., Regularized Evolution (2018); size, images and batch of Huang et al.,
    GPipe (2019), section 3 and table 2.
  unet: Ronneberger et al., U-Net (2015), figure 1, and Cicek et al., 3D U-Net (2016), figure 2.
  dlrm: Naumov et al., DLRM (2019), with the sizes of MLPerf Training 0.7 (recommendation on
    Criteo's terabyte click logs); tables are rounded up to multiples of 4096 rows.
  gshard: Lepikhin et al., GShard (2020), section 4.2 and table 1: 36 layers of which every other
    one is a mixture. They are encoder and decoder layers there, and a decoder only here.
  switch: Fedus et al., Switch Transformers (2021), table 9 (Switch-Base); as for gshard.
  glam: Du et al., GLaM (2021), section 4 and table 4 (64B/64E), with sequences of 1024 and a
    million tokens a step. Its dense layers are gated; here no block is, as its experts are not.
  mixtral: Jiang et al., Mixtral of Experts (2024), table 1. Capacities are ours: it drops nothing.
  deepseek-moe: Dai et al., DeepSeekMoE (2024), section 5.1.2. Its first layer is dense, and here a
    mixture as the others; its gates are not made to sum to one.
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
    "lamda-137b": _sizes(64, 8192, 128, 65536)
    | {
        "head_dim": 128,
        "mlp": "geglu",
        "positions": "relative",
        "tied_embedding": True,
        "vocab": 32000,
        "sequence": 1024,
        "batch": 256,
    },
    "llama2-7b": _LLAMA2 | _sizes(32, 4096, 32, 11008),
    "llama2-70b": _LLAMA2 | _sizes(80, 8192, 64, 28672) | {"kv_heads": 8},
    "llama3-8b": _LLAMA3 | _sizes(32, 4096, 32, 14336),
    "llama3-70b": _LLAMA3 | _sizes(80, 8192, 64, 28672),
    "llama3-405b": _LLAMA3 | _sizes(126, 16384, 128, 53248) | {"batch": 2048},
}

ENCODERS: dict[str, dict[str, Any]] = {
    "bert-large": _GPT
    | _sizes(24, 1024, 16, 4096)
    | {
        "vocab": 30522,
        "sequence": 512,
        "max_positions": 512,
        "batch": 4096,
        "optimizer": "lamb",
        "learning_rate": 4e-4,
        "weight_decay": 0.01,
    },
}

_GSHARD: dict[str, Any] = _sizes(36, 1024, 16, 8192) | {
    "head_dim": 128,
    "norm": "layer",
    "mlp": "gelu",
    "positions": "learned",
    "vocab": 64000,
    "sequence": 1024,
    "batch": 4096,
    "experts_per_token": 2,
    "capacity_factor": 2.0,
    "layers_per_block": 2,
}

MIXTURES: dict[str, dict[str, Any]] = {
    "gshard-37b": _GSHARD | {"experts": 128},
    "gshard-150b": _GSHARD | {"experts": 512},
    "gshard-600b": _GSHARD | {"experts": 2048},
    "switch-base": _sizes(24, 768, 12, 3072)
    | {
        "norm": "rms",
        "mlp": "gelu",
        "vocab": 32128,
        "sequence": 512,
        "batch": 2048,
        "experts": 128,
        "experts_per_token": 1,
        "layers_per_block": 2,
    },
    "glam-64b-64e": _sizes(64, 8192, 128, 32768)
    | {
        "head_dim": 128,
        "mlp": "gelu",
        "positions": "relative",
        "tied_embedding": True,
        "vocab": 256000,
        "sequence": 1024,
        "batch": 1024,
        "experts": 64,
        "experts_per_token": 2,
        "layers_per_block": 2,
    },
    "mixtral-8x7b": _sizes(32, 4096, 32, 14336)
    | {
        "kv_heads": 8,
        "vocab": 32000,
        "rope_theta": 1e6,
        "sequence": 4096,
        "batch": 1024,
        "experts": 8,
        "experts_per_token": 2,
    },
    "deepseek-moe-16b": _sizes(28, 2048, 16, 10944)
    | {
        "vocab": 102400,
        "sequence": 4096,
        "batch": 4608,
        "experts": 64,
        "experts_per_token": 6,
        "expert_d_ff": 1408,
        "shared_experts": 2,
    },
}

_TRANSFORMER: dict[str, Any] = {
    "norm": "layer",
    "mlp": "relu",
    "positions": "sinusoidal",
    "tied_embedding": True,
    "vocab": 37000,
    "sequence": 128,
    "batch": 1024,
}

_T5: dict[str, Any] = {
    "mlp": "relu",
    "positions": "relative",
    "tied_embedding": True,
    "norm_epsilon": 1e-6,
    "vocab": 32128,
    "sequence": 512,
    "target_sequence": 114,
    "batch": 2048,
}

ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5-base": _T5 | _sizes(12, 768, 12, 3072),
    "t5-large": _T5 | _sizes(24, 1024, 16, 4096),
    "t5-3b": _T5 | _sizes(24, 1024, 32, 16384) | {"head_dim": 128},
    "t5-11b": _T5 | _sizes(24, 1024, 128, 65536) | {"head_dim": 128},
    "transformer-base": _TRANSFORMER | _sizes(6, 512, 8, 2048),
    "transformer-big": _TRANSFORMER | _sizes(6, 1024, 16, 4096),
}

_SPEECH: dict[str, Any] = {"frames": 1600, "labels": 64, "classes": 1025, "batch": 2048}

CONFORMERS: dict[str, dict[str, Any]] = {
    "conformer-s": _SPEECH | {"layers": 16, "d_model": 144, "heads": 4},
    "conformer-m": _SPEECH | {"layers": 16, "d_model": 256, "heads": 4},
    "conformer-l": _SPEECH | {"layers": 17, "d_model": 512, "heads": 8},
}

LSTMS: dict[str, dict[str, Any]] = {
    "gnmt": {"layers": 8, "d_model": 1024, "vocab": 32000, "sequence": 64, "batch": 2048},
    "gnmt-mlperf": {"layers": 4, "d_model": 1024, "vocab": 32320, "sequence": 64, "batch": 2048},
}

_MOMENTUM: dict[str, Any] = {
    "optimizer": "momentum",
    "weight_decay": 5e-5,
    "clip_norm": None,
    "learning_rate": 0.1,
}

RESNETS: dict[str, dict[str, Any]] = {
    "resnet-34": _MOMENTUM | {"image": 224, "classes": 1000, "batch": 4096, "block": "basic"},
    "resnet-50": _MOMENTUM | {"image": 224, "classes": 1000, "batch": 4096},
}

AMOEBANETS: dict[str, dict[str, Any]] = {
    "amoebanet-d": _MOMENTUM
    | {"image": 224, "classes": 1000, "batch": 128, "cells": 18, "width": 256},
}

DETECTORS: dict[str, dict[str, Any]] = {
    "ssd-300": _MOMENTUM
    | {
        "image": 300,
        "classes": 81,
        "layers": ((256, 512, 2), (256, 512, 2), (128, 256, 2), (128, 256, 1), (128, 256, 1)),
        "anchors": (4, 6, 6, 6, 4, 4),
        "batch": 2048,
    },
}

UNETS: dict[str, dict[str, Any]] = {
    "unet-2d": _MOMENTUM
    | {
        "image": 512,
        "channels": 1,
        "classes": 2,
        "filters": ((64, 64), (128, 128), (256, 256), (512, 512), (1024, 1024)),
        "batch": 64,
    },
    "unet-3d": _MOMENTUM
    | {
        "dimensions": 3,
        "image": 128,
        "channels": 3,
        "classes": 3,
        "filters": ((32, 64), (64, 128), (128, 256), (256, 512)),
        "halve": False,
        "batch": 32,
    },
}

MLPS: dict[str, dict[str, Any]] = {
    "mlp": {"features": 4096, "hidden": 16384, "layers": 4, "classes": 1024, "batch": 8192},
}

_CRITEO_TABLES = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208,
    11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
"""Categories of each feature of Criteo's terabyte click logs, hashed to 40 million at most."""

DLRMS: dict[str, dict[str, Any]] = {
    "dlrm": _MOMENTUM
    | {
        "features": 13,
        "tables": _CRITEO_TABLES,
        "width": 128,
        "bottom": (512, 256, 128),
        "top": (1024, 1024, 512, 256, 1),
        "row_multiple": 4096,
        "batch": 65536,
        "weight_decay": 0.0,
    },
}
