"""Plot of a sweep's results: time over M, one line per kernel, one panel per shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from flexq_bench.db.queries import ResultRow
from flexq_bench.errors import InfrastructureError
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.probes import is_probe

_MAX_PANELS = 12
_MAX_COLUMNS = 3
_PANEL_IN = (4.6, 3.4)
_DPI = 120


def write_plot(results: Sequence[ResultRow], path: Path) -> int:
    """Plot the first twelve shapes of a sweep; returns the number of all shapes.

    Both axes are logarithmic; the dashed line is the read floor. Results without a time are left
    out.
    Raises InfrastructureError if the file can't be written.
    """
    from matplotlib.figure import Figure

    panels = _panels(results)
    shown = list(panels.items())[:_MAX_PANELS]
    columns = min(_MAX_COLUMNS, max(1, len(shown)))
    rows = -(-max(1, len(shown)) // columns)
    figure = Figure(figsize=(_PANEL_IN[0] * columns, _PANEL_IN[1] * rows), layout="constrained")
    for place, (title, members) in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for label, points in members.items():
            ordered = sorted(points)
            axes.plot(
                [m for m, _, _ in ordered], [us for _, us, _ in ordered], marker="o", label=label
            )
        floors = [f for points in members.values() for _, _, f in points if f is not None]
        if floors:
            axes.axhline(min(floors), linestyle="--", color="gray", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("M (tokens)")
        axes.set_ylabel("time (µs)")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7)
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise InfrastructureError(f"can't write {path}: {error.strerror or error}") from error
    return len(panels)


_Points = list[tuple[int, float, float | None]]  # M, median in us, floor in us


def _panels(results: Sequence[ResultRow]) -> dict[str, dict[str, _Points]]:
    """Points by panel title and kernel label, in the order of the results."""
    panels: dict[str, dict[str, _Points]] = defaultdict(lambda: defaultdict(list))
    for row in results:
        if row.median_us is None or row.m is None or is_probe(row.kernel):
            continue
        name = f"{row.model} {row.layer}".strip()
        title = f"{name} N={row.n} K={row.k} {row.stage} {row.cache} {row.gpu}".strip()
        label = kernel_label(row.kernel, row.variant)
        panels[title][label].append((row.m, row.median_us, row.floor_us))
    return panels
