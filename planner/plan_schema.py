"""The plan as data: what is written to and read from plan JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
Spec = list[list[str]]
"""For each dimension of a tensor, the mesh axes that shard it, major to minor."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorModel(_Model):
    """An input or output of the program with its sharding."""

    path: str
    shape: list[int]
    dtype: str
    spec: Spec


class OriginModel(_Model):
    """Where a program came from, as the command line names it."""

    target: str = Field(
        description="a reference model, module:function, a file, or module:name of variants"
    )
    args: str | None = Field(default=None, description="module:name of a function's arguments")
    variant: str | None = Field(
        default=None, description="the form that was planned, where `target` names variants"
    )
    options: dict[str, Any] = Field(default={}, description="of a reference model")


Unit = Literal["tokens", "images", "examples"]
"""What a step works on, for rates and costs."""


class ProgramModel(_Model):
    """The program that was planned."""

    name: str = Field(description="as people know it, else that of the function")
    tokens_per_step: float | None = Field(
        None, description="tokens, or what `unit` says, over all devices, where known"
    )
    unit: Unit = "tokens"
    origin: OriginModel | None = Field(
        default=None,
        description="None for functions planned from Python, and in plans of older versions",
    )
    fingerprint: str
    inputs: list[TensorModel]
    outputs: list[TensorModel]
    aliases: list[tuple[int, int]] = Field(description="(output, input) pairs that share a buffer")
    donate_argnums: list[int]
    in_tree: str | None = Field(description="serialised pytree structure of the arguments")
    out_tree: str | None


class SiteModel(_Model):
    """A place in the program that is found again in a new lowering."""

    kind: Literal["argument", "result", "carry", "operand", "yield", "return"]
    index: int = Field(ge=0, lt=2**31)
    location: str | None = None
    op: str | None = None
    ordinal: int = Field(default=0, ge=0)
    branch: int = Field(default=0, ge=0, lt=2**31)


class DemandModel(_Model):
    """A reader of a value, with the sharding it needs where that differs from the given one."""

    site: SiteModel
    spec: Spec | None


class ConstraintModel(_Model):
    """The shardings of one value of the program."""

    site: SiteModel
    made: Spec
    given: Spec | None = Field(description="what readers get, where it is resharded for them all")
    demands: list[DemandModel]
    source: str


class KernelModel(_Model):
    """One call of a kernel of `sw.kernel`: the specs of its `shard_map`."""

    site: SiteModel
    name: str
    in_specs: list[Spec]
    out_specs: list[Spec]
    summed: list[str] = Field(description="mesh axes over which its results are partial sums")
    source: str


class CollectiveModel(_Model):
    """One collective of the planned program."""

    kind: str
    axes: list[str]
    nbytes: float = Field(description="bytes on one device of the larger of input and output")
    seconds: float = Field(description="of one run")
    count: float = Field(description="runs in one step")
    op: str
    source: str
    shape: list[int]
    dtype: str
    can_hide: bool = Field(description="an all-gather that can run ahead of its use")
    algorithm: str = Field(
        default="", description="a registered one, where it takes less than the usual"
    )


class BufferModel(_Model):
    """A buffer that is alive when memory is fullest."""

    name: str
    nbytes: float
    kind: str = Field("", description="as in `MemoryModel`; empty in plans of older versions")


class LoopSpanModel(_Model):
    """A loop of the program: its operations, and how often they run."""

    first: int
    last: int = Field(description="the first position behind the loop")
    trips: float
    source: str


class MemoryModel(_Model):
    """Memory over one step on every device: what is held from each position to the next.

    Positions count operations in program order, the body of a loop once. Points are thinned where
    there are many; the peak is always one of them.

    Kinds of buffers: "state" (arguments that a result takes over), "input" (other arguments),
    "loop" (what loops carry: saved activations, summed gradients), "collective" (what collectives
    leave behind), "result" (results with memory of their own), "temporary" (the rest).
    """

    positions: list[int]
    nbytes: dict[str, list[int]] = Field(description="kind of buffer -> bytes at each position")
    sources: list[str] = Field(description="source lines")
    source_of: list[int] = Field(description="for each position, its source line or -1")
    operations: int = Field(description="length of the step in positions")
    loops: list[LoopSpanModel]


class ComputeModel(_Model):
    """Seconds of all kernels of one source line in one step."""

    source: str
    op: str = Field(description="the operation that takes most of them")
    seconds: float


class StageModel(_Model):
    """A part of a collective or copy that occupies links."""

    links: list[str] = Field(
        description="dimensions of the torus, the link of a chip's devices (core), the network "
        "between slices (slice), or a direction of PCIe"
    )
    seconds: float


class ScheduledModel(_Model):
    """Kernels of one source line in a row, or one collective, where it stands in the program."""

    kind: str = Field(description="compute, or what the collective is")
    op: str = Field(description="the operation that takes most of the time, or near which it is")
    source: str
    axes: list[str] = Field(default=[], description="of a collective")
    seconds: float = Field(description="of one pass of its loop, or of the step outside loops")
    hides: bool = Field(default=False, description="it runs beside kernels")
    when: Literal["stops", "ahead", "behind"] = Field(
        default="stops",
        description="it stops kernels, runs ahead of where it stands, or behind from there on",
    )
    stages: list[StageModel] = Field(default=[], description="empty for kernels and in older plans")


class ScheduledLoopModel(_Model):
    """A loop in a schedule: entries that run so often, one after another."""

    entries: list[ScheduledModel | ScheduledLoopModel]
    trips: float
    source: str


class EstimateModel(_Model):
    """What one step costs on every device."""

    model_config = ConfigDict(allow_inf_nan=False)

    step_time_s: float
    compute_time_s: float
    collective_time_s: float
    exposed_collective_time_s: float = Field(
        description="of the step, what no kernel runs in: copies from the host count too"
    )
    host_copy_time_s: float = Field(0.0, description="copies to and from the memory of the host")
    peak_memory_bytes: float
    memory_capacity_bytes: float = Field(gt=0)
    mfu: float = Field(description="matrix FLOPs of the program over what the slice can do")
    matrix_flops: float = Field(description="of one step, over all devices")
    collectives: list[CollectiveModel]
    peak_buffers: list[BufferModel]
    memory: MemoryModel | None = Field(None, description="None in plans of older versions")
    compute: list[ComputeModel] = Field(
        default=[], description="source lines that compute longest; empty in older plans"
    )
    schedule: list[ScheduledModel | ScheduledLoopModel] = Field(
        default=[], description="the step in program order; empty in older plans"
    )

    @property
    def hidden_time_s(self) -> float:
        """Communication, and copies to and from the host, beside which kernels run."""
        moved = self.collective_time_s + self.host_copy_time_s
        return max(0.0, moved - self.exposed_collective_time_s)


class SolverModel(_Model):
    """What is proven about the plan: of the integer program on the chosen mesh."""

    status: str
    objective: float
    bound: float | None = Field(description="no choice costs less; None where nothing is proven")
    gap: float | None
    wall_time_s: float
    certificate: str = Field(default="", description="what is proven and what is open, in words")


class MeshModel(_Model):
    """A logical mesh that was considered."""

    axes: dict[str, int]
    layout: str
    status: str
    step_time_s: float | None
    peak_memory_bytes: float | None


class VariantModel(_Model):
    """What became of one of several forms of a step."""

    name: str
    status: str = Field(description="chosen, planned, ruled out or does not fit, and why")
    step_time_s: float | None = Field(None, description="of its best plan, where it was planned")
    bound_s: float | None = Field(
        None,
        description="no plan on the meshes tried for it takes less by the integer program",
    )
    peak_memory_bytes: float | None = Field(
        None, description="of its best plan; the least that was found where none fits"
    )
    tokens_per_step: float | None = None
    options: dict[str, Any] = Field(default={}, description="what makes this form")


class RefinedModel(_Model):
    """One of the plans that were compiled, to choose by the compiled program."""

    variant: str | None = None
    layout: str = Field(description="of its mesh on the slice")
    predicted_step_s: float
    compiled_step_s: float | None = Field(
        None, description="by the compiler's schedule; None where there is no program"
    )
    compiled_compute_s: float | None = None
    compiled_exposed_s: float | None = None
    compiled_peak_bytes: float | None = None
    problem: str = Field("", description="why there is no program")


class VersionsModel(_Model):
    """What made the plan."""

    shardwright: str
    jax: str
    jaxlib: str
    platform: str


class OptionsModel(_Model):
    """How the plan was asked for."""

    topology: str
    mesh: dict[str, int] | None
    pinned: dict[str, Spec] = Field(
        description='path or source line -> axes by dimension; "?" last where more may be added'
    )
    memory_fraction: float
    time_limit_s: float
    seed: int


class LayoutRuleModel(_Model):
    """The mesh axes that every dimension of one logical name is sharded over."""

    name: str
    axes: list[str]


class LayoutModel(_Model):
    """A layout under the rule that a logical name always maps to the same mesh axes."""

    rules: list[LayoutRuleModel]
    names: dict[str, list[str | None]] = Field(description="path -> a name for each dimension")
    free_step_time_s: float = Field(description="of the best plan found without the rule")
    free_peak_memory_bytes: float


class SizeAdviceModel(_Model):
    """A dimension that the mesh does not divide, and a size of which a step takes less."""

    argument: str = Field(description="the largest that has it; empty where none has it alone")
    dimension: int | None = Field(description="of that argument")
    also: int = Field(description="how many other arguments have the dimension")
    size: int
    better: int
    saved_s: float = Field(description="of a step, by the integer program at both sizes")
    saved_part: float = Field(description="of the step, from 0 to 1")


class PlanModel(_Model):
    """A whole plan."""

    schema_version: int = SCHEMA_VERSION
    program: ProgramModel
    topology: str
    chip: dict[str, Any]
    mesh: dict[str, Any]
    mesh_axes: dict[str, int]
    variant: str | None = Field(None, description="the form that was chosen, of several")
    variants: list[VariantModel] = Field(default=[], description="every form, in the order given")
    refined: list[RefinedModel] = Field(
        default=[], description="plans that were compiled, the best by prediction first"
    )
    layout: LayoutModel | None = Field(
        default=None, description="where a named layout was asked for"
    )
    constraints: list[ConstraintModel]
    estimate: EstimateModel
    solver: SolverModel
    meshes_considered: list[MeshModel]
    replicated_ops: list[str] = Field(
        description="operations that the planner knows no sharding rule for, with source lines"
    )
    kernels: list[KernelModel] = Field(default_factory=list)
    unpriced_ops: list[str] = Field(
        default_factory=list,
        description="kernels that do not tell their FLOPs, counted as moving bytes alone",
    )
    assumptions: list[str] = Field(description="what was assumed for want of knowing")
    size_advice: list[SizeAdviceModel] = Field(
        default_factory=list, description="sizes that would be faster on this mesh"
    )
    compiler_options: dict[str, str]
    options: OptionsModel
    versions: VersionsModel
