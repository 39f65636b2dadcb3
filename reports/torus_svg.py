"""The logical mesh drawn on the torus, as SVG.

Every mesh axis has a layer of its own: chips of one group alike in colour, links inside groups
drawn thick, the group of the first chip outlined. Layers are switched by style alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.hardware_profiles.logical_mesh import CORE_DIMENSION, DCN_DIMENSION, LogicalMesh
from shardwright.reports.palette import GROUP_COLOURS, LIGHT
from shardwright.reports.torus import AxisGroups, Panel, TorusLayout, axis_groups, lay_out

_LEAST_LABELLED_CELL = 18
_STATIC_STYLE = (
    "text{{font-family:system-ui,sans-serif;fill:{ink}}}"
    ".chip-group{{fill:{ink};text-anchor:middle;dominant-baseline:central}}"
    ".links{{stroke:{rule};stroke-width:1;fill:none}}"
    ".used{{stroke:{ink};fill:none}}"
    ".picked{{fill:none;stroke:{ink}}}"
    ".panel-title{{fill:{quiet};font-size:11px}}"
)


def shown_axes(mesh: LogicalMesh) -> list[str]:
    """The axes that a picture can show: those with more than one device, or else all."""
    return [a.name for a in mesh.axes if a.size > 1] or [a.name for a in mesh.axes]


def torus_svg(mesh: LogicalMesh, axis: str) -> str:
    """A picture for papers and slides: one mesh axis in the light palette, a file of its own."""
    layout = lay_out(mesh)
    style = _STATIC_STYLE.format(**LIGHT) + "".join(
        f".c{number}{{fill:{colour}}}" for number, colour in enumerate(GROUP_COLOURS)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {_box(layout)}>'
    title = f"<title>{escape(f'{mesh.slice.name}: groups of mesh axis {axis}')}</title>"
    background = f'<rect width="100%" height="100%" fill="{LIGHT["paper"]}"/>'
    body = _titles(layout) + _links(layout) + _layer(layout, axis_groups(mesh, axis))
    return f"{head}{title}<style>{style}</style>{background}{body}</svg>\n"


def torus_layers(mesh: LogicalMesh, title: str) -> str:
    """The picture for pages: a layer for each axis, coloured by the style sheet of the page."""
    layout = lay_out(mesh)
    layers = "".join(
        f'<g class="layer" data-axis="{number}">{_layer(layout, axis_groups(mesh, name))}</g>'
        for number, name in enumerate(shown_axes(mesh))
    )
    return (
        f'<svg class="torus-picture" role="img" aria-labelledby="torus-title" {_box(layout)}>'
        f'<title id="torus-title">{escape(title)}</title>'
        f"{_titles(layout)}{_links(layout)}{layers}"
        '<g class="pointed"></g></svg>'
    )


def torus_data(mesh: LogicalMesh) -> dict[str, Any]:
    """What a script needs to find the chip under a pointer and the group that it is in."""
    layout = lay_out(mesh)
    return {
        "dimensions": [[d.name, d.size] for d in layout.dimensions],
        "axes": [
            {
                "name": axis.name,
                "segments": [[s.dimension, s.size, s.stride] for s in axis.segments],
            }
            for axis in mesh.axes
        ],
        "shown": shown_axes(mesh),
        "across": layout.across,
        "down": layout.down,
        "planes": layout.planes,
        "cell": layout.cell,
        "pitch": layout.pitch,
        "panels": [[p.slice_index, p.plane, p.left, p.top] for p in layout.panels],
    }


def _box(layout: TorusLayout) -> str:
    width, height = round(layout.width), round(layout.height)
    return f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'


def _titles(layout: TorusLayout) -> str:
    """What each panel is, and which way its dimensions run."""
    margin = layout.panels[0].left
    directions = [f"{layout.across} →"] if layout.across else []
    directions += [f"{layout.down} ↓"] if layout.down else []
    texts = []
    for number, panel in enumerate(layout.panels):
        names = []
        if layout.size(DCN_DIMENSION) > 1:
            names.append(f"slice {panel.slice_index}")
        if layout.planes:
            names.append(f"{layout.planes}={panel.plane}")
        if number == 0:
            names.append("  ".join(directions))
        if names:
            at = f'x="{panel.left:g}" y="{panel.top - margin - 2:g}"'
            texts.append(f'<text class="panel-title" {at}>{",  ".join(names)}</text>')
    return "".join(texts)


def _place(layout: TorusLayout, panel: Panel, across: int, down: int) -> tuple[int, ...]:
    """Physical coordinates of the first device of a chip."""
    at = {
        layout.across: across,
        layout.down: down,
        layout.planes: panel.plane,
        DCN_DIMENSION: panel.slice_index,
        CORE_DIMENSION: 0,
    }
    return tuple(at.get(d.name, 0) for d in layout.dimensions)


def _layer(layout: TorusLayout, groups: AxisGroups) -> str:
    squares: dict[int, list[str]] = defaultdict(list)
    picked: list[str] = []
    labels: list[str] = []
    cores = layout.cores
    width = layout.cell / cores
    first = groups.group.reshape(-1)[0]
    labelled = width >= _LEAST_LABELLED_CELL or (cores > 1 and width >= _LEAST_LABELLED_CELL / 2)
    for panel, across, down, left, top in _cells(layout):
        place = _place(layout, panel, across, down)
        for core in range(cores):
            at = (*place[:-1], core) if cores > 1 else place
            x = left + core * width
            square = f"M{x:g} {top:g}h{width:g}v{layout.cell:g}h{-width:g}z"
            squares[int(groups.colour[at])].append(square)
            if groups.group[at] == first:
                picked.append(square)
            if labelled:
                centre = f'x="{x + width / 2:g}" y="{top + layout.cell / 2:g}"'
                labels.append(f"<text {centre}>{groups.group[at]}</text>")
    parts = [
        f'<path class="c{colour}" d="{"".join(paths)}"/>'
        for colour, paths in sorted(squares.items())
    ]
    used = _used_links(layout, groups)
    if used:
        thick = max(1.0, layout.cell / 9)
        parts.append(f'<path class="used" stroke-width="{thick:.1f}" d="{used}"/>')
    outline = max(1.2, layout.cell / 12)
    parts.append(f'<path class="picked" stroke-width="{outline:.1f}" d="{"".join(picked)}"/>')
    if labels:
        size = min(10.0, width * 0.48)
        parts.append(f'<g class="chip-group" font-size="{size:.1f}">{"".join(labels)}</g>')
    return "".join(parts)


def _cells(layout: TorusLayout) -> list[tuple[Panel, int, int, float, float]]:
    return [
        (
            panel,
            across,
            down,
            panel.left + across * layout.pitch,
            panel.top + down * layout.pitch,
        )
        for panel in layout.panels
        for down in range(layout.size(layout.down))
        for across in range(layout.size(layout.across))
    ]


def _links(layout: TorusLayout) -> str:
    return f'<path class="links" d="{_link_path(layout, None)}"/>'


def _used_links(layout: TorusLayout, groups: AxisGroups) -> str:
    return _link_path(layout, groups.group)


def _link_path(layout: TorusLayout, group: NDArray[np.int64] | None) -> str:
    """Links of every panel, or only those that join two chips of one group.

    A wraparound link is a stub at both ends of its row or column.
    """
    gap = layout.pitch - layout.cell
    half = layout.cell / 2
    stub = min(gap + 3, layout.cell)
    drawn: list[str] = []

    def joined(panel: Panel, one: Sequence[int], other: Sequence[int]) -> bool:
        if group is None:
            return True
        first = group[_place(layout, panel, one[0], one[1])]
        return bool(first == group[_place(layout, panel, other[0], other[1])])

    columns, rows = layout.size(layout.across), layout.size(layout.down)
    for panel, across, down, left, top in _cells(layout):
        here = (across, down)
        if across + 1 < columns and joined(panel, here, (across + 1, down)):
            drawn.append(f"M{left + layout.cell:g} {top + half:g}h{gap:g}")
        if down + 1 < rows and joined(panel, here, (across, down + 1)):
            drawn.append(f"M{left + half:g} {top + layout.cell:g}v{gap:g}")
        if across == 0 and layout.wraps(layout.across) and joined(panel, here, (columns - 1, down)):
            drawn.append(f"M{left:g} {top + half:g}h{-stub:g}")
            drawn.append(f"M{left + columns * layout.pitch - gap:g} {top + half:g}h{stub:g}")
        if down == 0 and layout.wraps(layout.down) and joined(panel, here, (across, rows - 1)):
            drawn.append(f"M{left + half:g} {top:g}v{-stub:g}")
            drawn.append(f"M{left + half:g} {top + rows * layout.pitch - gap:g}v{stub:g}")
    return "".join(drawn)
