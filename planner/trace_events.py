"""A plan's predicted step as trace events, which Perfetto and chrome://tracing open.

What is shown is the schedule that step times come from (`shardwright.cost_models.schedule`), not
the compiler's: kernels run one after another in program order; collectives that stop them, and
others that run beside them, on tracks by mesh axes. Every device does the same, so one is drawn.

Source of the format: Trace Event Format, Google, "Complete events" and "Metadata events" (`ph`
"X" and "M"; `ts` and `dur` in microseconds).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwright.cost_models.schedule import Entry, Loop, Span, simulate
from shardwright.errors import InputError
from shardwright.planner.plan_schema import PlanModel
from shardwright.planner.schedule import Label, schedule_of_models

_PROCESS = 1
_COMPUTE_TRACK = 1
_MOST_EVENTS = 200_000
_MICROSECONDS = 1e6

Event = dict[str, Any]


def trace(plan: PlanModel) -> dict[str, Any]:
    """One step of a plan as a JSON object of the trace event format.

    Raises:
      InputError: the plan is of an older version that kept no schedule.
    """
    schedule = schedule_of_models(plan.estimate.schedule)
    if not schedule:
        raise InputError(
            "the plan keeps no schedule", where=plan.program.name, do="Plan again and save it"
        )
    timeline = _Timeline()
    simulate(schedule, timeline.add, min(1.0, _MOST_EVENTS / _size(schedule)))
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh_axes.items())
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "program": plan.program.name,
            "topology": plan.topology,
            "mesh": axes,
            "step_time_s": plan.estimate.step_time_s,
            "shown": "the cost model's step, not the compiler's schedule",
        },
        "traceEvents": [*_names(plan, axes, timeline.tracks), *timeline.events],
    }


def _size(entries: Sequence[Entry]) -> int:
    """About how many events entries make when every pass of every loop is drawn."""
    return sum(
        1 + entry.passes * _size(entry.entries) if isinstance(entry, Loop) else 1
        for entry in entries
    )


def _names(plan: PlanModel, axes: str, tracks: dict[str, int]) -> Iterator[Event]:
    yield _metadata("process_name", 0, f"{plan.program.name} on {plan.topology}, {axes}")
    for name, track in {"compute": _COMPUTE_TRACK, **tracks}.items():
        yield _metadata("thread_name", track, name)
        yield {**_metadata("thread_sort_index", track, ""), "args": {"sort_index": track}}


def _metadata(kind: str, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": name}}


class _Timeline:
    """Spans of a schedule as events.

    Attributes:
      events: in the order in which they were told.
      tracks: name of a track of transfers -> its number.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.tracks: dict[str, int] = {}

    def add(self, span: Span) -> None:
        """Draws a span; what two transfers do at the same time is on different tracks."""
        label: Label = span.label
        track, name, told = _COMPUTE_TRACK, label.op.removeprefix("stablehlo."), {}
        if label.kind == "loop":
            name = "more passes"
        elif span.exposed is not None:
            track, name = self._track(label, span.exposed), label.kind
            told = {"exposed": span.exposed}
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": "compute" if track == _COMPUTE_TRACK else "communication",
                "pid": _PROCESS,
                "tid": track,
                "ts": span.start_s * _MICROSECONDS,
                "dur": span.seconds * _MICROSECONDS,
                "args": {"source": label.source, **told},
            }
        )

    def _track(self, label: Label, exposed: bool) -> int:
        if label.axes:
            over = "+".join(label.axes)
            name = f"collectives over {over}" if exposed else f"hidden, over {over}"
        else:
            name = label.kind if exposed else f"hidden {label.kind}"
        return self.tracks.setdefault(name, _COMPUTE_TRACK + 1 + len(self.tracks))
