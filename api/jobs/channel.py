"""Messages between a worker and whoever started it: JSON, for the worker is not trusted.

A worker reads what strangers uploaded. Should a program ever take a worker over, then its messages
can lie about that program, and do no more.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

LONGEST_MESSAGE = 32 << 20
"""Bytes; an inspection of a program with 50,000 arguments is a third of it."""


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Sends a message.

    Raises:
      OSError: the other side is gone.
    """
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Waits for a message.

    Raises:
      EOFError: the other side is gone.
      OSError: the other side is gone, or its message is too long.
      ValueError: this is not a message.
    """
    message = json.loads(connection.recv_bytes(LONGEST_MESSAGE))
    if not isinstance(message, dict):
        raise ValueError("a message is a JSON object")
    return message
