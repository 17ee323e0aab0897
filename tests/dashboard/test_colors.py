"""Colours that everybody can tell apart, on light and on dark pages."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from flexq_bench.dashboard.shared.colors import PALETTE, kernel_styles

BACKGROUNDS = ("#FFFFFF", "#0E1117", "#171614")  # Streamlit's pages, 1.50 to 1.67
# Linear RGB as seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "normal": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# sRGB to XYZ (IEC 61966-2-1), over the white of D65
XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
) / np.array([[0.9505], [1.0], [1.089]])


def linear(color: str) -> NDArray[np.float64]:
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    xyz = XYZ @ rgb.clip(0, 1)
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("color", PALETTE)
def test_every_colour_has_a_contrast_of_at_least_three(color: str, background: str) -> None:
    light, dark = sorted((float(XYZ[1] @ linear(c)) for c in (color, background)), reverse=True)

    assert (light + 0.05) / (dark + 0.05) >= 3


@pytest.mark.parametrize("eye", EYES)
def test_every_pair_stays_apart_for_every_eye(eye: str) -> None:
    seen = {color: lab(EYES[eye] @ linear(color)) for color in PALETTE}

    nearest = min(np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(PALETTE, 2))

    assert nearest >= 15  # CIE76; 2.3 is just noticeable side by side


def test_a_kernel_keeps_its_colour_whatever_is_shown() -> None:
    kernels = ["cublaslt-w8a8", "flexq-w6a6", "flexq-w6a8"]

    alone = kernel_styles(kernels, [("flexq-w6a8", "")])["flexq-w6a8"]
    together = kernel_styles(kernels, [(kernel, "") for kernel in kernels])["flexq-w6a8"]

    assert alone == together


def test_variants_share_the_colour_of_their_kernel_without_fill() -> None:
    styles = kernel_styles(["flexq-w6a6"], [("flexq-w6a6", ""), ("flexq-w6a6", "vanilla")])

    plain, variant = styles["flexq-w6a6"], styles["flexq-w6a6[vanilla]"]
    assert plain.color == variant.color
    assert plain.symbol != variant.symbol
