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
      model: a reference model, with `options` changed.
      paper: what the paper shards, in words.
      compiles: whether the TPU compiler takes minutes for the planned program, not hours.
    """

    name: str
    source: str
    model: str
    options: dict[str, Any]
    topology: str
    paper: str
    hand: HandMade
    compiles: bool = True


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
