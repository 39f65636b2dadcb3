"""Where what is worth keeping between runs lies on disk."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder for one kind of thing: in SHARDWRIGHT_CACHE, or in the user's own cache.

    It may not exist yet.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SHARDWRIGHT_CACHE") or home / "shardwright") / kind
