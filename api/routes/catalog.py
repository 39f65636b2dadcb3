"""What can be planned, and on what."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from fastapi import APIRouter, Path

from shardwright.api.access import Reader
from shardwright.api.context import Here
from shardwright.api.facts_schemas import (
    ChipResource,
    ChipSummary,
    HardwareList,
    ModelFacts,
    ModelList,
    SliceFacts,
)
from shardwright.api.problems import ACCESS, problem, responses
from shardwright.hardware_profiles import ChipProfile, chip_names, legal_slices, load_chip
from shardwright.hardware_profiles.slices import product_name

router = APIRouter(prefix="/v1", tags=["catalog"])


@router.get("/hardware", summary="TPU generations", responses=responses(*ACCESS))
def hardware(caller: Reader) -> HardwareList:
    """All TPU generations, oldest first."""
    return HardwareList(items=[_summary(load_chip(name)) for name in chip_names()])


@router.get(
    "/hardware/{chip}",
    summary="One TPU generation",
    responses=responses(*ACCESS, "not-found", "input"),
)
def chip(
    caller: Reader,
    chip: Annotated[
        str,
        Path(pattern=r"^[A-Za-z0-9]{1,16}$", description="of /v1/hardware", examples=["v5e"]),
    ],
) -> ChipResource:
    """Every value of a generation with its source, and its slices."""
    if chip.lower() not in chip_names():
        raise problem(
            "not-found",
            f"there is no chip called {chip}",
            where="chip",
            do=f"Use one of {', '.join(chip_names())}",
        )
    return _chip(chip.lower())


@router.get("/models", summary="Reference models", responses=responses(*ACCESS, "input"))
def models(here: Here, caller: Reader) -> ModelList:
    """The reference models with their default options."""
    return ModelList(items=[ModelFacts.model_validate(one) for one in here.catalog.models()])


def _summary(profile: ChipProfile) -> ChipSummary:
    slices = legal_slices(profile)
    return ChipSummary(
        name=profile.name,
        peak_flops_bf16=profile.peak_flops["bf16"].value,
        hbm_bytes=profile.hbm_bytes.value,
        hbm_bandwidth=profile.hbm_bandwidth.value,
        ici_links_per_chip=profile.ici_links_per_chip.value,
        ici_link_bandwidth=profile.ici_link_bandwidth.value,
        torus_dimensions=profile.torus_dimensions.value,
        devices_per_chip=profile.jax_devices_per_chip.value,
        largest_slice=slices[-1].name,
        slices=len(slices),
        href=f"/v1/hardware/{profile.name}",
    )


@cache
def _chip(name: str) -> ChipResource:
    profile = load_chip(name)
    slices = [
        SliceFacts(
            name=one.name,
            chips=one.chips,
            devices=one.devices,
            hosts=one.hosts,
            product_name=product_name(one),
        )
        for one in legal_slices(profile)
    ]
    return ChipResource(profile=profile.model_dump(mode="json"), slices=slices)
