"""Schemes that learn scales and clipping block by block: OmniQuant, and the base of ABQ-LLM.

OmniQuant (Shao et al., arXiv 2308.13137): learnable weight clipping (section 3.2), learnable
equivalent transformation (section 3.3), mean squared error of each block's output (section 3.1), 20
epochs of AdamW over 128 segments of 2048 tokens, 0.005 and 0.01 as learning rates (section 4.1). By
default codes are signed, as kernels require, so a range has one bound instead of the paper's two;
with `symmetric=false` they have zero points and two bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flexq_bench.kernels.formats import FP16, Kind, NumberFormat, Operand, quantize
from flexq_bench.schemes.activations import dynamic
from flexq_bench.schemes.block_training import BlockTrainer, Learned, TrainingOptions
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.linear_layers import experts_in
from flexq_bench.schemes.model_map import LinearSite, weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import fold_scale, largest_magnitudes, observe_block
from flexq_bench.schemes.smoothing import check_share, smoothquant_scale, unrounded
from flexq_bench.schemes.uniform import FULL_BITS


@dataclass(frozen=True, slots=True)
class LearnedOptions(SchemeOptions):
    """Bits, and the papers' training: 20 epochs over the calibration segments, block by block.

    w_bits, a_bits: a_bits of 16: weight-only, without scales (arXiv 2308.13137, section 4).
    group:          values of k that share a scale of the weights and of the activations; None: one
                    scale per output channel and per token, as in both papers.
    balanced:       ABQ-LLM's bit balance, one more code than 2^w_bits (`w2*`).
    symmetric:      signed weights, as most kernels require; false: with zero points, and a learned
                    share of each end of the range, as in both papers.
    """

    w_bits: int
    a_bits: int
    group: int | None = None
    balanced: bool = False
    symmetric: bool = True
    epochs: int = 20
    scale_rate: float = 5e-3
    clip_rate: float = 1e-2
    alpha: float = 0.5

    def __post_init__(self) -> None:
        rates = (self.scale_rate, self.clip_rate)
        if self.epochs < 0 or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(
                "training takes 0 epochs or more and rates above 0, got "
                f"{self.epochs}, {self.scale_rate} and {self.clip_rate}"
            )
        check_share("alpha", self.alpha)
        if self.balanced and not self.symmetric:
            raise ValueError("balanced codes have no zero points: do not set symmetric")

    @property
    def weight(self) -> NumberFormat:
        if self.balanced:  # one code more than w_bits have, so that a code takes a bit more
            return NumberFormat(self.w_bits + 1, self.group, "balanced")
        kind: Kind = "symmetric" if self.symmetric else "asymmetric"
        return NumberFormat(self.w_bits, self.group, kind)

    @property
    def activation(self) -> NumberFormat | None:
        return NumberFormat(self.a_bits, self.group) if self.a_bits < FULL_BITS else None


class LearnedScheme(Scheme):
    """Scales and clipping learned block by block; subclasses define the loss."""

    version = 2  # 2: TF32 on a GPU; an input with several readers is rounded once
    options: LearnedOptions
    needs_calibration = True
    needs_original = True

    def training(self) -> TrainingOptions:
        """Options of this scheme's training."""
        options = self.options
        return TrainingOptions(
            epochs=options.epochs,
            scale_rate=options.scale_rate,
            clip_rate=options.clip_rate,
        )

    def compensated(self, state: QuantizationState, block: int) -> tuple[str, ...]:
        """Return the kinds of this block's sites with a rank-one compensation."""
        return ()

    def adapted(self, model: nn.Module) -> AbstractContextManager[None]:
        return _eager_attention(model)

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        return LayerFormats(self.options.weight, self.options.activation or FP16)

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        if state.original is None:
            raise QuantizeError(f"{self.name} needs calibration data: give --calibration FILE")
        module = state.layout.block_module(state.model, block)
        if experts_in(module) and state.inputs.inputs[0].device.type == "cuda":
            raise QuantizeError(
                f"{self.name} trains in CUDA graphs, which can't hold a mixture of experts: "
                "quantize with --device cpu, or take another scheme"
            )
        with unrounded(module):
            learned = self.train_block(state, block, module)
        state.original.advance()
        with unrounded(module):
            self._apply_learned(state, block, learned)

    def train_block(self, state: QuantizationState, block: int, module: nn.Module) -> Learned:
        """Train a block before it is rounded; returns the learned scales and clipping."""
        assert state.original is not None
        options = self.options
        prefix = f"{state.layout.path}.{block}."
        sites = state.layout.of_block(block)
        kinds = self.compensated(state, block)
        trainer = BlockTrainer(
            module,
            {site.name.removeprefix(prefix): site.kind for site in sites},
            state.layout.scalable_inputs(block),
            options.weight,
            options.activation,
            {} if options.activation is None else self._starting_scales(state, block),
            [site.name.removeprefix(prefix) for site in sites if site.kind in kinds],
            self.training(),
            attention=_attention_of(module),
        )
        return trainer.train(state.original, state.inputs)

    def _starting_scales(self, state: QuantizationState, block: int) -> dict[str, torch.Tensor]:
        """SmoothQuant's scale of each site's input, from the original model's activations."""
        assert state.original is not None
        statistics = Statistics()
        observe_block(state, block, statistics, state.original)
        start = {}
        for site_input in state.layout.scalable_inputs(block):
            largest = largest_magnitudes(state, block, site_input, statistics)
            start[site_input.source] = smoothquant_scale(*largest, self.options.alpha)
        return start

    def _apply_learned(self, state: QuantizationState, block: int, learned: Learned) -> None:
        prefix = f"{state.layout.path}.{block}."
        activation = dynamic(self.options.activation)
        for site_input in state.layout.scalable_inputs(block):
            if site_input.source in learned.scales:
                fold_scale(state, block, site_input, learned.scales[site_input.source])
        for site in state.layout.of_block(block):
            quantize_site(
                state.model,
                site,
                self._rounded(state, site, site.name.removeprefix(prefix), learned),
                activation,
            )

    def _rounded(
        self, state: QuantizationState, site: LinearSite, name: str, learned: Learned
    ) -> Operand:
        weight = weight_of(state.model, site).double()
        if name in learned.compensation:
            left, right = learned.compensation[name]
            weight = weight + (left @ right).double()
        return quantize(weight, self.options.weight, shares=learned.clips[name].double())


class OmniQuant(LearnedScheme):
    """Learned scales and clipping under the mean squared error."""

    source = "OmniQuant, arXiv:2308.13137, section 3"


def _attention_of(block: nn.Module) -> str | None:
    """The name of a block's attention; None: it has none."""
    parts = ((name, part) for name, part in block.named_children() if "att" in name)
    return next((name for name, part in parts if any(part.children())), None)


@contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    """Use eager attention, which returns its map, during training."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
