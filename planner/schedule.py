"""A step in program order, as the simulator takes it and as plan data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.cost_models.schedule import Entry, Kernel, Loop, Stage, Transfer, When
from shardwright.hardware_profiles.logical_mesh import DCN_DIMENSION
from shardwright.planner.communications import PricedCollective, PricedMove
from shardwright.planner.fusion import FusionPlan
from shardwright.planner.given import CONSTRAINT
from shardwright.planner.graph import OpGraph
from shardwright.planner.plan_schema import ScheduledLoopModel, ScheduledModel, StageModel

Model = ScheduledModel | ScheduledLoopModel

_BEFORE, _LOOP, _KERNEL, _AFTER = range(4)
_COMPUTE = "compute"
_HANDS_ON = frozenset(
    f"stablehlo.{name}"
    for name in (
        "add", "broadcast_in_dim", "convert", "dynamic_update_slice", "reduce_precision",
        "reshape", "transpose",
    )
) | {CONSTRAINT}  # fmt: skip
"""Operations that put a gradient where the passes of a loop gather them."""


@dataclass(frozen=True)
class Label:
    """What an entry of the schedule is: see `ScheduledModel`."""

    kind: str
    op: str
    source: str
    axes: tuple[str, ...] = ()


@dataclass
class _Block:
    """What runs in a row: the program outside loops, or a loop's body.

    Attributes:
      passes: how often it runs in one step.
      found: (position, order among those of one position, what is there).
    """

    passes: float
    found: list[tuple[int, int, Kernel | Transfer | int]] = field(default_factory=list)


def step_entries(
    graph: OpGraph,
    fusions: FusionPlan,
    compute_by_op: Mapping[int, float],
    collectives: Sequence[PricedCollective],
    moves: Iterable[PricedMove],
) -> tuple[Entry, ...]:
    """The step in program order; kernels of one source line in a row are one.

    Seconds are of one pass of the loop that an entry is in, so that all of them times the passes
    of their loops are the seconds of the step.

    Args:
      compute_by_op: the last operation of each kernel -> seconds of all its runs.
    """
    blocks = {-1: _Block(1.0)}
    for loop in graph.loops:  # outer loops come before inner ones
        parent = blocks[loop.parent]
        blocks[loop.id] = _Block(parent.passes * loop.trips)
        parent.found.append((loop.first_op - 1, _LOOP, loop.id))
    places = _Places(graph, fusions)
    for op_id, seconds in compute_by_op.items():
        op = graph.ops[op_id]
        block = blocks[op.loop]
        kernel = Kernel(seconds / block.passes, Label(_COMPUTE, op.name, op.source))
        block.found.append((op_id, _KERNEL, kernel))
    for priced in collectives:
        c = priced.communication
        if priced.kind == "all_slice" or not priced.seconds:
            continue
        near, block = graph.ops[c.near], blocks[c.loop]
        when: When = "ahead" if priced.can_hide else "stops"
        place = places.before(c.read_by, c.loop) if priced.can_hide else None
        axes = tuple(axis.name for axis in c.step.axes)
        label = Label(priced.kind.replace("_", "-"), near.name, near.source, axes)
        where = place or (places.kernel(c.near), _AFTER)
        stages = _part(priced.stages, c.trips / block.passes)
        if when == "stops" and places.leaves(c.read_by, c.loop):
            # libtpu 0.0.42.1 sends sums of gradients to other slices while the next pass runs.
            across = tuple(stage for stage in stages if DCN_DIMENSION in stage.links)
            stages = tuple(stage for stage in stages if DCN_DIMENSION not in stage.links)
            if across:
                block.found.append((*where, Transfer(across, "behind", label)))
        if stages:
            block.found.append((*where, Transfer(stages, when, label)))
    for move in moves:
        op = graph.ops[move.op]
        block = blocks[op.loop]
        place = None
        if move.when == "ahead":
            readers = [r for value in op.results for r in graph.uses().get(value, ())]
            place = places.before(readers, op.loop)
        label = Label(move.kind.replace("_", "-"), op.name, op.source, move.axes)
        transfer = Transfer(_part(move.stages, op.trips / block.passes), move.when, label)
        block.found.append((*(place or (places.kernel(op.id), _AFTER)), transfer))
    return tuple(_entries(graph, blocks, -1))


def _part(stages: Sequence[Stage], part: float) -> tuple[Stage, ...]:
    """Stages of something that a pass does in part (in a branch that is taken at times)."""
    return tuple(Stage(stage.links, stage.seconds * part) for stage in stages)


class _Places:
    """Where in its block something runs."""

    def __init__(self, graph: OpGraph, fusions: FusionPlan) -> None:
        self._graph = graph
        self._fusions = fusions

    def kernel(self, op_id: int) -> int:
        """The position of the kernel that an operation is in."""
        number = self._fusions.fusion_of_op.get(op_id)
        return op_id if number is None else self._fusions.fusions[number].ops[-1]

    def before(self, readers: Iterable[int], loop: int) -> tuple[int, int] | None:
        """The place before the first of some readers of a block; None where none is in it."""
        inside = [self.kernel(r) for r in readers if r >= 0 and self._graph.ops[r].loop == loop]
        return (min(inside), _BEFORE) if inside else None

    def leaves(self, readers: Iterable[int], loop: int) -> bool:
        """Whether all that is made of a value in a pass of a loop is what the pass hands on."""
        if loop < 0:
            return False
        end = self._graph.loops[loop].last_op - 1
        pending, seen = [r for r in readers if r != end], set()
        while pending:
            op = self._graph.ops[pending.pop()]
            if op.id in seen:
                continue
            seen.add(op.id)
            if op.name not in _HANDS_ON or op.loop != loop:
                return False
            pending += [r for value in op.results for r in self._graph.uses().get(value, ())]
        return True


def _entries(graph: OpGraph, blocks: dict[int, _Block], number: int) -> Iterator[Entry]:
    last: Kernel | None = None
    longest = 0.0
    for _, _, what in sorted(blocks[number].found, key=lambda item: item[:2]):
        if isinstance(what, Kernel):
            if not what.seconds:
                continue
            if last is not None and last.label.source == what.label.source:
                label = what.label if what.seconds > longest else last.label
                longest = max(longest, what.seconds)
                last = Kernel(last.seconds + what.seconds, label)
                continue
            if last is not None:
                yield last
            last, longest = what, what.seconds
            continue
        if last is not None:
            yield last
            last = None
        if isinstance(what, Transfer):
            yield what
            continue
        inner = tuple(_entries(graph, blocks, what))
        if inner:
            loop = graph.loops[what]
            head = graph.ops[loop.first_op - 1]
            yield Loop(inner, loop.trips, Label("loop", head.name, head.source))
    if last is not None:
        yield last


def schedule_models(entries: Sequence[Entry]) -> list[Model]:
    """Entries as plan data."""
    return [_model(entry) for entry in entries]


def _model(entry: Entry) -> Model:
    label: Label = entry.label
    if isinstance(entry, Loop):
        return ScheduledLoopModel(
            entries=schedule_models(entry.entries), trips=entry.passes, source=label.source
        )
    told = ScheduledModel(kind=label.kind, op=label.op, source=label.source, seconds=entry.seconds)
    if isinstance(entry, Kernel):
        return told
    return told.model_copy(
        update={
            "axes": list(label.axes),
            "hides": entry.when != "stops",
            "when": entry.when,
            "stages": [StageModel(links=list(s.links), seconds=s.seconds) for s in entry.stages],
        }
    )


def schedule_of_models(models: Sequence[Model]) -> tuple[Entry, ...]:
    """Plan data as entries; in a plan of an older version, mesh axes stand for links."""
    return tuple(_entry(model) for model in models)


def _entry(model: Model) -> Entry:
    if isinstance(model, ScheduledLoopModel):
        label = Label("loop", "", model.source)
        return Loop(schedule_of_models(model.entries), max(1, round(model.trips)), label)
    label = Label(model.kind, model.op, model.source, tuple(model.axes))
    if model.kind == _COMPUTE:
        return Kernel(model.seconds, label)
    stages = tuple(Stage(tuple(stage.links), stage.seconds) for stage in model.stages)
    when: When = "ahead" if model.hides and model.when == "stops" else model.when
    return Transfer(stages or (Stage(label.axes, model.seconds),), when, label)
