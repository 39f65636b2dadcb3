"""The systems of the table: a model, a slice, and the sharding that its paper writes by hand.

Sizes that a paper does not give are ours. Optimizers are AdamW where a paper's is Adafactor, and
layers normalise before, where some papers' normalise after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shardwright.planner.spec_patterns import match_specs, parse_spec

Spec = tuple[str | tuple[str, ...] | None, ...]
SpecsOf = Callable[[Sequence[str], Sequence[tuple[int, ...]], Mapping[str, int]], list[Spec]]
"""From the paths and shapes of all arguments, and the mesh, to their shardings."""


@dataclass(frozen=True)
class HandMade:
    """A sharding that a paper writes by hand.

    Attributes:
      mesh: axis name -> size.
      specs: of the arguments.
      options: of the model, with the mesh axes of its activations.
    """

    mesh: dict[str, int]
    specs: SpecsOf
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """A row.

    Attributes:
      name: of the system.
      source: of its sharding.
      model: a reference model, or a file beside this one that describes it, with `options` changed.
      paper: what the paper shards, in words.
      compiles: whether the TPU compiler takes minutes for the planned program, not hours.
      choices: options that our plan chooses between, and their values.
    """

    name: str
    source: str
    model: str
    options: dict[str, Any]
    topology: str
    paper: str
    hand: HandMade
    compiles: bool = True
    choices: dict[str, list[Any]] = field(default_factory=dict)


def by_pattern(**patterns: str) -> SpecsOf:
    """Shardings by the last key of a path; those not named, and moments of those, are replicated.

    A sharding is in the short form of `parse_spec`; "batch" is that of every array of the batch.
    """

    def specs(
        paths: Sequence[str], shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int]
    ) -> list[Spec]:
        asked = {
            "[1]*" if key == "batch" else f"*['{key}']": parse_spec(text, key)
            for key, text in patterns.items()
        }
        return [spec or () for spec in match_specs(asked, paths, "specs")]

    return specs


def optimizer_state_sharded(batch: str) -> SpecsOf:
    """Parameters whole, every array of optimizer state cut over all axes along one dimension.

    The dimension is the first that divides, as the paper takes one that needs no padding.

    Source: Xu et al., Automatic Cross-Replica Sharding of Weight Update (2020), section 4.2.
    """
    return _state_cut(batch, ("opt_state",))


def fully_sharded(batch: str) -> SpecsOf:
    """Parameters and optimizer state cut over all axes along one dimension.

    Source: Rajbhandari et al., ZeRO (2020), section 5.3 (stage 3).
    """
    return _state_cut(batch, ("opt_state", "params"))


def _state_cut(batch: str, parts: Sequence[str]) -> SpecsOf:
    def specs(
        paths: Sequence[str], shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int]
    ) -> list[Spec]:
        def of(path: str, shape: tuple[int, ...]) -> Spec:
            if path.startswith("[1]"):
                return parse_spec(batch, "batch")
            if not any(path.startswith(f"[0]['{part}']") for part in parts):
                return ()
            for dim, size in enumerate(shape):
                if size % prod(mesh.values()) == 0:
                    return (*[None] * dim, tuple(mesh))
            return ()

        return [of(path, shape) for path, shape in zip(paths, shapes, strict=True)]

    return specs


def replicated(batch: str) -> SpecsOf:
    """The batch alone is cut."""
    return _state_cut(batch, ())


def _images_in_space(
    paths: Sequence[str], shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int]
) -> list[Spec]:
    """The batch over one axis; of images, their first dimension of space over the other."""
    return [
        ("data", "space") if "['images']" in path else ("data",) if path.startswith("[1]") else ()
        for path in paths
    ]


def _rows_of_tables(
    paths: Sequence[str], shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int]
) -> list[Spec]:
    """Tables that divide by row, and the batch, over all devices."""
    devices = prod(mesh.values())
    return [
        ("data",)
        if path.startswith("[1]") or ("['tables']" in path and shape[0] % devices == 0)
        else ()
        for path, shape in zip(paths, shapes, strict=True)
    ]


def _stages(
    paths: Sequence[str], shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int]
) -> list[Spec]:
    """Stacked layers and the vocabulary over the stages, the batch whole."""
    return [
        ("stage",)
        if "['layers']" in path and shape
        else (None, "stage")
        if path.endswith(("['embedding']", "['head']"))
        else ()
        for path, shape in zip(paths, shapes, strict=True)
    ]


def _tensor_parallel_serving(
    paths: Sequence[str], shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int]
) -> list[Spec]:
    """Heads, their caches, d_ff and the vocabulary over all devices, the batch whole."""
    dims = {
        "wq": 1, "wk": 1, "wv": 1, "wo": 0, "w_up": 1, "w_gate": 1, "w_down": 0, "embedding": 0,
        "head": 1,
    }  # fmt: skip

    def of(path: str) -> Spec:
        if path.startswith("[1]") and not path.endswith("['position']"):
            return (None, "model")
        name = path.rpartition("['")[2].removesuffix("']")
        return (*[None] * dims[name], "model") if name in dims else ()

    return [of(path) for path in paths]


def _experts_and_fsdp(
    paths: Sequence[str], shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int]
) -> list[Spec]:
    """Experts over one axis, all other weights and the batch over both."""
    both = tuple(mesh)

    def of(path: str, shape: tuple[int, ...]) -> Spec:
        if path.startswith("[1]"):
            return (both,)
        if "['routed']" in path:
            return (None, "expert", "data")
        stacked = int("['layers']" in path)
        cut = [d for d in range(stacked, len(shape)) if shape[d] % prod(mesh.values()) == 0]
        return (*[None] * cut[0], both) if cut else ()

    return [of(path, shape) for path, shape in zip(paths, shapes, strict=True)]


_GSPMD_64B = {
    "layers": 32,
    "d_model": 8192,
    "heads": 128,
    "head_dim": 256,
    "d_ff": 65536,
    "biases": False,
    "vocab": 32000,
    "sequence": 1024,
    "max_positions": 1024,
    "batch": 64,
    "tied_embedding": False,
}

GPIPE_TRANSFORMER: dict[str, Any] = {
    "layers": 48, "d_model": 2048, "d_ff": 8192, "heads": 32, "kv_heads": 32, "sequence": 1024,
    "vocab": 32000, "norm": "layer", "mlp": "gelu", "positions": "sinusoidal", "clip_norm": None,
}  # fmt: skip
"""The Transformer of GPipe's table 2; norms, activation and optimizer are ours."""

SYSTEMS: tuple[System, ...] = (
    System(
        "GSPMD, dense language model",
        "Xu et al., GSPMD (2021), section 5.1, table 1 (2D finalized)",
        "gpt3-175b",
        _GSPMD_64B,
        "v3:8x8",
        "weights and activations cut in two dimensions, X on batch and Y on the model dimension",
        HandMade(
            {"x": 8, "y": 16},
            by_pattern(
                batch="x",
                wq="None,x,y",
                wk="None,x,y",
                wv="None,x,y",
                wo="None,y,None,x",
                w_up="None,x,y",
                w_down="None,y,x",
                embedding="y,x",
                head="x,y",
            ),
            {"residual_axes": ("x", None, "y")},
        ),
    ),
    System(
        "GShard, 600B mixture of experts",
        "Lepikhin et al., GShard (2020), section 3.2",
        "gshard-600b",
        {},
        "v3:32x32",
        "experts and the batch over all cores, all else replicated",
        HandMade(
            {"d": 2048},
            lambda paths, shapes, mesh: [
                ("d",) if path.startswith("[1]") else (None, "d") if "['routed']" in path else ()
                for path in paths
            ],
            {
                "residual_axes": ("d", None, None),
                "expert_axes": ("d", None, None, None),
                "token_axes": (None, "d", None, None),
            },
        ),
    ),
    System(
        "Weight-update sharding, BERT-large with LAMB",
        "Xu et al., Automatic Cross-Replica Sharding of Weight Update (2020), section 4.2",
        "bert-large",
        {"batch": 4096, "vocab": 30528},
        "v3:16x16",
        "batch over all cores; optimizer state and update cut over all, weights gathered",
        HandMade(
            {"data": 512},
            optimizer_state_sharded("data"),
            {"residual_axes": ("data", None, None)},
        ),
    ),
    System(
        "Weight-update sharding, ResNet-50 with momentum",
        "Xu et al., Automatic Cross-Replica Sharding of Weight Update (2020), section 4.2",
        "resnet-50",
        {"batch": 4096, "norm_groups": 64},
        "v3:16x16",
        "batch over all cores; optimizer state and update cut over all, weights gathered",
        HandMade({"data": 512}, optimizer_state_sharded("data")),
    ),
    System(
        "2-D torus gradient summation, ResNet-50",
        "Ying et al., Image Classification at Supercomputer Scale (2018), sections 3.3 and 3.4",
        "resnet-50",
        {"batch": 32768, "norm_groups": 512},
        "v3:32x32",
        "batch over all cores, gradients added up over both dimensions of the torus, batch norm "
        "over groups of 64 images",
        HandMade({"data": 2048}, replicated("data")),
    ),
    System(
        "Spatial partitioning, 3-D U-Net",
        "Xu et al., GSPMD (2021), section 5.6",
        "unet-3d",
        {"image": 256, "batch": 4},
        "v3:4x8",
        "one dimension of space over 16 cores, the batch over 4",
        HandMade({"data": 4, "space": 16}, by_pattern(batch="data,space")),
    ),
    System(
        "Spatial partitioning, 2-D U-Net",
        "Kumar et al., Scale MLPerf-0.6 Models on Google TPU-v3 Pods (2019), section 2 (spatial "
        "partitioning)",
        "unet-2d",
        {"image": 1024, "batch": 16},
        "v3:4x8",
        "one dimension of space over 4 cores, the batch over 16",
        HandMade({"data": 16, "space": 4}, by_pattern(batch="data,space")),
    ),
    System(
        "Spatial partitioning, ResNet-50 at large images",
        "Kumar et al., Scale MLPerf-0.6 Models on Google TPU-v3 Pods (2019), section 2 (spatial "
        "partitioning)",
        "resnet-50",
        {"image": 1024, "batch": 16},
        "v3:4x8",
        "one dimension of space over 4 cores, the batch over 16",
        HandMade({"data": 16, "space": 4}, by_pattern(images="data,space", labels="data")),
    ),
    System(
        "Spatial partitioning, SSD",
        "Kumar et al., Scale MLPerf-0.6 Models on Google TPU-v3 Pods (2019), section 2 (spatial "
        "partitioning)",
        "ssd-300",
        {"batch": 16},
        "v3:4x8",
        "one dimension of space over 4 cores, the batch over 16",
        HandMade({"data": 16, "space": 4}, _images_in_space),
    ),
    System(
        "GPipe, 48-layer Transformer",
        "Huang et al., GPipe (2019), table 2 (K = 8, M = 32)",
        "llama3-8b",
        GPIPE_TRANSFORMER | {"batch": 32, "remat": "full"},
        "v3:2x2",
        "8 stages of 6 layers, 32 microbatches",
        HandMade({"stage": 8}, _stages, {"stages": 8, "microbatches": 32, "stage_axis": "stage"}),
        choices={"stages": [1, 2, 4, 8]},
    ),
    System(
        "Lingvo, GNMT from a file",
        "Shen et al., Lingvo (2019), section 3 (synchronous replicas); Wu et al., GNMT (2016)",
        "lingvo_gnmt.toml",
        {},
        "v3:8x8",
        "batch over all cores, weights replicated",
        HandMade({"data": 128}, replicated("data")),
    ),
    System(
        "Serving, decoding with a cache",
        "Pope et al., Efficiently Scaling Transformer Inference (2022), sections 3.2.1 and 3.3 (1D "
        "weight-stationary, attention cut over heads)",
        "llama3-8b",
        {"step": "decode", "layers": 8, "batch": 64, "context": 8192},
        "v5e:2x4",
        "heads, their caches, d_ff and the vocabulary over all chips",
        HandMade({"model": 8}, _tensor_parallel_serving),
    ),
    System(
        "Mixture of few experts, Mixtral 8x7B",
        "AI-Hypercomputer/maxtext, `configs/base.yml`, logical_axis_rules (expert and fsdp)",
        "mixtral-8x7b",
        {"batch": 512},
        "v5p:4x4x8",
        "experts over 8 chips, all else and the batch over these and 16 (FSDP)",
        HandMade(
            {"data": 16, "expert": 8},
            _experts_and_fsdp,
            {"residual_axes": (("data", "expert"), None, None)},
        ),
    ),
    System(
        "Mesh-TensorFlow, Transformer",
        "Shazeer et al., Mesh-TensorFlow (2018), section 6 (batch to one dimension of the mesh; "
        "vocabulary, d_ff and heads to the other)",
        "llama2-7b",
        {
            "norm": "layer",
            "mlp": "gelu",
            "layers": 6,
            "d_model": 1024,
            "heads": 256,
            "head_dim": 128,
            "d_ff": 262144,
            "vocab": 32768,
            "sequence": 256,
            "batch": 512,
        },
        "v2:16x16",
        "batch over 16 (rows), d_ff, heads and vocabulary over 32 (columns)",
        HandMade(
            {"rows": 16, "cols": 32},
            by_pattern(
                batch="rows",
                wq="None,None,cols",
                wk="None,None,cols",
                wv="None,None,cols",
                wo="None,cols",
                w_up="None,None,cols",
                w_down="None,cols",
                embedding="cols",
                head="None,cols",
            ),
            {"residual_axes": ("rows", None, None)},
        ),
    ),
    System(
        "DLRM",
        "Naumov et al., DLRM (2019), section 4: model parallelism for the tables, data parallelism "
        "for the networks",
        "dlrm",
        {},
        "v3:4x4",
        "tables by row and the batch over all cores, networks replicated",
        HandMade({"data": 32}, _rows_of_tables),
    ),
)
