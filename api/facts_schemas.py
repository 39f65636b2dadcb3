"""Answers about what there is: programs, chips, models, the service itself."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from shardwright.api.schemas import JobError
from shardwright.planner.program_facts_schema import ProgramFacts


class ProgramLinks(BaseModel):
    """Where a program is."""

    self: str


class ProgramResource(BaseModel):
    """An uploaded program."""

    id: str = Field(description="SHA-256 of its bytes")
    kind: str = Field(description="exported, stablehlo-text or stablehlo-bytecode")
    nbytes: int
    status: Literal["inspecting", "ready", "invalid"]
    created_at: datetime
    facts: ProgramFacts | None = Field(description="once it is ready")
    error: JobError | None = Field(description="where it is invalid")
    links: ProgramLinks


class SliceFacts(BaseModel):
    """A slice that exists."""

    name: str
    chips: int
    devices: int
    hosts: int
    product_name: str = Field(description="what Google sells it under")


class ChipSummary(BaseModel):
    """A TPU generation in a few figures, of one chip."""

    name: str
    peak_flops_bf16: float
    hbm_bytes: int
    hbm_bandwidth: float = Field(description="bytes/s")
    ici_links_per_chip: int
    ici_link_bandwidth: float = Field(description="bytes/s one way")
    torus_dimensions: int
    devices_per_chip: int
    largest_slice: str
    slices: int = Field(description="how many shapes of slices there are")
    href: str


class HardwareList(BaseModel):
    """All TPU generations, oldest first."""

    items: list[ChipSummary]


class ChipResource(BaseModel):
    """All that is known of a TPU generation."""

    profile: dict[str, Any] = Field(
        description="every value with its source; the form that `shardwright plan --chip` takes"
    )
    slices: list[SliceFacts] = Field(description="smallest first")


class ModelFacts(BaseModel):
    """A reference model."""

    name: str
    parameters: int
    tokens_per_step: int = Field(description="tokens of a step, or what unit says")
    unit: Literal["tokens", "images", "examples"]
    model_flops_per_step: int
    options: dict[str, Any] = Field(description="every option with its default")


class ModelList(BaseModel):
    """The reference models."""

    items: list[ModelFacts]


class Health(BaseModel):
    """Whether the service is well."""

    status: Literal["ok"]
    version: str
