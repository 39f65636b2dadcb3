"""A plan's predicted step as trace events, which Perfetto and chrome://tracing open.

What is shown is the model that step times come from, not the compiler's schedule: kernels run one
after another in program order; a collective that nothing hides stops them; all-gathers of weights
run beside the kernels of their loop, drawn from the start of each pass, and stop them only for
what is left when the pass is over. Every device does the same, so one is drawn.

Source of the format: Trace Event Format, Google, "Complete events" and "Metadata events" (`ph`
"X" and "M"; `ts` and `dur` in microseconds).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import InputError
from shardwright.planner.plan_schema import PlanModel, ScheduledLoopModel, ScheduledModel

_PROCESS = 1
_COMPUTE_TRACK = 1
_MOST_EVENTS = 200_000
_MICROSECONDS = 1e6

Entry = ScheduledModel | ScheduledLoopModel
Event = dict[str, Any]


def trace(plan: PlanModel) -> dict[str, Any]:
    """One step of a plan as a JSON object of the trace event format.

    Raises:
      InputError: the plan is of an older version that kept no schedule.
    """
    schedule = plan.estimate.schedule
    if not schedule:
        raise InputError(
            "the plan keeps no schedule", where=plan.program.name, do="Plan again and save it"
        )
    timeline = _Timeline(_MOST_EVENTS / max(1.0, _size(schedule)))
    timeline.run(schedule)
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


def _size(entries: Sequence[Entry]) -> float:
    """How many events entries make when every pass of every loop is drawn."""
    return sum(
        1.0 if isinstance(entry, ScheduledModel) else 1.0 + entry.trips * _size(entry.entries)
        for entry in entries
    )


def _names(plan: PlanModel, axes: str, tracks: dict[str, int]) -> Iterator[Event]:
    yield _metadata("process_name", 0, f"{plan.program.name} on {plan.topology}, {axes}")
    for name, track in {"compute": _COMPUTE_TRACK, **tracks}.items():
        yield _metadata("thread_name", track, name)
        yield {**_metadata("thread_sort_index", track, ""), "args": {"sort_index": track}}


def _metadata(kind: str, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": name}}


@dataclass
class _Timeline:
    """Draws entries one after another.

    Attributes:
      drawn: part of the passes that may be drawn; below 1 where there are very many.
      now: seconds since the step began.
      tracks: name of a track of collectives -> its number.
    """

    drawn: float
    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    tracks: dict[str, int] = field(default_factory=dict)

    def run(self, entries: Sequence[Entry]) -> None:
        """One pass over entries."""
        gathers = [e for e in entries if isinstance(e, ScheduledModel) and e.hides]
        ahead = _Gathers(self, gathers)
        for entry in entries:
            if isinstance(entry, ScheduledLoopModel):
                self._loop(entry)
            elif entry.hides:
                continue
            elif entry.kind == "compute":
                ahead.beside(self.now, entry.seconds)
                self._kernel(entry)
            else:
                self.collective(entry, self.now, entry.seconds, exposed=True)
                self.now += entry.seconds
        for entry, seconds in ahead.left():
            self.collective(entry, self.now, seconds, exposed=True)
            self.now += seconds

    def _loop(self, loop: ScheduledLoopModel) -> None:
        passes = loop.trips
        whole = int(passes) if passes == int(passes) else 1
        if self.drawn < 1.0:
            whole = max(1, int(whole * self.drawn))
        began = self.now
        for _ in range(whole):
            self.run(loop.entries)
        if whole < passes:  # the rest of the passes take as long as the drawn ones
            each = (self.now - began) / whole
            rest = (passes - whole) * each
            self._add(
                _COMPUTE_TRACK, f"{passes - whole:g} more passes", self.now, rest, loop.source
            )
            self.now += rest

    def _kernel(self, entry: ScheduledModel) -> None:
        name = entry.op.removeprefix("stablehlo.")
        self._add(_COMPUTE_TRACK, name, self.now, entry.seconds, entry.source)
        self.now += entry.seconds

    def collective(
        self, entry: ScheduledModel, at: float, seconds: float, *, exposed: bool
    ) -> None:
        """Draws a collective, or a part of one, on the track of its axes."""
        axes = "+".join(entry.axes) or "halos"
        name = f"collectives over {axes}" if exposed else f"gathers ahead over {axes}"
        track = self.tracks.setdefault(name, _COMPUTE_TRACK + 1 + len(self.tracks))
        self._add(track, entry.kind, at, seconds, entry.source, exposed=exposed)

    def _add(
        self, track: int, name: str, at: float, seconds: float, source: str, **more: Any
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": "compute" if track == _COMPUTE_TRACK else "communication",
                "pid": _PROCESS,
                "tid": track,
                "ts": at * _MICROSECONDS,
                "dur": seconds * _MICROSECONDS,
                "args": {"source": source, **more},
            }
        )


class _Gathers:
    """All-gathers of one pass, drawn beside its kernels for as long as these last."""

    def __init__(self, timeline: _Timeline, gathers: Sequence[ScheduledModel]) -> None:
        self._timeline = timeline
        self._waiting = [(entry, entry.seconds) for entry in gathers]

    def beside(self, at: float, seconds: float) -> None:
        """Draws what runs while a kernel runs."""
        while self._waiting and seconds > 0:
            entry, needed = self._waiting[0]
            part = min(needed, seconds)
            self._timeline.collective(entry, at, part, exposed=False)
            at += part
            seconds -= part
            if part < needed:
                self._waiting[0] = (entry, needed - part)
            else:
                self._waiting.pop(0)

    def left(self) -> list[tuple[ScheduledModel, float]]:
        """What no kernel hid, with its seconds."""
        return list(self._waiting)
