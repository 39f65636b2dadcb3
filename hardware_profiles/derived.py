"""Chips told by how they differ from a known one."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile, load_chip, parse_chip

_EXAMPLE = (
    'Write name = "mine", base = "v5p", source = "where the values are from" and a table [values] '
    "of lines such as hbm_bandwidth = 3.3e12"
)


class _Derived(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    base: str
    source: str = Field(min_length=1)
    values: dict[str, Any] = Field(min_length=1)


def derive_chip(
    base: ChipProfile, name: str, values: Mapping[str, Any], source: str, where: str = "chip"
) -> ChipProfile:
    """A chip that differs from another.

    Args:
      base: the other chip.
      name: of the new one, which also is the prefix of its products.
      values: field of `ChipProfile` -> its value in the field's unit; of `peak_flops` and
        `f32_matmul_passes` only what is given differs.
      source: where the values are from.

    Raises:
      InputError: there is no such field, or a value is of no use.
    """
    data = base.model_dump(mode="json")
    data |= {"name": name, "like": base.generation}
    given = {"product_prefixes": [name], "device_kinds": [], **values}
    for field, value in given.items():
        if field not in data or field in ("name", "like", "calibration"):
            near = get_close_matches(field, data, n=3) or ["hbm_bandwidth", "ici_link_bandwidth"]
            raise InputError(
                f"a chip has no {field}",
                where=where,
                do=f"Fields near it are {', '.join(near)}; shardwright hardware v5e --json has all",
            )
        told: Any = {"value": value, "source": source}
        if field == "peak_flops" and isinstance(value, Mapping):
            told = data[field] | {k: {"value": v, "source": source} for k, v in value.items()}
        elif isinstance(value, Mapping) and field == "f32_matmul_passes":
            told["value"] = data[field]["value"] | dict(value)
        data[field] = told
    return parse_chip(data, where=where)


def parse_derived(data: Mapping[str, Any], where: str) -> ChipProfile:
    """A chip from the data of a file that names its base.

    Raises:
      InputError: it is malformed, or the base is not known.
    """
    try:
        told = _Derived.model_validate(dict(data))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise InputError("; ".join(faults[:5]), where=where, do=_EXAMPLE) from None
    return derive_chip(load_chip(told.base), told.name, told.values, told.source, where)
