"""The number formats of a layer under a scheme, known before anything is calibrated."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.formats import FP16, NumberFormat


@dataclass(frozen=True, slots=True)
class LayerFormats:
    """weight: of the codes. activation: what X is rounded to; None: no one format says it.

    rotated: X is rotated before (see `rotation`), by torch: kernels take what comes of it.

    None stands for one scale of all tokens, and for parts in other formats than a kernel has.
    """

    weight: NumberFormat
    activation: NumberFormat | None = FP16
    rotated: bool = False

    @property
    def name(self) -> str:
        """`int6/128 x int8/128`: weights, activations, and to what share of their range."""
        after = ", rotated" if self.rotated else ""
        if self.activation is None:
            return f"{self.weight.name} x other{after}"
        clip = "" if self.activation.clip == 1 else f" to {self.activation.clip:g}"
        return f"{self.weight.name} x {self.activation.name}{clip}{after}"
