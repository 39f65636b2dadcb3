"""Folders for what is only needed while a server lives."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from shardwright.api.store.process import is_dead, new_holder

_HOLDER = "holder"


def open_scratch(parent: Path) -> Path:
    """A new folder of this process's own; those of dead processes are deleted."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in parent.iterdir():
        holder = folder / _HOLDER
        if holder.is_file() and is_dead(holder.read_text(encoding="utf-8")):
            shutil.rmtree(folder, ignore_errors=True)
    own = Path(tempfile.mkdtemp(prefix="server-", dir=parent))
    (own / _HOLDER).write_text(new_holder(), encoding="utf-8")
    return own
