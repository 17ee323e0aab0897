"""Sparkline for a table cell: a line with a noise band, as SVG."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

_WIDTH, _HEIGHT, _MARGIN = 160, 32, 3
_LINE, _BAND = "#0072B2", "#0072B2"
_MIN_SPAN = 0.02  # minimum height of the vertical axis, ln


def sparkline(ratios: Sequence[float], half_width: float) -> str:
    """Return an SVG as a data: URL; empty for fewer than two points.

    ratios: > 0, oldest first. half_width: of the noise band, ln. The vertical axis is logarithmic
    and spans at least 2 %, so that small noise looks small.
    """
    if len(ratios) < 2:
        return ""
    logs = [math.log(ratio) for ratio in ratios]
    low, high = min(logs) - half_width, max(logs) + half_width
    spare = max(_MIN_SPAN - (high - low), 0.0) / 2
    low, high = low - spare, high + spare

    def place(index: int, value: float) -> str:
        x = _MARGIN + index * (_WIDTH - 2 * _MARGIN) / (len(logs) - 1)
        y = _MARGIN + (high - value) / (high - low) * (_HEIGHT - 2 * _MARGIN)
        return f"{x:.1f},{y:.1f}"

    line = [place(i, value) for i, value in enumerate(logs)]
    above = [place(i, value + half_width) for i, value in enumerate(logs)]
    below = [place(i, value - half_width) for i, value in enumerate(logs)]
    end_x, end_y = line[-1].split(",")
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}">'
        f'<polygon points="{" ".join([*above, *reversed(below)])}" fill="{_BAND}" opacity="0.25"/>'
        f'<polyline points="{" ".join(line)}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>'
        f'<circle cx="{end_x}" cy="{end_y}" r="2.5" fill="{_LINE}"/></svg>'
    )
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
