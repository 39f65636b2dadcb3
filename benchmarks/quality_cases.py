"""The programs of the quality benchmark, and four ways to shard each by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from experts import EXPERTS
from experts import Expert as DecoderExpert
from jax.sharding import PartitionSpec
from system_rows import SpecsOf, by_pattern, fully_sharded, replicated

from shardwright.models.registry import ReferenceModel

Mesh = dict[str, int]


@dataclass(frozen=True)
class ByHand:
    """A way to shard a program by hand.

    Attributes:
      meshes: on which it may be done.
      specs: from the model and a mesh to PartitionSpecs of its arguments.
      options: of the model, with the mesh axes of its activations.
    """

    name: str
    meshes: tuple[Mesh, ...]
    specs: Callable[[ReferenceModel, Mesh], Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A program on a slice."""

    name: str
    model: str
    options: dict[str, Any]
    topology: str
    by_hand: tuple[ByHand, ...]

    @property
    def slug(self) -> str:
        """Its name as a file's."""
        return "".join(c if c.isalnum() else "-" for c in self.name)


def _decoder(expert: DecoderExpert, devices: int) -> ByHand:
    def specs(model: ReferenceModel, mesh: Mesh) -> Any:
        return expert.state_specs(model.example_args[0], mesh), PartitionSpec("data")

    return ByHand(
        expert.name,
        tuple(expert.meshes(devices)),
        specs,
        {"residual_axes": expert.residual_axes},
    )


def _by_path(specs_of: SpecsOf) -> Callable[[ReferenceModel, Mesh], Any]:
    def specs(model: ReferenceModel, mesh: Mesh) -> Any:
        flat, tree = jax.tree_util.tree_flatten_with_path(model.example_args)
        found = specs_of(
            [jax.tree_util.keystr(path) for path, _ in flat], [leaf.shape for _, leaf in flat], mesh
        )
        return tree.unflatten([PartitionSpec(*spec) for spec in found])

    return specs


_DEVICES = 8
_DECODERS = tuple(_decoder(expert, _DEVICES) for expert in EXPERTS[:4])
"""Data parallel, FSDP, tensor parallel, FSDP x tensor."""

_ALL = ({"data": 8},)
_RESIDUAL = {"residual_axes": ("data", None, None)}
_MIXTURE = (
    ByHand("data parallel", _ALL, _by_path(replicated("data")), _RESIDUAL),
    ByHand("FSDP", _ALL, _by_path(fully_sharded("data")), _RESIDUAL),
    # Experts over the devices that the batch is over, as in GShard (2020), section 3.2.
    ByHand(
        "expert parallel",
        _ALL,
        _by_path(
            lambda paths, shapes, mesh: [
                ("data",) if path[:3] == "[1]" else (None, "data") if "['routed']" in path else ()
                for path in paths
            ]
        ),
        {
            **_RESIDUAL,
            "expert_axes": ("data", None, None, None),
            "token_axes": (None, "data", None, None),
        },
    ),
    ByHand(
        "tensor parallel",
        ({"data": 4, "model": 2}, {"data": 2, "model": 4}),
        _by_path(
            by_pattern(
                batch="data",
                wq="None,None,model",
                wk="None,None,model",
                wv="None,None,model",
                wo="None,model",
                w_gate="None,None,None,model",
                w_up="None,None,None,model",
                w_down="None,None,model",
                embedding="model",
                head="None,model",
            )
        ),
        _RESIDUAL,
    ),
)

_CUT = ({"data": 4, "space": 2}, {"data": 2, "space": 4})
_IMAGES = (
    ByHand("data parallel", _ALL, _by_path(replicated("data"))),
    ByHand("FSDP", _ALL, _by_path(fully_sharded("data"))),
    ByHand("data x spatial", _CUT, _by_path(replicated("data,space"))),
    ByHand("FSDP x spatial", _CUT, _by_path(fully_sharded("data,space"))),
)
_CLASSES = (
    *_IMAGES[:2],
    *(
        ByHand(name, _CUT, _by_path(by_pattern(images="data,space", labels="data")))
        for name in ("data x spatial",)
    ),
    ByHand(
        "channel parallel",
        ({"data": 4, "model": 2}, {"data": 2, "model": 4}),
        _by_path(by_pattern(batch="data", kernel="None,None,None,model")),
    ),
)

_LEAN: dict[str, Any] = {"optimizer": "momentum", "clip_norm": None}
"""Fewer kernels to compile, with one moment of the optimizer's state."""
_DENSE: dict[str, Any] = _LEAN | {
    "layers": 4, "d_model": 1024, "heads": 8, "kv_heads": 8, "d_ff": 4096, "vocab": 8192,
    "sequence": 512, "batch": 64, "remat": "none",
}  # fmt: skip
_EXPERTS_8: dict[str, Any] = _LEAN | {
    "layers": 2, "d_model": 1024, "heads": 8, "kv_heads": 8, "d_ff": 2048, "experts": 8,
    "vocab": 8192, "sequence": 512, "batch": 32, "remat": "none",
}  # fmt: skip
_BERT: dict[str, Any] = _LEAN | {"layers": 4, "batch": 128, "vocab": 8192, "sequence": 256}
_UNET: dict[str, Any] = {"filters": ((64, 64), (128, 128)), "image": 256, "batch": 32}
_RESNET: dict[str, Any] = {"depths": (1, 1, 1, 1), "image": 128, "batch": 256}
_UNROLLED = {**_DENSE, "layers": 1, "scan_layers": False}

CASES = (
    Case("dense, scanned", "llama3-8b", _DENSE, "v5e:2x4", _DECODERS),
    Case("dense, unrolled", "llama3-8b", _UNROLLED, "v5e:2x4", _DECODERS),
    Case("encoder", "bert-large", _BERT, "v6e:2x4", _DECODERS),
    Case("mixture of experts", "mixtral-8x7b", _EXPERTS_8, "v5e:2x4", _MIXTURE),
    Case("U-Net", "unet-2d", _UNET, "v5e:2x4", _IMAGES),
    Case("ResNet", "resnet-50", _RESNET, "v5p:2x2x2", _CLASSES),
)
