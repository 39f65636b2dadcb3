"""Python's collector of cycles, which stands still while a stage of planning runs.

What a stage makes (every operation, value, node and constraint of a program) stays alive and has no
cycles; the collector would walk all of it again and again, a quarter of the time of large programs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Keeps the collector from running; also a decorator."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
