"""Figure of the sensitivity: perplexity increase of each kind of layer, gain of A8 of each site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexq_bench.accuracy.perplexity import PerplexityResult
from flexq_bench.accuracy.sensitivity.layer_kinds import KindSensitivity
from flexq_bench.errors import UsageError
from flexq_bench.schemes.layer_sensitivity import SiteSensitivity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_IN = (7.0, 3.2)
_DPI = 150
_BAR = 0.8  # of the distance between kinds, for all settings together


def write_figure(
    path: Path,
    title: str,
    dense: PerplexityResult,
    kinds: Sequence[KindSensitivity],
    sensitivities: Sequence[SiteSensitivity] = (),
) -> None:
    """Write a PNG: bars of the increase of each kind and, if given, a map of each site's gain.

    Raises UsageError if the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = 2 if sensitivities else 1
    figure = Figure((_PANEL_IN[0], panels * _PANEL_IN[1]), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    axes[0].set_title(f"{title}: perplexity {dense.perplexity:.2f} as it is")
    _bars(axes[0], dense, kinds)
    if sensitivities:
        _gains(axes[1], sensitivities)
        axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror or error}") from error


def _bars(axis: Axes, dense: PerplexityResult, kinds: Sequence[KindSensitivity]) -> None:
    names = list(dict.fromkeys(sensitivity.kind for sensitivity in kinds))
    settings = list(dict.fromkeys(sensitivity.bits.name for sensitivity in kinds))
    width = _BAR / len(settings)
    for number, setting in enumerate(settings):
        of_setting = [sensitivity for sensitivity in kinds if sensitivity.bits.name == setting]
        places = [
            names.index(sensitivity.kind) + (number - (len(settings) - 1) / 2) * width
            for sensitivity in of_setting
        ]
        heights = [
            sensitivity.result.perplexity / dense.perplexity - 1 for sensitivity in of_setting
        ]
        axis.bar(places, heights, width, label=setting)
        for place, sensitivity in zip(places, of_setting, strict=True):
            if sensitivity.relative_ends is not None:
                axis.plot([place, place], sensitivity.relative_ends, color="black", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set_xticks(range(len(names)), names, rotation=20)
    axis.set_ylabel("perplexity, increase")
    axis.yaxis.set_major_formatter(_percent)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.legend(fontsize="small")


def _gains(axis: Axes, sensitivities: Sequence[SiteSensitivity]) -> None:
    kinds = list(dict.fromkeys(sensitivity.site.role for sensitivity in sensitivities))
    blocks = 1 + max(sensitivity.site.block for sensitivity in sensitivities)
    total = sum(sensitivity.gain for sensitivity in sensitivities)
    table = [[0.0] * blocks for _ in kinds]
    for sensitivity in sensitivities:
        table[kinds.index(sensitivity.site.role)][sensitivity.site.block] += (
            sensitivity.gain / total
        )
    image = axis.imshow(table, aspect="auto", cmap="viridis", norm="log", interpolation="nearest")
    axis.set_yticks(range(len(kinds)), kinds)
    axis.set_xlabel("block")
    axis.set_title("share of what 8-bit activations save, by layer", fontsize="medium")
    axis.figure.colorbar(image, ax=axis, format=_percent)


def _percent(value: float, _: object = None) -> str:
    return f"{100 * value:g} %"
