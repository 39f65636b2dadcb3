"""What people ask of the planner, checked before any work is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
)

from shardwright.axis_names import AXIS_NAME_HELP, is_axis_name
from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.planner.spec_patterns import PartialSpec, partial_spec


def _whole(value: Any) -> Any:
    """An integer of any library as Python's; a float, a bool or a string stays and is refused."""
    if isinstance(value, bool):
        return value
    try:
        return index(value)
    except TypeError:
        return value


def _axis_name(name: Any) -> Any:
    if isinstance(name, str) and not is_axis_name(name):
        raise ValueError(f"{name!r} is not a name of {AXIS_NAME_HELP}")
    return name


def _positions(value: Any) -> Any:
    if isinstance(_whole(value), int):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _shape(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _specs(value: Any) -> Any:
    """Shardings by path or source line, in one form."""
    if not isinstance(value, Mapping):
        return value
    return {path: partial_spec(spec, f"pinned {path}") for path, spec in value.items()}


def _profile(value: Any) -> Any:
    if value is not None and not isinstance(value, ChipProfile):
        raise ValueError("a chip is a profile as `shardwright.hardware_profiles` loads it")
    return value


_Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
_Size = Annotated[_Whole, Field(ge=1)]
_AxisName = Annotated[StrictStr, BeforeValidator(_axis_name)]
_Shape = Annotated[dict[_AxisName, _Size], BeforeValidator(_shape), Field(min_length=1)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Request(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, strict=True
    )

    topology: StrictStr
    donate_argnums: Annotated[tuple[_Whole, ...], BeforeValidator(_positions)]
    model_flops: Annotated[_Number, Field(ge=0)] | None
    chip: Annotated[ChipProfile | None, BeforeValidator(_profile)]


class PlanRequest(_Request):
    """The options of `plan`, as documented there."""

    mesh: _Shape | None
    pinned: Annotated[dict[StrictStr, PartialSpec], BeforeValidator(_specs)] | None
    memory_fraction: Annotated[_Number, Field(gt=0, le=1)]
    time_limit_s: Annotated[_Number, Field(gt=0)]
    seed: Annotated[_Whole, Field(ge=0)]
    name: StrictStr | None
    tokens_per_step: Annotated[_Number, Field(gt=0)] | None
    refine: Annotated[_Whole, Field(ge=0, le=32)] = 0
    layout: Literal["free", "named"] = "free"
    logical_axes: dict[StrictStr, tuple[StrictStr | None, ...]] | None = None
    on_progress: Callable[..., Any] | None


class EvaluateRequest(_Request):
    """The options of `evaluate`, as documented there."""

    mesh: _Shape


_Checked = TypeVar("_Checked", bound=_Request)


def checked(kind: type[_Checked], where: str, **options: Any) -> _Checked:
    """The options as a request.

    Raises:
      InputError: an option has the wrong type or is out of range; says each.
    """
    try:
        return kind(**options)
    except ValidationError as error:
        faults = dict.fromkeys(
            f"{_path(fault['loc'])} is {_shown(fault['input'])}: {_reason(fault['msg'])}"
            for fault in error.errors()
        )
        raise InputError("; ".join(faults), where=where, do="Change what is named here") from None


def _path(location: tuple[int | str, ...]) -> str:
    return str(location[0]) + "".join(f"[{key!r}]" for key in location[1:2])


def _reason(message: str) -> str:
    reason = message.removeprefix("Value error, ")
    return reason[:1].lower() + reason[1:]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
