"""The programs and slices of the fidelity benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from convnet import convnet
from small_programs import convolutions, encoder, mixture, scanned, unrolled, vocabulary

from shardwright.models.registry import build

Made = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A program on a slice; its mesh is searched where none is given."""

    program: str
    topology: str
    make: Callable[[], Made]
    mesh: dict[str, int] | None = None

    @property
    def name(self) -> str:
        """Program and slice."""
        return f"{self.program} on {self.topology}"


def model(name: str, **options: Any) -> Callable[[], Made]:
    """A reference model."""

    def make() -> Made:
        built = build(name, **options)
        return built.train_step, built.example_args, built.donate_argnums

    return make


_LLAMA: dict[str, Any] = {"layers": 4, "batch": 32, "sequence": 2048}
_GROUPED: dict[str, Any] = {
    "layers": 6, "d_model": 1024, "heads": 16, "kv_heads": 4, "d_ff": 4096,
    "vocab": 32000, "sequence": 1024, "batch": 64,
}  # fmt: skip
_UNROLLED = {"layers": 2, "scan_layers": False}
_SWITCH: dict[str, Any] = {"layers": 4, "batch": 256, "experts": 64}
_MIXTRAL: dict[str, Any] = {"layers": 2, "d_model": 2048, "d_ff": 7168, "heads": 16}
_MIXTRAL |= {"sequence": 2048, "batch": 64}
_FOUR = {"data": 4, "model": 4}
_EIGHT = {"data": 4, "model": 2}
_ONE: dict[str, Any] = {"layers": 1, "scan_layers": False, "batch": 64}

CASES = {
    case.name: case
    for case in (
        Case("gpt2-124m", "v5e:4x4", model("gpt2-124m", batch=64)),
        Case("gpt2-124m", "v4:2x2x4", model("gpt2-124m", batch=64)),
        Case("llama3-8b, 4 layers", "v5e:4x4", model("llama3-8b", **_LLAMA)),
        Case(
            "llama3-8b, 2 layers unrolled",
            "v5e:4x4",
            model("llama3-8b", **{**_LLAMA, **_UNROLLED}),
            {"data": 4, "model": 4},
        ),
        Case("llama3-8b, 4 layers", "v6e:16x16", model("llama3-8b", **{**_LLAMA, "batch": 512})),
        Case("llama3-8b, 4 layers", "v5p:4x4x8", model("llama3-8b", **{**_LLAMA, "batch": 256})),
        Case("grouped heads", "tpu7x:2x2x2", model("llama3-8b", **_GROUPED)),
        Case("grouped heads, unrolled", "v5e:4x4", model("llama3-8b", **{**_GROUPED, **_UNROLLED})),
        Case("grouped heads", "v5p:2x2x4", model("llama3-8b", **{**_GROUPED, "batch": 128})),
        Case("grouped heads, remat dots", "v6e:4x4", model("llama3-8b", **_GROUPED, remat="dots")),
        Case(
            "grouped heads, no remat",
            "v5e:4x4",
            model("llama3-8b", **_GROUPED, remat="none"),
            {"data": 8, "model": 2},
        ),
        Case("switch-base, 4 layers", "v5e:8x8", model("switch-base", **_SWITCH)),
        Case("mixtral, 2 layers", "v6e:4x4", model("mixtral-8x7b", **_MIXTRAL)),
        Case("mlp", "v5e:4x4", model("mlp")),
        Case("mlp, 3 layers", "v6e:4x4", model("mlp", layers=3)),
        Case("mlp, narrow", "v5p:2x2x2", model("mlp", features=2048, hidden=8192)),
        Case("convolutions", "v5e:4x4", lambda: convnet(batch=4096)),
        Case("convolutions, wide", "v5p:2x2x2", lambda: convnet(batch=1024, width=128)),
        Case("t5-base, 4 layers", "v5e:4x4", model("t5-base", layers=4, batch=128)),
        Case("translation, 2 layers", "v4:2x2x2", model("transformer-big", layers=2, batch=128)),
        Case("resnet-50", "v4:2x2x4", model("resnet-50", batch=1024)),
        Case("dense, scanned", "v4:2x2x2", lambda: scanned(16384, layers=4), _EIGHT),
        Case("dense, scanned", "v5e:16x16", lambda: scanned(262144), {"data": 64, "model": 4}),
        Case("dense, unrolled", "tpu7x:2x2x2", lambda: unrolled(65536), _FOUR),
        Case("dense, unrolled", "v5e:4x4", lambda: unrolled(65536), _FOUR),
        *(
            Case("encoder", slice_, lambda: encoder(64, sequence=1024), _EIGHT)
            for slice_ in ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
        ),
        Case("mixture of experts", "v6e:4x4", lambda: mixture(64, experts=16), _FOUR),
        Case("vocabulary", "v5e:4x4", lambda: vocabulary(128, words=32768), _FOUR),
        Case("vocabulary", "tpu7x:2x2x2", lambda: vocabulary(256, words=32768), _FOUR),
        Case("three convolutions", "v6e:2x4", lambda: convolutions(1024), _EIGHT),
        Case("t5-base, 1 layer unrolled", "v5e:2x4", model("t5-base", **_ONE), _EIGHT),
    )
}
