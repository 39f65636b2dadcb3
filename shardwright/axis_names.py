"""What a mesh axis may be called."""

from __future__ import annotations

AXIS_NAME_HELP = "letters from A to Z, digits and underscores, and no digit first"


def is_axis_name(name: str) -> bool:
    """Whether a mesh axis may be called so: other letters are escaped in printed programs."""
    return name.isascii() and name.isidentifier()
