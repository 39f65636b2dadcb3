"""Server-sent events, as they come over the wire.

Source of the format: WHATWG HTML Living Standard, section 9.2.6, "Interpreting an event stream".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One event: its name, its data, and the id to resume after it."""

    name: str
    data: str
    id: str


class EventParser:
    """Puts events together from pieces of text that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = ""
        self._name = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, text: str) -> list[Event]:
        """The events that are whole after this piece."""
        # Only these end a line; str.splitlines knows more, which JSON may hold.
        whole = self._rest + text
        # A \r at the very end may be half of a \r\n.
        held = "\r" if whole.endswith("\r") else ""
        lines = whole[: len(whole) - len(held)].replace("\r\n", "\n").replace("\r", "\n")
        *complete, rest = lines.split("\n")
        self._rest = rest + held
        return [event for line in complete if (event := self._line(line)) is not None]

    def _line(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        elif field == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> Event | None:
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return Event(name, "\n".join(data), self._id) if data else None
