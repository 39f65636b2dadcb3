"""Telling when kernels are compiled, which takes many seconds where no machine code is kept yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event


@contextmanager
def compilation_told(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` once, where this thread has to compile a kernel that is not on disk."""
    with event.install_listener("numba:compile", _Listener(tell)):
        yield


class _Listener(event.Listener):  # type: ignore[misc]
    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell
        self._thread = threading.get_ident()

    def on_start(self, event: Any) -> None:
        tell, mine = self._tell, threading.get_ident() == self._thread
        if tell is not None and mine:
            self._tell = None
            tell()

    def on_end(self, event: Any) -> None:
        pass
