"""What a client asks for, checked here before anything is sent.

The checks are those of a local plan, so that what is wrong is told in the same words, and at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Required, TypedDict

from shardwright.errors import InputError

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardwright.hardware_profiles.chip import ChipProfile
    from shardwright.planner.named_layout import LogicalAxes
    from shardwright.planner.plan import Plan
    from shardwright.planner.program import Program
    from shardwright.planner.search import Progress
    from shardwright.planner.spec_patterns import PartialSpec


class PlanOptions(TypedDict, total=False):
    """The options of a plan, as those of `shardwright.plan`.

    `options` are those of a reference model, and `choices` those of which the best value is to be
    found: option -> values, or "auto".
    """

    topology: Required[str]
    options: Mapping[str, Any]
    choices: Mapping[str, Sequence[Any] | str]
    donate_argnums: int | Sequence[int]
    mesh: Mapping[str, int] | None
    pinned: Mapping[str, PartitionSpec | str | Sequence[Any]] | None
    memory_fraction: float
    time_limit_s: float
    seed: int
    model_flops: float | None
    chip: ChipProfile | None
    name: str | None
    tokens_per_step: float | None
    layout: str
    logical_axes: LogicalAxes | None
    refine: int
    variants: Any
    on_progress: Callable[[Progress], None] | None


class EvaluateOptions(TypedDict, total=False):
    """The options of an evaluation, as those of `shardwright.evaluate`.

    `options` are those of a reference model, whose specs are dicts from patterns of paths ("*" is
    any text) to PartitionSpecs.
    """

    topology: Required[str]
    mesh: Required[Mapping[str, int]]
    in_specs: Required[Any]
    out_specs: Any
    options: Mapping[str, Any]
    donate_argnums: int | Sequence[int]
    model_flops: float | None
    chip: ChipProfile | None


@dataclass(frozen=True)
class Asked:
    """A request that is ready to be sent.

    Attributes:
      body: JSON, but for the id of the program.
      program: what to upload; None for a reference model.
      labels: what the caller knows of the program and no plan depends on.
    """

    body: dict[str, Any]
    program: Program | None
    labels: Labels


@dataclass(frozen=True)
class Labels:
    """What people call a program, and what counts for its rates; as for `shardwright.plan`."""

    name: str | None = None
    tokens_per_step: float | None = None
    model_flops: float | None = None


def ask_plan(
    target: Callable[..., Any] | Program | str,
    args: Sequence[Any],
    *,
    topology: str,
    options: Mapping[str, Any] | None = None,
    choices: Mapping[str, Sequence[Any] | str] | None = None,
    donate_argnums: int | Sequence[int] = (),
    mesh: Mapping[str, int] | None = None,
    pinned: Mapping[str, PartitionSpec | str | Sequence[Any]] | None = None,
    memory_fraction: float = 0.9,
    time_limit_s: float = 12.0,
    seed: int = 0,
    model_flops: float | None = None,
    chip: ChipProfile | None = None,
    name: str | None = None,
    tokens_per_step: float | None = None,
    layout: str = "free",
    logical_axes: LogicalAxes | None = None,
    refine: int = 0,
    variants: Any = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Asked:
    """A plan to ask for; the function is traced here.

    `refine` and `variants` are those of `shardwright.plan`, which no server has: they are refused.

    Raises:
      InputError: as `shardwright.plan` does, of what can be told without planning.
    """
    from shardwright.hardware_profiles.slices import parse_slice
    from shardwright.planner.given import check_mesh
    from shardwright.planner.logical_names import logical_names_of
    from shardwright.planner.pins import checked_pins
    from shardwright.planner.requests import PlanRequest, checked

    if refine or variants is not None:
        raise InputError(
            "a server compiles nothing, and plans one program at a time",
            where="refine" if refine else "variants",
            do="Use shardwright.plan here; of a reference model, give choices=",
        )
    asked = checked(
        PlanRequest,
        "plan",
        topology=topology,
        donate_argnums=donate_argnums,
        mesh=mesh,
        pinned=pinned,
        memory_fraction=memory_fraction,
        time_limit_s=time_limit_s,
        seed=seed,
        model_flops=model_flops,
        chip=chip,
        name=name,
        tokens_per_step=tokens_per_step,
        layout=layout,
        logical_axes=logical_axes,
        on_progress=on_progress,
    )
    on = parse_slice(topology, chip)
    body: dict[str, Any] = {
        "topology": topology,
        "mesh": asked.mesh,
        "memory_fraction": memory_fraction,
        "time_limit_s": time_limit_s,
        "seed": asked.seed,
    }
    if asked.layout == "named":
        body["layout"] = asked.layout
        axes = asked.logical_axes or (None if isinstance(target, str) else logical_names_of(args))
        if axes is not None:
            body["logical_axes"] = {path: list(names) for path, names in axes.items()}
    labels = Labels(name, tokens_per_step, model_flops)
    if chip is not None:
        body["chip"] = chip.model_dump(mode="json")
    if isinstance(target, str):
        body["model"] = _model(target, args, options)
        if choices:
            body["choices"] = {
                option: values if isinstance(values, str) else list(values)
                for option, values in choices.items()
            }
        body["pinned"] = _pinned(asked.pinned or {})
        return Asked(body, None, labels)
    if model_flops:
        body["model_flops"] = model_flops
    named = {**(options or {}), **(choices or {})}
    program = _trace(target, args, named, donate_argnums, asked.mesh)
    check_mesh(program.mesh_axes, asked.mesh, on)
    pins = checked_pins(program, asked.pinned or {}, asked.mesh or program.mesh_axes)
    body["pinned"] = _pinned(pins)
    return Asked(body, program, labels)


def ask_evaluation(
    target: Callable[..., Any] | Program | str,
    args: Sequence[Any],
    *,
    topology: str,
    mesh: Mapping[str, int],
    in_specs: Any,
    out_specs: Any = None,
    options: Mapping[str, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    model_flops: float | None = None,
    chip: ChipProfile | None = None,
) -> Asked:
    """The price of a sharding to ask for; the function is traced here.

    Raises:
      InputError: as `shardwright.evaluate` does, of what can be told without pricing.
    """
    from shardwright.hardware_profiles.slices import parse_slice
    from shardwright.planner.hand_made import flat_shardings
    from shardwright.planner.plan_data import spec_of
    from shardwright.planner.requests import EvaluateRequest, checked

    asked = checked(
        EvaluateRequest,
        "evaluate",
        topology=topology,
        mesh=mesh,
        donate_argnums=donate_argnums,
        model_flops=model_flops,
        chip=chip,
    )
    parse_slice(topology, chip)
    body: dict[str, Any] = {"topology": topology, "mesh": asked.mesh}
    if model_flops:
        body["model_flops"] = model_flops
    if chip is not None:
        body["chip"] = chip.model_dump(mode="json")
    given = {"in_specs": in_specs, "out_specs": out_specs}
    if isinstance(target, str):
        body["model"] = _model(target, args, options)
        for side, specs in given.items():
            if specs is not None:
                body[side] = {path: _entries(spec) for path, spec in specs.items()}
        return Asked(body, None, Labels())
    program = _trace(target, args, options, donate_argnums, asked.mesh)
    sides = {
        "in_specs": (program.in_tree, program.inputs),
        "out_specs": (program.out_tree, program.outputs),
    }
    for side, (tree, tensors) in sides.items():
        if given[side] is not None:
            flat = flat_shardings(given[side], tree, tensors, asked.mesh, side)
            body[side] = {t.path: spec_of(s) for t, s in zip(tensors, flat, strict=True)}
    return Asked(body, program, Labels())


def labelled(plan: Plan, asked: Asked) -> Plan:
    """A plan as it would be had it been asked for here.

    Labels are not sent: whatever a program is called, the server plans it once.
    """
    from shardwright.planner.plan import Plan

    data, labels = plan.data, asked.labels
    told = {"name": labels.name, "tokens_per_step": labels.tokens_per_step}
    changes: dict[str, Any] = {
        "options": data.options.model_copy(update={"topology": asked.body["topology"]}),
        "program": data.program.model_copy(
            update={key: value for key, value in told.items() if value is not None}
        ),
    }
    if labels.model_flops is not None and data.estimate.step_time_s:
        on = plan.logical_mesh.slice
        peak = on.chip.device_peak_flops("bf16") * on.devices
        mfu = labels.model_flops / (peak * data.estimate.step_time_s)
        changes["estimate"] = data.estimate.model_copy(update={"mfu": mfu})
    return Plan(data.model_copy(update=changes))


def _trace(
    target: Callable[..., Any] | Program,
    args: Sequence[Any],
    options: Mapping[str, Any] | None,
    donate_argnums: int | Sequence[int],
    mesh: Mapping[str, int] | None,
) -> Program:
    from shardwright.planner.program import Program
    from shardwright.planner.tracing import in_mesh

    if options:
        raise InputError(
            "options are those of a reference model, and a function is given",
            where="plan",
            do="Leave them out",
        )
    if isinstance(target, Program):
        return target
    return in_mesh(mesh, lambda: Program.trace(target, *args, donate_argnums=donate_argnums))


def _model(name: str, args: Sequence[Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
    if args:
        raise InputError(
            "a reference model has its own arguments", where=name, do="Give its options only"
        )
    return {"name": name, "options": dict(options or {})}


def _pinned(pins: Mapping[str, PartialSpec]) -> dict[str, list[list[str]]]:
    return {name: [list(dim) for dim in spec] for name, spec in pins.items()}


def _entries(spec: PartitionSpec) -> list[list[str]]:
    return [[] if e is None else [e] if isinstance(e, str) else list(e) for e in tuple(spec)]
