"""DuQuant: smoothed, rotated to spread the outliers of sampled inputs, then rounded to nearest.

Lin et al., arXiv 2406.01721, section 3: SmoothQuant's scales are folded into the model. At run time
each input is rotated in blocks of channels, permuted in zigzag order, and rotated in blocks again;
the weights contain the inverse. `rotation.outlier_rotation` constructs the blocks.

Differences: one random orthogonal matrix serves all steps and layers, and steps differ in the
channel that is swapped; magnitudes are those of a sample of tokens; integers are symmetric and use
the whole range of a row; alpha is SmoothQuant's. No kernel supports the option of clipped
activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.formats import quantize
from flexq_bench.schemes.activations import dynamic
from flexq_bench.schemes.calibration import InputSamples, Statistics
from flexq_bench.schemes.channels import SiteInput
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import weight_of
from flexq_bench.schemes.quarot import QuaRotOptions
from flexq_bench.schemes.rotation import outlier_rotation
from flexq_bench.schemes.scheme import QuantizationState, Scheme
from flexq_bench.schemes.site_inputs import observe_block, readers_of
from flexq_bench.schemes.smoothing import check_share, unrounded
from flexq_bench.schemes.smoothquant import smooth_input


@dataclass(frozen=True, slots=True)
class DuQuantOptions(QuaRotOptions):
    """Options of QuaRot, and of the construction of the rotations.

    alpha: of SmoothQuant. block: maximum number of channels of a block. steps: of the greedy
    search. samples: number of tokens in which outliers are searched.
    """

    alpha: float = 0.5
    block: int = 128
    steps: int = 64
    samples: int = 256

    def __post_init__(self) -> None:
        QuaRotOptions.__post_init__(self)
        check_share("alpha", self.alpha)
        for name in ("block", "steps", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")


class DuQuant(Scheme):
    """Smoothed and rotated to spread outliers, then symmetric integers rounded to nearest."""

    source = "DuQuant, arXiv:2406.01721, section 3"
    options: DuQuantOptions
    needs_calibration = True

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        return LayerFormats(self.options.weight, self.options.activation, rotated=True)

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        statistics, samples = Statistics(), InputSamples(self.options.samples)
        observe_block(state, block, statistics)
        state.inputs.observe(samples)
        with unrounded(state.layout.block_module(state.model, block)):
            divisors: dict[str, torch.Tensor] = {}
            for site_input in state.layout.scalable_inputs(block):
                alpha = self.options.alpha
                divisors |= smooth_input(state, block, site_input, statistics, alpha)
            for site_input in state.layout.inputs_of(block):
                self._rotate(state, block, site_input, samples, divisors)

    def _rotate(
        self,
        state: QuantizationState,
        block: int,
        site_input: SiteInput,
        samples: InputSamples,
        divisors: dict[str, torch.Tensor],
    ) -> None:
        """Fold the rotation of an input into its readers. divisors: of inputs, by reader."""
        options, readers = self.options, readers_of(state, block, site_input)
        first = readers[0]
        device = weight_of(state.model, first).device
        x = samples.of(first).to(device).double()
        if not len(x):  # an expert without tokens
            x = torch.zeros(1, first.k, dtype=torch.float64, device=device)
        if first.name in divisors:
            x = x / divisors[first.name].to(device)
        rotation = outlier_rotation(x, options.block, options.steps, state.seed)
        activation = dynamic(options.activation)
        for site in readers:
            rotated = rotation.apply(weight_of(state.model, site).double())
            rounded = quantize(rotated, options.weight)
            quantize_site(state.model, site, rounded, activation, rotation=rotation)
