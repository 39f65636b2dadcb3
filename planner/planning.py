"""The planner's front: from a function or program and a slice to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.hardware_profiles.mesh import LogicalMesh, enumerate_meshes, meshes_for_shape
from shardwright.hardware_profiles.slices import Slice, parse_slice
from shardwright.planner.compiling import check_libtpu
from shardwright.planner.evaluation import Evaluation
from shardwright.planner.fixed import fixed_strategies
from shardwright.planner.given import check_mesh
from shardwright.planner.logical_names import logical_names_of
from shardwright.planner.named_layout import LogicalAxes, layout_model, named_layout
from shardwright.planner.pins import checked_pins, resolved_pins
from shardwright.planner.plan import Plan
from shardwright.planner.plan_making import make_plan
from shardwright.planner.plan_schema import OptionsModel, VariantModel
from shardwright.planner.prepared import prepare
from shardwright.planner.program import Program
from shardwright.planner.refine import Entrant
from shardwright.planner.refine import refine as refine_plans
from shardwright.planner.requests import PlanRequest, checked
from shardwright.planner.search import Progress, SearchResult, search_below, search_meshes
from shardwright.planner.size_advice import size_advice
from shardwright.planner.solver.compilation import compilation_told
from shardwright.planner.spec_patterns import PartialSpec
from shardwright.planner.tracing import in_mesh
from shardwright.planner.variants import (
    Form,
    Variant,
    Variants,
    checked_variants,
    search_variants,
)

_MOST_AXES = 3
_ADVICE = 0.25
"""Part of the time of a search that looking for better sizes may take besides."""
_WORTH_COMPILING = 0.25
"""Plans that are slower than the best by more than this part are not compiled to refine."""


def plan(
    fn: Callable[..., Any] | Program | None = None,
    *args: Any,
    topology: str,
    variants: Variants | None = None,
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
    refine: int = 0,
    layout: str = "free",
    logical_axes: LogicalAxes | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Plans the sharding of a function on a TPU slice.

    Args:
      fn: a function of `args`, or a `Program`; None where variants are given.
      args: arrays or `jax.ShapeDtypeStruct`s, any pytrees.
      topology: a slice: "v5e:16x16", "v5p-128", "2*v5e:16x16".
      variants: forms of one step of which the best is planned: name -> (fn, *args), a `Variant` or
        a `Program`. The plan is of the one that `plan.data.variant` names, and
        `plan.data.variants` tells what became of the others.
      donate_argnums: arguments whose buffers the results take over, as for `jax.jit`.
      mesh: the logical mesh to use, axis name -> size; searched for where None.
      pinned: path of an argument ("[0]['w']"; with "*" of several) or result ("result[0]"), or
        source line that makes a tensor ("train.py:33") -> the PartitionSpec that it must have, also
        in text, "None,data". A dimension with `P.UNCONSTRAINED`, or "?" in text, is left to the
        planner. Needs `mesh` where it names axes.
      memory_fraction: part of a device's HBM that the program may use.
      time_limit_s: seconds to search further meshes after the first, which is always planned;
        where there are variants, as many again for the other meshes of the others.
      seed: for the solver.
      model_flops: FLOPs of one step that count for MFU; without it every matrix multiplication
        of the program counts, recomputed ones too.
      chip: a profile to use instead of the bundled one of the topology's generation.
      name: what people call the program; the name of the function where None.
      tokens_per_step: over all devices, for tokens/s in reports.
      refine: so many of the best plans are compiled with the TPU compiler, and the best of them
        by the compiled program is taken: a minute or more each. Needs the extra `tpu`.
      layout: "free", or "named": a logical name of a dimension maps to the same mesh axes in every
        argument and result that has it. `plan.layout_rules` are the rules, and `plan.data.layout`
        tells what the best plan without them takes, which is searched for as long.
      logical_axes: pattern of a path ("*" is any text) -> a name for each dimension, or None; where
        not given, those that Flax's partitioning metadata of the arguments tells.
      on_progress: called with a `Progress` at every stage.

    Raises:
      InputError: the slice, the function, the mesh, a pin or a logical name is wrong, or there is
        no compiler to refine with.
      DoesNotFitError: no plan keeps within the memory.
    """
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
        refine=refine,
        layout=layout,
        logical_axes=logical_axes,
        on_progress=on_progress,
    )
    if asked.logical_axes is not None and asked.layout != "named":
        raise InputError(
            "logical_axes say nothing of a free layout",
            where="plan",
            do='Give layout="named" with them, or leave them out',
        )
    if asked.refine:
        check_libtpu("refine")
    report = on_progress or (lambda progress: None)
    on = parse_slice(topology, chip)
    subjects = []
    for label, variant in _given(fn, args, variants).items():
        report(Progress("trace", message=label))
        subjects.append(_subject(label, variant, asked, on))
    report(Progress("graph"))
    started = time.monotonic()
    with compilation_told(lambda: report(Progress("kernels"))):
        ranked, outcomes = _search(subjects, asked, on, report)
    free = _free_plan(ranked, asked, on, report) if asked.layout == "named" else None

    def made(subject: _Subject, found: SearchResult) -> Plan:
        plan = make_plan(
            subject.form.prepared,
            found,
            OptionsModel(
                topology=topology,
                mesh=None if subject.mesh is None else dict(subject.mesh),
                pinned={name: [list(dim) for dim in spec] for name, spec in subject.pins.items()},
                memory_fraction=memory_fraction,
                time_limit_s=time_limit_s,
                seed=asked.seed,
            ),
            subject.variant.model_flops or model_flops,
            time.monotonic() - started,
            name=name,
            tokens_per_step=subject.variant.tokens_per_step or tokens_per_step,
            variant=subject.form.name or None,
            variants=_choose(outcomes, subject.form.name),
        )
        named, program = subject.form.prepared.layout, subject.form.prepared.program
        if named is None or free is None:
            return plan
        told = layout_model(named, plan.data.program.inputs, plan.data.program.outputs, free)
        data = plan.data.model_copy(update={"layout": told})
        return Plan(data, program.in_tree, program.out_tree, program)

    if asked.refine:
        ranked[0] = _with_others(*ranked[0], asked, on, report)
        return _refined(ranked, asked.refine, made, report)
    report(Progress("plan"))
    return _with_advice(made(*ranked[0]), *ranked[0], asked, on)


@dataclass(frozen=True)
class _Subject:
    """What is searched: the only program, or one of the variants."""

    variant: Variant
    form: Form
    mesh: Mapping[str, int] | None
    pins: Mapping[str, PartialSpec] = field(repr=False)


_Ranked = tuple[_Subject, SearchResult]


def _given(
    fn: Callable[..., Any] | Program | None, args: Sequence[Any], variants: Variants | None
) -> dict[str, Variant]:
    if (fn is None) == (variants is None):
        raise InputError(
            "both a function and variants are given"
            if variants is not None
            else "there is nothing to plan",
            where="plan",
            do="Give either a function with its arguments or variants=",
        )
    if variants is not None:
        return checked_variants(variants)
    assert fn is not None
    return {"": Variant(fn, args)}


def _subject(label: str, variant: Variant, asked: PlanRequest, on: Slice) -> _Subject:
    donated = asked.donate_argnums if variant.donate_argnums is None else variant.donate_argnums
    program = _program(variant.fn, variant.args, donated, asked.mesh)
    check_mesh(program.mesh_axes, asked.mesh, on)
    mesh = asked.mesh or program.mesh_axes
    pins = checked_pins(program, asked.pinned or {}, mesh)
    prepared = prepare(program)
    resolved = resolved_pins(program, prepared.nodes, pins)
    if asked.layout == "named":
        axes = asked.logical_axes
        axes = logical_names_of(variant.args) if axes is None else axes
        prepared = replace(prepared, layout=named_layout(program, axes))
    form = Form(
        label,
        prepared,
        meshes_on(on, mesh),
        lambda m: fixed_strategies(prepared.nodes, resolved, m),
        variant.tokens_per_step or 1.0,
    )
    return _Subject(variant, form, mesh, pins)


def _search(
    subjects: Sequence[_Subject],
    asked: PlanRequest,
    on: Slice,
    report: Callable[[Progress], None],
) -> tuple[list[_Ranked], tuple[VariantModel, ...]]:
    """What was found of each program that was planned, the best first; what became of variants."""
    limit = on.chip.device_hbm_bytes * asked.memory_fraction
    if len(subjects) == 1:
        form = subjects[0].form
        found = search_meshes(
            form.prepared,
            form.meshes,
            limit,
            fixed_on=form.fixed_on,
            time_limit_s=asked.time_limit_s,
            seed=asked.seed,
            on_progress=report,
        )
        return [(subjects[0], found)], ()
    if not all(subject.variant.tokens_per_step for subject in subjects):
        subjects = [replace(one, form=replace(one.form, tokens=1.0)) for one in subjects]
    chosen = search_variants(
        [subject.form for subject in subjects],
        limit,
        time_limit_s=asked.time_limit_s,
        seed=asked.seed,
        on_progress=report,
    )
    by_name = {subject.form.name: subject for subject in subjects}
    outcomes = tuple(
        one.model_copy(
            update={
                "options": dict(by_name[one.name].variant.options),
                "tokens_per_step": by_name[one.name].variant.tokens_per_step,
            }
        )
        for one in chosen.outcomes
    )
    ranked = [(chosen.name, chosen.found), *chosen.others]
    return [(by_name[name], found) for name, found in ranked], outcomes


def _with_advice(
    plan: Plan, subject: _Subject, found: SearchResult, asked: PlanRequest, on: Slice
) -> Plan:
    """A plan that tells sizes that would be faster."""
    form = subject.form
    program = form.prepared.program
    advice = size_advice(
        replace(form.prepared, layout=None),
        found.best.problem.mesh,
        on.chip.device_hbm_bytes * asked.memory_fraction,
        lambda nodes, mesh: fixed_strategies(
            nodes, resolved_pins(program, nodes, subject.pins), mesh
        ),
        asked.time_limit_s * _ADVICE,
        asked.seed,
    )
    plan.data = plan.data.model_copy(update={"size_advice": advice})
    return plan


def _with_others(
    subject: _Subject,
    found: SearchResult,
    asked: PlanRequest,
    on: Slice,
    report: Callable[[Progress], None],
) -> _Ranked:
    """What was found, with plans on more meshes that are not much slower, enough to refine."""
    others = list(found.others)
    have = {one.problem.mesh for one in (found.best, *others)}
    cutoff = found.best.evaluation.step_s * (1 + _WORTH_COMPILING)
    deadline = time.monotonic() + asked.time_limit_s
    for mesh in subject.form.meshes:
        if len(others) + 1 >= asked.refine or time.monotonic() > deadline:
            break
        if mesh in have:
            continue
        more = search_below(
            cutoff,
            subject.form.prepared,
            [mesh],
            on.chip.device_hbm_bytes * asked.memory_fraction,
            fixed_on=subject.form.fixed_on,
            time_limit_s=asked.time_limit_s,
            seed=asked.seed,
            on_progress=report,
            first_mesh_s=asked.time_limit_s,
        )
        if isinstance(more, SearchResult):
            others.append(more.best)
    return subject, replace(found, others=tuple(others))


def _refined(
    ranked: Sequence[_Ranked],
    count: int,
    made: Callable[[_Subject, SearchResult], Plan],
    report: Callable[[Progress], None],
) -> Plan:
    """The best plan by the compiled programs of the best few by prediction."""
    several = [
        (subject, replace(found, best=candidate))
        for subject, found in ranked
        for candidate in (found.best, *found.others)
    ]
    # The first stays first: what is hardly faster does not count as such.
    first, *rest = several
    rest.sort(key=lambda one: one[1].best.evaluation.step_s / one[0].form.tokens)
    several = [first, *rest][:count]
    plans = [made(*one) for one in several]
    entrants = [
        Entrant(plan, subject.form.prepared.program, subject.form.tokens)
        for plan, (subject, _) in zip(plans, several, strict=True)
    ]
    found = refine_plans(entrants, report)
    best = plans[found.best]
    best.data = best.data.model_copy(update={"refined": list(found.outcomes)})
    return best


def _free_plan(
    ranked: Sequence[_Ranked],
    asked: PlanRequest,
    on: Slice,
    report: Callable[[Progress], None],
) -> Evaluation:
    """The best plan of the chosen program without its named layout."""
    subject, found = ranked[0]
    report(Progress("search", message="without the named layout"))
    free = replace(subject.form.prepared, layout=None)
    (_, other), *_ = _search(
        [replace(subject, form=replace(subject.form, prepared=free))], asked, on, report
    )[0]
    # A plan under the rule is one without it too.
    return min(found.best.evaluation, other.best.evaluation, key=lambda e: e.step_s)


def _choose(outcomes: Sequence[VariantModel], name: str) -> tuple[VariantModel, ...]:
    """What became of every form, where the one of a name is chosen."""

    def told(one: VariantModel) -> VariantModel:
        was, now = ("planned", "chosen") if one.name == name else ("chosen", "planned")
        if not one.status.startswith(was):
            return one
        return one.model_copy(update={"status": now + one.status.removeprefix(was)})

    return tuple(map(told, outcomes))


def _program(
    fn: Callable[..., Any] | Program,
    args: Sequence[Any],
    donate_argnums: int | Sequence[int],
    mesh: Mapping[str, int] | None,
) -> Program:
    if isinstance(fn, Program):
        return fn
    return in_mesh(mesh, lambda: Program.trace(fn, *args, donate_argnums=donate_argnums))


def meshes_on(on: Slice, shape: Mapping[str, int] | None) -> tuple[LogicalMesh, ...]:
    """The meshes to try on a slice, in order; those of a shape where one is given."""
    if shape is not None:
        return meshes_for_shape(on, shape)
    # Whole dimensions of the torus come first, and three axes, which take many times as long to
    # plan as two, after those.
    return tuple(sorted(enumerate_meshes(on, _MOST_AXES), key=_effort))


def _effort(mesh: LogicalMesh) -> tuple[bool, bool]:
    split = any(s.size != s.extent for axis in mesh.axes for s in axis.segments)
    return split, len(mesh.axes) > 2
