"""Colours of pictures that stand alone; pages have the same in their style sheet.

Group colours are the qualitative set of Okabe and Ito (2008, "Color Universal Design"), lightened
so that dark text on them keeps a contrast of at least 4.5.
"""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2430",
    "quiet": "#566173",
    "rule": "#d5dae2",
    "compute": "#2f6db3",
    "exposed": "#c4501b",
    "hidden": "#8a94a6",
    "state": "#2f6db3",
    "input": "#6fb1e0",
    "loop": "#c4501b",
    "collective": "#e3a13a",
    "result": "#8e5ea8",
    "temporary": "#8a94a6",
}
GROUP_COLOURS = (
    "#a8cbea",
    "#f3b98c",
    "#9bd8bd",
    "#ecd06a",
    "#d6b3dc",
    "#c6cdd8",
    "#e9a3ab",
    "#bfdc8c",
)
GENERATION_COLOURS = (
    "#2f6db3",
    "#c4501b",
    "#1c8767",
    "#8e5ea8",
    "#8a6a00",
    "#566173",
    "#b23a62",
)
