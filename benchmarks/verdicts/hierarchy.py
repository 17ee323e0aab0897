"""The levels of noise in measured blocks, and a plot of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from flexq_bench.stats.variance_components import variance_components

Row = dict[str, Any]  # of hardware.py
_WIDTH, _ROW, _LEFT, _TOP, _RIGHT = 960, 120, 250, 40, 20
_COLORS = {"base": "#0072b2", "head": "#d55e00"}  # Okabe and Ito: told apart by everybody
_SMALLEST_SPAN = 0.5  # percent


def sigmas(rows: Sequence[Row]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Relative sigma that each level adds, coarsest first.

    First of the times: process, placement, block, sample; each side's processes are its own.
    Second of ln(head / base): pair of processes, placement, block.
    """
    usable = [row for row in rows if np.isfinite(row["base_us"]) and np.isfinite(row["head_us"])]
    process = np.array([row["process"] for row in usable])
    placement = np.array([row["placement"] for row in usable])
    base = np.log([row["base_us"] for row in usable])
    head = np.log([row["head_us"] for row in usable])
    times = variance_components(
        np.concatenate([base, head]),
        [np.concatenate([2 * process, 2 * process + 1]), np.tile(placement, 2)],
    )
    samples = np.array([turn[1] for row in usable for turn in row["turns"]])
    sample = float(np.sqrt(np.mean(samples**2))) if samples.size else float("nan")
    return (*times, sample), variance_components(head - base, [process, placement])


def noise_plot(cases: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """An SVG: a strip a case; every placement is a point, in percent from the case's median.

    Points above one another are placements of one process; colours are the two sides of a pair.
    """
    height = _TOP + _ROW * len(cases) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20">placements by process, percent from the median of the case; '
        + "".join(f'<tspan fill="{color}"> ● {side}</tspan>' for side, color in _COLORS.items())
        + "</text>",
    ]
    for number, (name, rows) in enumerate(cases):
        parts += _strip(name, rows, _TOP + _ROW * number)
    return "\n".join([*parts, "</svg>", ""])


def _strip(name: str, rows: Sequence[Row], top: float) -> list[str]:
    points = []
    for side in _COLORS:
        groups: dict[tuple[int, int], list[float]] = {}
        for row in rows:
            if np.isfinite(row[f"{side}_us"]):
                group = (row["process"], row["placement"])
                groups.setdefault(group, []).append(row[f"{side}_us"])
        points += [(side, group[0], float(np.median(values))) for group, values in groups.items()]
    if not points:
        return []
    center = float(np.median([value for _, _, value in points]))
    percents = [100 * (value / center - 1) for _, _, value in points]
    span = max(_SMALLEST_SPAN, *map(abs, percents))
    processes = max(process for _, process, _ in points) + 1
    middle, half = top + _ROW / 2, _ROW / 2 - 12
    step = (_WIDTH - _LEFT - _RIGHT) / processes
    parts = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{middle}" y2="{middle}" stroke="#bbbbbb"/>',
        f'<text x="10" y="{middle - 4}">{escape(name)}</text>',
        f'<text x="10" y="{middle + 12}" fill="#555555">median {center:.2f} µs</text>',
    ]
    for sign in (1, -1):
        y = middle - sign * half
        label = f"{sign * span:+.1f} %"
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end" fill="#555555">{label}</text>'
        )
    for (side, process, _), percent in zip(points, percents, strict=True):
        x = _LEFT + step * (process + (0.35 if side == "base" else 0.65))
        y = middle - half * percent / span
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLORS[side]}" fill-opacity="0.7"/>'
        )
    return parts
