"""What a program is, as data: for JSON, free of JAX."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TensorFacts(BaseModel):
    """One input or output."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: str
    shape: list[int]
    dtype: str = Field(description="element type in StableHLO, such as bf16")


class ProgramFacts(BaseModel):
    """A program at a glance."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    fingerprint: str = Field(description="SHA-256 of the module without locations")
    inputs: list[TensorFacts]
    outputs: list[TensorFacts]
    donated: list[str] = Field(description="paths of inputs whose buffers outputs take over")
    mesh: dict[str, int] | None = Field(description="the mesh that shardings inside it name")
    operations: dict[str, int] = Field(
        description="how often each operation occurs, calls inlined, the most frequent first"
    )
