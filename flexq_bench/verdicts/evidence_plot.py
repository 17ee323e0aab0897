"""Plots of the evidence of a verdict: in the terminal and as a PNG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from flexq_bench.errors import UsageError
from flexq_bench.verdicts.confirmation import Comparison, Confirmation, judged_blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 61  # characters of the terminal's scale; odd, so that the middle is no change
_PANEL_IN = (7.0, 2.2)  # inches
_DPI = 120


@dataclass(frozen=True, slots=True)
class Panel:
    """A verdict to draw: its title, its comparison and its conclusion."""

    title: str
    comparison: Comparison
    confirmation: Confirmation


@dataclass(frozen=True, slots=True)
class Placement:
    """Changes of one placement's blocks, in percent of the base's time."""

    label: str
    blocks: tuple[float, ...]
    mean: float


def terminal_plot(panel: Panel) -> list[Text]:
    """One line per placement, with dots for blocks and a diamond for their mean; last the estimate.

    The scale is in percent around no change, and extends to the farthest block.
    """
    placements = placements_of(panel.comparison)
    if not placements:
        return [Text("no block that may be compared")]
    farthest = max(abs(change) for p in placements for change in p.blocks)
    reach = max(farthest, 0.1)
    lines = [Text(f"{'placement':>12}  {f'{-reach:.2g} %':<{_WIDTH - 8}}{f'+{reach:.2g} %':>8}")]
    for placement in placements:
        row = _scale()
        for change in placement.blocks:
            row[_column(change, reach)] = "·"
        row[_column(placement.mean, reach)] = "◆"
        lines.append(Text(f"{placement.label:>12}  {''.join(row)} {placement.mean:+.2f} %"))
    confirmation = panel.confirmation
    if math.isfinite(confirmation.log_ratio):
        row = _scale()
        low, mid, high = (
            _percent(v) for v in (confirmation.low, confirmation.log_ratio, confirmation.high)
        )
        for column in range(_column(low, reach), _column(high, reach) + 1):
            row[column] = "─"
        row[_column(mid, reach)] = "◆"
        style = "bold" if confirmation.verdict in ("slower", "faster") else ""
        lines.append(Text(f"{'estimate':>12}  {''.join(row)} {mid:+.2f} %", style=style))
    return lines


def write_png(path: Path, panels: Sequence[Panel]) -> None:
    """Draw one panel per verdict, one below the other. Raises UsageError if the file can't be
    written.
    """
    # The object interface needs no display and keeps no state between figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = _PANEL_IN[1] * max(len(panels), 1)
    figure = Figure(figsize=(_PANEL_IN[0], height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=False):
        _draw(axis, panel)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror or error}") from error


def _draw(axis: Axes, panel: Panel) -> None:
    placements = placements_of(panel.comparison)
    for position, placement in enumerate(placements):
        axis.plot(placement.blocks, [position] * len(placement.blocks), ".", color="0.6")
        axis.plot([placement.mean], [position], "D", color="tab:blue", markersize=5)
    confirmation = panel.confirmation
    if math.isfinite(confirmation.log_ratio):
        low, mid, high = (
            _percent(v) for v in (confirmation.low, confirmation.log_ratio, confirmation.high)
        )
        axis.axvspan(low, high, color="tab:orange", alpha=0.25, label="99 % bounds")
        axis.axvline(mid, color="tab:orange", label=f"estimate {mid:+.2f} %")
        limit = _percent(confirmation.smallest_change)
        axis.axvline(limit, color="tab:red", linestyle="--", label=f"smallest change {limit:.2g} %")
        axis.axvline(_percent(-confirmation.smallest_change), color="tab:red", linestyle="--")
        axis.legend(fontsize="x-small", loc="best")
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(placements)), [placement.label for placement in placements])
    axis.set_ylabel("placement")
    axis.set_xlabel("change of the time, %")
    axis.set_title(f"{panel.title}: {confirmation.verdict}", fontsize="small")


def placements_of(comparison: Comparison) -> list[Placement]:
    """The judged blocks by placement. Raises ValueError if lengths differ."""
    judged = judged_blocks(comparison)
    placements = []
    for label in judged.labels:
        logs = judged.ratios[judged.placement == label]
        blocks = tuple(_percent(float(value)) for value in logs)
        placements.append(Placement(str(label), blocks, _percent(float(logs.mean()))))
    return placements


def _scale() -> list[str]:
    row = [" "] * _WIDTH
    row[_WIDTH // 2] = "│"
    return row


def _column(percent: float, reach: float) -> int:
    share = min(max(percent / reach, -1.0), 1.0)
    return round((share + 1) / 2 * (_WIDTH - 1))


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)
