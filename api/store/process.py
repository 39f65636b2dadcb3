"""Names of processes, by which others on the machine see that one is dead."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

import psutil


def new_holder() -> str:
    """A name for something in this process that holds leases."""
    began = psutil.Process().create_time()
    return "|".join((_place(), str(os.getpid()), f"{began:.3f}", secrets.token_hex(4)))


def is_dead(holder: str) -> bool:
    """The process was in the same place as this one, and is no more.

    Of a process elsewhere nothing is known, and it does not count as dead.
    """
    place, _, rest = holder.partition("|")
    pid, _, rest = rest.partition("|")
    began, _, _ = rest.partition("|")
    if place != _place() or not pid.isdecimal():
        return False
    try:
        process = psutil.Process(int(pid))
        same = f"{process.create_time():.3f}" == began
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _place() -> str:
    """What process ids are unique in: a boot of a machine and, in containers, a namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts).replace("|", "_")
