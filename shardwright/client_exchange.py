"""What a client asks of a server, apart from how it is sent.

A flow is a generator that yields what to do on the network and is sent what came of it, so that
the blocking and the asynchronous client are two small loops around the same flows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from shardwright.client_errors import BUSY, Answer, error_of_answer, error_of_transport
from shardwright.client_events import Event
from shardwright.errors import ShardwrightError

T = TypeVar("T")
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True)
class Send:
    """A request; answered by an `Answer`."""

    method: str
    path: str
    params: Mapping[str, str | int] = field(default_factory=dict)
    json: Any = None
    content: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Listen:
    """A stream of events, until `on_event` returns True or it ends.

    Answered by None, or by an `Answer` where the server sends no events.
    """

    path: str
    last_id: str
    on_event: Callable[[Event], bool]


@dataclass(frozen=True)
class Pause:
    """Time to wait, in seconds."""

    seconds: float


@dataclass(frozen=True)
class Withdraw:
    """A last request while an exception is on its way; whether it succeeds does not matter."""

    path: str


Step = Send | Listen | Pause | Withdraw
Flow = Generator[Step, Any, T]


@dataclass
class Contact:
    """What a client knows of its server.

    Attributes:
      url: the server's address, without a slash at the end.
      patience_s: how long to try again while the server is busy or away.
      known: it has answered before, so that silence means that it is away for a while.
    """

    url: str
    patience_s: float
    known: bool = False


class Patience:
    """Pauses that grow, until they would be longer in all than a client waits."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._pause = _FIRST_PAUSE_S

    def pause(self, error: ShardwrightError, at_least_s: float = 0.0) -> Pause:
        """The next pause; raises the error instead where it would end too late."""
        # Clients that were cut off together should not come back together.
        seconds = max(at_least_s, self._pause * random.uniform(0.5, 1.0))
        if time.monotonic() + seconds > self._deadline:
            raise error from None
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        return Pause(seconds)


def exchange(contact: Contact, request: Send, *, allowed: tuple[int, ...] = ()) -> Flow[Answer]:
    """Sends a request until it has a real answer, and returns a good one.

    Every request of this client can be repeated: the server knows programs by their content and
    gives the same plan for the same request.

    Args:
      allowed: statuses other than 2xx that are good too.

    Raises:
      ShardwrightError: what the server says, or that it stays busy or away.
    """
    patience = Patience(contact.patience_s)
    while True:
        try:
            answer: Answer = yield request
        except httpx.TransportError as fault:
            error: ShardwrightError = error_of_transport(fault, contact.url)
            if not contact.known:
                raise error from None
            yield patience.pause(error)
            continue
        if answer.status in BUSY:
            error = error_of_answer(answer)
            if not (contact.known or answer.is_problem or answer.retry_after_s):
                raise error  # a gateway whose server has never been seen
            yield patience.pause(error, answer.retry_after_s)
            continue
        if answer.status not in range(200, 300) and answer.status not in allowed:
            raise error_of_answer(answer)
        contact.known = True
        return answer
