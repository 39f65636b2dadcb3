"""Keeps what the MIP solver writes to the console apart from the output of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def library_output_dropped() -> Iterator[None]:
    """Send file descriptor 1 to nowhere meanwhile.

    HiGHS prints some notes with `printf`, whatever its logging options say. This concerns the whole
    process, so it is for commands, which print nothing else meanwhile, not for the library.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
