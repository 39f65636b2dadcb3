"""Bodies of requests and answers under /v1."""

from __future__ import annotations

import re
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from shardwright.planner.plan_schema import EstimateModel
from shardwright.planner.spec_patterns import partial_spec, spec_of_data

_MOST_AXES = 8
_MOST_PATHS = 10_000
_MOST_DIMENSIONS = 64
_LONGEST_SPEC = 1000
_LONGEST_SEARCH_S = 3600.0
_LARGEST_NUMBER = 2**53

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]

PROGRAM_ID = r"^[0-9a-f]{64}$"
PLAN_ID = r"^pln_[a-z2-7]{26}$"
COMPARISON_ID = r"^cmp_[a-z2-7]{26}$"
EVALUATION_ID = r"^evl_[a-z2-7]{26}$"

# No control characters: Postgres takes no NUL, and none is a name.
_PRINTABLE = r"^[^\x00-\x1f\x7f]*$"

ProgramId = Annotated[
    str, StringConstraints(pattern=PROGRAM_ID), Field(description="SHA-256 of the program's bytes")
]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=_PRINTABLE)]
PathText = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=_PRINTABLE)]
AxisName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
AxisSize = Annotated[int, Field(ge=1, le=1 << 20)]
MeshShape = Annotated[
    dict[AxisName, AxisSize],
    Field(
        min_length=1,
        max_length=_MOST_AXES,
        description="size of each axis of the logical mesh, major to minor",
    ),
]
Entry = list[str] | str | None
_LOCAL_ALONE = {
    "refine": "it compiles nothing; use shardwright plan --refine, or sw.plan(refine=...)",
    "variants": "give the options of a model as choices, or plan each form of a program",
    "latency_limit": "use shardwright plan --latency-limit",
}
"""Options of a plan that is made here alone -> what to do instead."""


def _entries(given: Any, *, partial: bool = False) -> Any:
    """A sharding in any of its forms as a list of axes for each dimension."""
    if isinstance(given, str) and len(given) > _LONGEST_SPEC:
        raise ValueError(f"a sharding has at most {_LONGEST_SPEC} characters")
    if isinstance(given, list) and (
        len(given) > _MOST_DIMENSIONS
        or any(isinstance(part, list) and len(part) > _MOST_AXES for part in given)
    ):
        raise ValueError(
            f"a sharding has at most {_MOST_DIMENSIONS} entries of at most {_MOST_AXES} axes"
        )
    if partial and isinstance(given, str | list):
        return [list(dim) for dim in partial_spec(given, "sharding")]
    spec = spec_of_data(given, "sharding")
    return [[] if e is None else [e] if isinstance(e, str) else list(e) for e in spec]


SpecEntries = Annotated[
    list[list[AxisName]],
    BeforeValidator(_entries, json_schema_input_type=str | list[Entry]),
    Field(
        description='an entry a dimension: None, a mesh axis, or axes joined by "+", as in '
        '"None,data+model"; or the same as a list of lists, [[], ["data", "model"]]'
    ),
]
Specs = Annotated[dict[PathText, SpecEntries], Field(max_length=_MOST_PATHS)]
PinEntries = Annotated[
    list[list[Literal["?"] | AxisName]],
    BeforeValidator(partial(_entries, partial=True), json_schema_input_type=str | list[Entry]),
    Field(
        description='a sharding as elsewhere, where "?" is a dimension left to the planner, and '
        '"data+?" one that more axes than data may shard; as lists, [["?"], ["data", "?"]]'
    ),
]
Pins = Annotated[dict[PathText, PinEntries], Field(max_length=_MOST_PATHS)]


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Refuses what is no option of any model: names and values out of all proportion."""

    def check(value: Any, depth: int) -> None:
        if isinstance(value, str) and (len(value) > 64 or not re.match(_PRINTABLE, value)):
            raise ValueError("a text in it is too long or has control characters")
        # Not by math.isfinite, which overflows at the largest whole numbers that JSON may have.
        if isinstance(value, int | float) and not abs(value) <= _LARGEST_NUMBER:
            raise ValueError(f"numbers are between -{_LARGEST_NUMBER} and {_LARGEST_NUMBER}")
        if isinstance(value, list | dict):
            if depth == 3 or len(value) > 64 or isinstance(value, dict):
                raise ValueError("an option is a number, a text, true, false, null or a list")
            for inner in value:
                check(inner, depth + 1)

    for name, value in options.items():
        if not re.match(r"^[a-z][a-z0-9_]{0,63}$", name):
            raise ValueError("names of options are words such as batch or kv_heads")
        check(value, 1)
    return options


Options = Annotated[
    dict[str, Any],
    Field(max_length=64),
    AfterValidator(_plain_options),
    WithJsonSchema(
        {
            "type": "object",
            "description": "options of the model; /v1/models has their names and defaults",
            "maxProperties": 64,
            "propertyNames": {"pattern": "^[a-z][a-z0-9_]{0,63}$"},
        }
    ),
]


Choices = Annotated[
    dict[str, Literal["auto"] | Annotated[list[Any], Field(min_length=1, max_length=16)]],
    Field(max_length=4),
    AfterValidator(_plain_options),
]
LogicalAxes = Annotated[
    dict[PathText, Annotated[list[ShortText | None], Field(max_length=_MOST_DIMENSIONS)]],
    Field(max_length=_MOST_PATHS),
]
OwnChip = Annotated[
    dict[str, Any] | None,
    Field(
        description="a chip profile of your own, in the form of /v1/hardware/{chip}, to use "
        "instead of the bundled one"
    ),
]
ModelFlops = Annotated[
    float | None, Field(gt=0, description="FLOPs of one step that count for MFU")
]


class _Body(BaseModel):
    """What clients send: nothing more than is asked for, and of exactly its type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelChoice(_Body):
    """A reference model by name."""

    name: ShortText = Field(description="of /v1/models", examples=["llama3-8b"])
    options: Options = Field(default_factory=dict)


class _Planned(_Body):
    """What to plan: a reference model or an uploaded program."""

    model: ModelChoice | None = Field(None, description="a reference model; or give program")
    program: ProgramId | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.model is None) == (self.program is None):
            raise ValueError("give either model or program")
        return self


class PlanRequest(_Planned):
    """What to plan, on which slice, and how."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": {"name": "llama3-8b", "options": {"batch": 256}},
                    "topology": "v5e:16x16",
                },
                {
                    "model": {"name": "mlp"},
                    "topology": "v5e:4x4",
                    "mesh": {"data": 4, "model": 4},
                    "pinned": {"[1]['features']": "data,None"},
                    "time_limit_s": 30,
                },
            ]
        }
    )

    topology: ShortText = Field(description="a slice, such as v5e:16x16 or 2*v5p:4x4x4")
    mesh: MeshShape | None = Field(None, description="the logical mesh; searched for where null")
    pinned: Pins = Field(
        default_factory=dict,
        description="path of an argument ([0]['w'], with * of several) or of a result "
        "(result[0]['w']), or source line (train.py:33) -> the sharding that it must have; needs "
        "mesh where it names axes",
    )
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="part of a device's memory that may be used"
    )
    time_limit_s: float = Field(
        12.0, gt=0, le=_LONGEST_SEARCH_S, description="seconds to search further meshes"
    )
    seed: int = Field(0, ge=0, lt=1 << 31, description="of the solver's random choices")
    chip: OwnChip = None
    model_flops: ModelFlops = None
    layout: Literal["free", "named"] = Field(
        "free",
        description="named: a logical name of a dimension maps to the same mesh axes in every "
        "argument and result",
    )
    logical_axes: LogicalAxes | None = Field(
        None,
        description="for a named layout: pattern of a path -> a name for each dimension, or null; "
        "where it is not given, reference models have their own",
    )
    choices: Choices = Field(
        default_factory=dict,
        description="options of the model of which the best values are to be found with the mesh: "
        'a list of values, or "auto" for remat, microbatches and mu_dtype',
        examples=[{"remat": "auto", "microbatches": [1, 2, 4]}],
    )

    @model_validator(mode="before")
    @classmethod
    def _elsewhere(cls, data: Any) -> Any:
        """Tells where options of a local plan are that no server has."""
        for option, instead in _LOCAL_ALONE.items():
            if isinstance(data, dict) and option in data:
                raise ValueError(f"{option} is not for a server: {instead}")
        return data

    @model_validator(mode="after")
    def _names_are_for_a_layout(self) -> Self:
        if self.logical_axes is not None and self.layout != "named":
            raise ValueError('logical_axes are for a named layout: give "layout": "named"')
        return self


class ComparisonRequest(_Planned):
    """One program or model, and the slices to plan it on."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": {"name": "llama3-8b", "options": {"batch": 256}},
                    "topologies": ["v5e:16x16", "v5p:4x4x8", "v6e:8x16"],
                }
            ]
        }
    )

    topologies: Annotated[list[ShortText], Field(min_length=1, max_length=32)] = Field(
        description="slices, each once"
    )
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="part of a device's memory that may be used"
    )
    time_limit_s: float = Field(
        12.0, gt=0, le=_LONGEST_SEARCH_S, description="seconds to search on each slice"
    )
    seed: int = Field(0, ge=0, lt=1 << 31, description="of the solver's random choices")


class EvaluationRequest(_Planned):
    """A sharding written by hand, to be priced by the measure of plans."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": {"name": "mlp"},
                    "topology": "v5e:4x4",
                    "mesh": {"data": 4, "model": 4},
                    "in_specs": {
                        "[0]*['w']": "None,model",
                        "[1]['features']": "data,None",
                    },
                }
            ]
        }
    )

    topology: ShortText = Field(description="a slice, such as v5e:16x16")
    mesh: MeshShape
    in_specs: Specs = Field(
        default_factory=dict,
        description="pattern of argument paths (* is any text, ? one character) -> sharding; the "
        "first that matches counts, and what none matches is replicated",
    )
    out_specs: Specs | None = Field(
        None,
        description="the same for results; where null, donated arguments' results keep their "
        "sharding and the partitioner chooses the rest",
    )
    chip: OwnChip = None
    model_flops: ModelFlops = None


class Progress(BaseModel):
    """How far a job is."""

    model_config = ConfigDict(extra="ignore")

    stage: str | None = Field(
        None, description="queued, read, trace, graph, search, polish, plan, ..."
    )
    meshes_tried: int | None = None
    meshes: int | None = Field(None, description="logical meshes that there are to try")
    best_step_s: float | None = Field(None, description="step time of the best plan so far")
    gap: float | None = Field(None, description="how far from optimal it can be, as a fraction")
    message: str | None = None


class Summary(BaseModel):
    """The figures of a finished plan."""

    model_config = ConfigDict(extra="allow")

    step_time_s: float | None = None
    peak_memory_bytes: float | None = None
    mfu: float | None = None
    mesh_axes: dict[str, int] | None = None
    gap: float | None = None


class JobError(BaseModel):
    """Why a job failed."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(
        description="input, does-not-fit, out-of-memory, time-limit, crashed or internal"
    )
    title: str | None = None
    detail: str = ""
    what: str = ""
    where: str = ""
    do: str = ""


class PlanLinks(BaseModel):
    """Where a plan's parts are."""

    self: str
    events: str
    plan: str
    annotated: str
    report: str
    page: str


_PLAN_EXAMPLE_ID = "pln_k3n5q7r2t4v6x2z4b6d3f5h7j2"


class PlanResource(BaseModel):
    """A plan, from being accepted to being there."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": _PLAN_EXAMPLE_ID,
                    "status": "succeeded",
                    "created_at": "2026-12-01T09:00:00.104Z",
                    "started_at": "2026-12-01T09:00:00.131Z",
                    "finished_at": "2026-12-01T09:00:14.022Z",
                    "attempts": 1,
                    "request": {
                        "model": {"name": "llama3-8b", "options": {"batch": 256}},
                        "program": None,
                        "topology": "v5e:16x16",
                        "mesh": None,
                        "pinned": {},
                        "memory_fraction": 0.9,
                        "time_limit_s": 12.0,
                        "seed": 0,
                        "model_flops": None,
                        "chip": None,
                    },
                    "progress": {
                        "stage": "write",
                        "meshes_tried": 17,
                        "meshes": 17,
                        "best_step_s": 1.37,
                        "gap": 0.0,
                        "message": "",
                    },
                    "summary": {
                        "name": "llama3-8b",
                        "step_time_s": 1.37,
                        "peak_memory_bytes": 9.05e9,
                        "memory_capacity_bytes": 17179869184.0,
                        "mfu": 0.367,
                        "mesh_axes": {"x_outer_y": 128, "x_inner": 2},
                        "gap": 0.0,
                        "solver_status": "optimal",
                    },
                    "error": None,
                    "links": {
                        "self": f"/v1/plans/{_PLAN_EXAMPLE_ID}",
                        "events": f"/v1/plans/{_PLAN_EXAMPLE_ID}/events",
                        "plan": f"/v1/plans/{_PLAN_EXAMPLE_ID}/plan.json",
                        "annotated": f"/v1/plans/{_PLAN_EXAMPLE_ID}/annotated",
                        "report": f"/v1/plans/{_PLAN_EXAMPLE_ID}/report",
                        "page": f"/plans/{_PLAN_EXAMPLE_ID}",
                    },
                }
            ]
        }
    )

    id: str
    status: Status
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    attempts: int = Field(description="how often it was started")
    request: dict[str, Any] = Field(description="as accepted, with defaults filled in")
    progress: Progress | None
    summary: Summary | None
    error: JobError | None
    links: PlanLinks


class PlanPage(BaseModel):
    """Plans, newest first."""

    items: list[PlanResource]
    next_cursor: str | None = Field(description="for ?cursor= of the next page; null at the end")


class ComparisonRow(BaseModel):
    """One slice of a comparison."""

    topology: str
    chips: int
    devices: int
    plan: str = Field(description="id of its plan")
    status: Status
    progress: Progress | None
    summary: Summary | None
    error: JobError | None
    links: PlanLinks


class ComparisonLinks(BaseModel):
    """Where a comparison is."""

    self: str
    page: str


class ComparisonResource(BaseModel):
    """One program or model on many slices."""

    id: str
    status: Status = Field(
        description="running until every plan has ended; then succeeded where any plan has"
    )
    created_at: datetime
    request: dict[str, Any]
    rows: list[ComparisonRow] = Field(description="in the order asked")
    links: ComparisonLinks


class EvaluationLinks(BaseModel):
    """Where an evaluation's parts are."""

    self: str
    events: str


class EvaluationResource(BaseModel):
    """The price of a sharding written by hand."""

    id: str
    status: Status
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    attempts: int = Field(description="how often it was started")
    request: dict[str, Any]
    progress: Progress | None
    estimate: EstimateModel | None = Field(description="once it has succeeded")
    error: JobError | None
    links: EvaluationLinks
