"""A step as a schedule: what runs beside what, and how long it takes.

One core computes, kernel after kernel in program order. Transfers (collectives, copies to and from
the host) occupy links: a dimension of the torus, the data-centre network, one direction of PCIe.
Transfers that use different links run at the same time; on a link they queue. A transfer that
kernels wait for has precedence, others go on behind it, as the TPU compiler cuts them into parts.

What leaves a pass of a loop may do so while the next pass computes, as libtpu 0.0.42.1 writes the
sums of gradients over slices: sent at the start of the next pass, received at its end. What a pass
gathers it gathers itself: of a decoder layer's weights the first gather is synchronous there, and
the others run beside the kernels before their use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

When = Literal["stops", "ahead", "behind"]

_IN_FLIGHT = 16
"""Transfers that may be under way at a time."""
_SIMULATED_PASSES = 4
"""Passes of a loop after which the rest take as long as the last: the queues are then steady."""
_TINY = 1e-15


@dataclass(frozen=True)
class Kernel:
    """Something that computes for `seconds`; `label` is the caller's."""

    seconds: float
    label: Any = None


@dataclass(frozen=True)
class Stage:
    """A part of a transfer that occupies `links` for `seconds`."""

    links: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Transfer:
    """Something that moves over links while kernels may run.

    Attributes:
      stages: its parts, one after the other.
      when: it "stops" the kernels where it stands; or its result is wanted where it stands, and it
        may run "ahead", from the start of its pass; or it starts where it stands and runs "behind",
        at the latest until it stands there again or the loop ends.
    """

    stages: tuple[Stage, ...]
    when: When = "stops"
    label: Any = None

    @property
    def seconds(self) -> float:
        """Seconds that it takes by itself."""
        return sum(stage.seconds for stage in self.stages)


@dataclass(frozen=True)
class Loop:
    """Entries that run `passes` times, one after the other."""

    entries: tuple[Entry, ...]
    passes: int
    label: Any = None


Entry = Kernel | Transfer | Loop


@dataclass(frozen=True)
class Span:
    """Something that runs without interruption.

    Attributes:
      label: of the kernel, transfer or loop.
      exposed: a transfer that kernels wait for; None for what computes.
    """

    label: Any
    start_s: float
    seconds: float
    exposed: bool | None


OnSpan = Callable[[Span], None]


@dataclass(frozen=True)
class Schedule:
    """How long a step takes, and in how much of it no kernel runs."""

    seconds: float
    exposed_s: float


def simulate(
    entries: Sequence[Entry], on_span: OnSpan | None = None, shown_passes: float = 1.0
) -> Schedule:
    """Runs a step.

    Args:
      entries: in program order.
      on_span: told of everything that runs, in the order in which it starts or ends.
      shown_passes: the part of the passes of each loop that `on_span` is told of one by one; the
        others are one span with the loop's label. They are simulated alike either way.
    """
    run = _Run(on_span, shown_passes)
    run.once(entries)
    return Schedule(run.now, run.exposed)


@dataclass(eq=False)
class _Pending:
    """A transfer under way, for a pass of its block."""

    transfer: Transfer
    turn: int
    stage: int = 0
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self._enter(0)

    @property
    def done(self) -> bool:
        return self.stage >= len(self.transfer.stages)

    @property
    def links(self) -> tuple[str, ...]:
        return self.transfer.stages[self.stage].links

    def advance(self, seconds: float) -> None:
        self.left -= seconds
        if self.left <= _TINY:
            self._enter(self.stage + 1)

    def _enter(self, stage: int) -> None:
        stages = self.transfer.stages
        while stage < len(stages) and stages[stage].seconds <= _TINY:
            stage += 1
        self.stage = stage
        self.left = stages[stage].seconds if stage < len(stages) else 0.0


class _Queue:
    """Transfers that run beside the kernels of one block, first come first served on each link."""

    def __init__(self) -> None:
        self._waiting: deque[_Pending] = deque()
        self._passes_of: dict[int, list[_Pending]] = {}

    def add(self, transfers: Iterable[Transfer], turn: int) -> None:
        for transfer in transfers:
            pending = _Pending(transfer, turn)
            if not pending.done:
                self._waiting.append(pending)
                self._passes_of.setdefault(id(transfer), []).append(pending)

    def holds(self, transfer: Transfer | None, turn: int) -> bool:
        """Whether a transfer of a pass up to `turn` is not done, or whether anything is."""
        if transfer is None:
            return bool(self._waiting)
        return any(p.turn <= turn for p in self._passes_of.get(id(transfer), ()))

    def skip(self, passes: int) -> None:
        """Makes what is under way that of later passes."""
        for pending in self._waiting:
            pending.turn += passes

    def running(self, busy: Iterable[str] = ()) -> list[_Pending]:
        """What runs now while other transfers hold the links `busy`."""
        taken, found = set(busy), []
        for pending, _ in zip(self._waiting, range(_IN_FLIGHT), strict=False):
            if taken.isdisjoint(pending.links):
                found.append(pending)
            taken.update(pending.links)
        return found

    def advance(self, running: Sequence[_Pending], seconds: float) -> None:
        for pending in running:
            pending.advance(seconds)
        for pending in running:
            if pending.done:
                self._waiting.remove(pending)
                self._passes_of[id(pending.transfer)].remove(pending)


class _Run:
    def __init__(self, on_span: OnSpan | None, shown_passes: float) -> None:
        self.now = 0.0
        self.exposed = 0.0
        self._on_span = on_span
        self._shown_passes = shown_passes

    def once(self, entries: Sequence[Entry]) -> None:
        """The program outside loops."""
        queue = _Queue()
        queue.add(_ahead(entries), 0)
        self._pass(entries, queue, 0)
        self._wait(queue, None, 0)

    def _pass(self, entries: Sequence[Entry], queue: _Queue, turn: int) -> None:
        for entry in entries:
            if isinstance(entry, Loop):
                self._loop(entry)
            elif isinstance(entry, Kernel):
                self._tell(entry.label, entry.seconds, None)
                self._beside(queue, entry.seconds, (), False)
            elif entry.when == "stops":
                for stage in entry.stages:
                    self.exposed += stage.seconds
                    self._tell(entry.label, stage.seconds, True)
                    self._beside(queue, stage.seconds, stage.links, True)
            elif entry.when == "ahead":
                self._wait(queue, entry, turn)
            else:  # what left in the pass before leaves its buffer to this one
                self._wait(queue, entry, turn - 1)
                queue.add([entry], turn)

    def _loop(self, loop: Loop) -> None:
        ahead = _ahead(loop.entries)
        queue = _Queue()
        told = self._on_span is not None
        most = max(1, int(loop.passes * self._shown_passes)) if told else _SIMULATED_PASSES
        turn = 0
        while turn < loop.passes:
            start, waited = self.now, self.exposed
            queue.add(ahead, turn)
            self._pass(loop.entries, queue, turn)
            turn += 1
            alike = loop.passes - turn
            if alike > 0 and turn >= most:
                seconds = self.now - start
                self.exposed += alike * (self.exposed - waited)
                self._tell(loop.label, alike * seconds, None)
                self.now += alike * seconds
                queue.skip(alike)
                turn += alike
        self._wait(queue, None, turn)

    def _wait(self, queue: _Queue, transfer: Transfer | None, turn: int) -> None:
        """Lets a transfer end, or all."""
        while queue.holds(transfer, turn):
            seconds = min(pending.left for pending in queue.running())
            self.exposed += seconds
            self._beside(queue, seconds, (), True)

    def _beside(self, queue: _Queue, seconds: float, busy: Sequence[str], exposed: bool) -> None:
        """Lets time pass in which transfers of the queue run on links that are not busy."""
        # Counted by itself: late in a step the clock does not tell short times apart.
        end, left = self.now + seconds, seconds
        while left > _TINY:
            running = queue.running(busy)
            if not running:
                break
            part = min(left, *(pending.left for pending in running))
            left -= part
            for number, pending in enumerate(running):
                # Of several that kernels wait for at once, one tells of it.
                self._tell(pending.transfer.label, part, exposed and not busy and not number)
            queue.advance(running, part)
            self.now += part
        self.now = end

    def _tell(self, label: Any, seconds: float, exposed: bool | None) -> None:
        if self._on_span is not None and seconds > _TINY:
            self._on_span(Span(label, self.now, seconds, exposed))


def _ahead(entries: Sequence[Entry]) -> list[Transfer]:
    return [e for e in entries if isinstance(e, Transfer) and e.when == "ahead"]
