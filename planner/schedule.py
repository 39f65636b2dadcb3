"""A step in program order: kernels, collectives and loops, as plan data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.planner.evaluation import Evaluation
from shardwright.planner.graph import OpGraph
from shardwright.planner.plan_schema import ScheduledLoopModel, ScheduledModel

Entry = ScheduledModel | ScheduledLoopModel

_LOOP_ENTRY, _KERNEL, _COLLECTIVE = 0, 1, 2


@dataclass
class _Block:
    """What runs in a row: the program outside loops, or a loop's body.

    Attributes:
      passes: how often it runs in one step.
      found: (position, order among those of one position, what is there).
    """

    passes: float
    found: list[tuple[int, int, ScheduledModel | int]] = field(default_factory=list)


def schedule_entries(graph: OpGraph, evaluation: Evaluation) -> list[Entry]:
    """The step as the cost models see it, in program order; a loop is one entry.

    Seconds are of one pass of the loop that an entry is in, so that all of them times the passes
    of their loops are the compute and the communication of the evaluation. Exchanges of halos,
    which have no place of their own there, come last.
    """
    blocks = {-1: _Block(1.0)}
    for loop in graph.loops:  # outer loops come before inner ones
        parent = blocks[loop.parent]
        blocks[loop.id] = _Block(parent.passes * loop.trips)
        parent.found.append((loop.first_op - 1, _LOOP_ENTRY, loop.id))
    for op_id, seconds in evaluation.compute_by_op.items():
        op = graph.ops[op_id]
        block = blocks[op.loop]
        kernel = ScheduledModel(
            kind="compute", op=op.name, source=op.source, seconds=seconds / block.passes
        )
        block.found.append((op_id, _KERNEL, kernel))
    told = 0.0
    for priced in evaluation.collectives:
        c = priced.communication
        total = priced.seconds * c.trips
        told += total
        if priced.kind == "all_slice" or not total:
            continue
        near, block = graph.ops[c.near], blocks[c.loop]
        collective = ScheduledModel(
            kind=priced.kind.replace("_", "-"),
            op=near.name,
            source=near.source,
            axes=[axis.name for axis in c.step.axes],
            seconds=total / block.passes,
            hides=priced.can_hide,
        )
        block.found.append((c.near, _COLLECTIVE, collective))
    entries = list(_entries(graph, blocks, -1))
    halos = evaluation.collective_s - told
    if halos > 1e-12 * evaluation.collective_s:
        entries.append(ScheduledModel(kind="halo-exchange", op="", source="", seconds=halos))
    return entries


def _entries(graph: OpGraph, blocks: dict[int, _Block], number: int) -> Iterator[Entry]:
    """A block's entries in order, kernels of one source line in a row together."""
    last: ScheduledModel | None = None
    longest = 0.0
    for _, _, what in sorted(blocks[number].found, key=lambda item: item[:2]):
        if isinstance(what, ScheduledModel) and what.kind == "compute":
            if not what.seconds:
                continue
            if last is not None and last.source == what.source:
                op = what.op if what.seconds > longest else last.op
                longest = max(longest, what.seconds)
                seconds = last.seconds + what.seconds
                last = last.model_copy(update={"op": op, "seconds": seconds})
                continue
            if last is not None:
                yield last
            last, longest = what, what.seconds
            continue
        if last is not None:
            yield last
            last = None
        if isinstance(what, ScheduledModel):
            yield what
            continue
        inner = list(_entries(graph, blocks, what))
        if inner:
            loop = graph.loops[what]
            yield ScheduledLoopModel(
                entries=inner, trips=loop.trips, source=graph.ops[loop.first_op - 1].source
            )
    if last is not None:
        yield last
