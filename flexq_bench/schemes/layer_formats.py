"""Number formats of a layer under a scheme, which are known before calibration."""

from __future__ import annotations

from dataclasses import dataclass

from flexq_bench.kernels.formats import FP16, NumberFormat


@dataclass(frozen=True, slots=True)
class LayerFormats:
    """Formats of a layer.

    weight: of the codes. activation: of the rounded X; None: not described by a single format, for
    example one scale for all tokens, or parts in formats that no kernel combines. rotated: torch
    rotates X before (see `rotation`), and kernels get the rotated X.
    """

    weight: NumberFormat
    activation: NumberFormat | None = FP16
    rotated: bool = False

    @property
    def name(self) -> str:
        """`int6/128 x int8/128`: weights and activations, with the clipped share of the range."""
        after = ", rotated" if self.rotated else ""
        if self.activation is None:
            return f"{self.weight.name} x other{after}"
        clip = "" if self.activation.clip == 1 else f" to {self.activation.clip:g}"
        return f"{self.weight.name} x {self.activation.name}{clip}{after}"
