"""Colours and markers of kernels, the same in every chart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.probes import is_probe

# Each has a contrast of at least 3 on white and on Streamlit's dark grey, and all pairs are
# distinguishable with normal, protan, deutan and tritan vision: see tests/dashboard/test_colors.py.
PALETTE = (
    "#0072B2",
    "#E05A00",
    "#12A37F",
    "#D25AFF",
    "#5A6978",
    "#B44B4B",
    "#9B22E8",
    "#A587B4",
)
# Symbols repeat the information of colours, and distinguish kernels when colours repeat.
_SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "cross",
    "triangle-down",
    "x",
    "pentagon",
    "star",
    "hexagon",
    "triangle-left",
)
_VARIANT_FILLS = ("", "-open", "-open-dot", "-dot")


@dataclass(frozen=True, slots=True)
class Style:
    """color: #RRGGBB. symbol: a Plotly marker."""

    color: str
    symbol: str


def kernel_styles(kernels: Iterable[str], used: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """Return the style of each label, by the index of its kernel among all sorted kernels.

    kernels: all kernels of the database, so that filters do not change colours; probes are skipped.
    used: kernels and variants that need a style; variants of a kernel have the same colour and
    symbol and differ in their fill.
    """
    variants: dict[str, set[str]] = defaultdict(lambda: {""})
    for kernel, variant in used:
        variants[kernel].add(variant)
    styles = {}
    ordered = sorted(k for k in {*kernels, *variants} if not is_probe(k))
    for i, kernel in enumerate(ordered):
        for j, variant in enumerate(sorted(variants[kernel])):
            fill = _VARIANT_FILLS[j % len(_VARIANT_FILLS)]
            style = Style(PALETTE[i % len(PALETTE)], _SYMBOLS[i % len(_SYMBOLS)] + fill)
            styles[kernel_label(kernel, variant)] = style
    return styles


def scheme_styles(schemes: Iterable[str]) -> dict[str, Style]:
    """Return the style of each scheme of whole models; see kernel_styles."""
    return kernel_styles((), [(name, "") for name in dict.fromkeys(schemes)])
