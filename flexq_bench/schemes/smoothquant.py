"""SmoothQuant: the difficulty of activations moved to the weights by a fixed formula.

Xiao et al., arXiv 2211.10438: s = max|X|^alpha / max|W|^(1 - alpha) (equation 4), alpha 0.5 by
default and otherwise from a grid (section 4); weights and activations then rounded to nearest.
Every feed is smoothed, also those of o_proj and down_proj, which the paper leaves out: on GLU
models down_proj's input is the one that hurts (arXiv 2508.04405, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.model_map import Feed, LinearSite, weight_of
from flexq_bench.schemes.samples import InputSamples
from flexq_bench.schemes.scheme import Job, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import fold_feed, head_size, observe_block, readers_of
from flexq_bench.schemes.smoothing import (
    check_share,
    gather,
    smoothquant_scale,
    spread,
    unrounded,
)
from flexq_bench.schemes.uniform import round_site
from kernels.formats import NumberFormat

ALPHAS = tuple(i / 20 for i in range(6, 19))  # 0.3 … 0.9


@dataclass(frozen=True, slots=True)
class SmoothQuantOptions(SchemeOptions):
    """alpha: of all feeds, or None: of each feed the one of ALPHAS with the least output error.

    group:   values of k that share a scale; None, as the papers tabulate it: an output channel and
             a token.
    samples: tokens that alphas are compared on.
    """

    w_bits: int
    a_bits: int
    alpha: float | None = 0.5
    group: int | None = None
    samples: int = 512

    def __post_init__(self) -> None:
        if self.alpha is not None:
            check_share("alpha", self.alpha)
        if self.samples < 1:
            raise ValueError(f"alphas are compared on at least 1 token, got {self.samples}")


class SmoothQuant(Scheme):
    """Smoothed, then symmetric integers rounded to nearest."""

    source = "SmoothQuant, arXiv:2211.10438, section 4"
    options: SmoothQuantOptions

    @property
    def needs_calibration(self) -> bool:
        return True

    def quantize_block(self, job: Job, block: int) -> None:
        options = self.options
        statistics, samples = Statistics(), InputSamples(options.samples)
        observe_block(job, block, statistics)
        if options.alpha is None:
            job.inputs.observe(samples)
        with unrounded(job.layout.block_module(job.model, block)):
            for feed in job.layout.scaled_feeds:
                self._smooth(job, block, feed, statistics, samples)
            for site in job.layout.of_block(block):
                round_site(job.model, site, options.w_bits, options.a_bits, options.group)

    def _smooth(
        self, job: Job, block: int, feed: Feed, statistics: Statistics, samples: InputSamples
    ) -> None:
        head, readers = head_size(job), readers_of(job, block, feed)
        inputs = gather(statistics.absmax[readers[0].name].float(), feed, head)
        weights = _largest_weights(job, readers)
        alpha = self.options.alpha
        if alpha is None:
            alpha = self._best_alpha(job, feed, readers, inputs, weights, samples)
        scale = smoothquant_scale(inputs, gather(weights, feed, head), alpha)
        fold_feed(job, block, feed, scale)

    def _best_alpha(
        self,
        job: Job,
        feed: Feed,
        readers: list[LinearSite],
        inputs: torch.Tensor,
        weights: torch.Tensor,
        samples: InputSamples,
    ) -> float:
        options, head = self.options, head_size(job)
        weight_format = NumberFormat(options.w_bits, options.group)
        input_format = NumberFormat(options.a_bits, options.group)
        x = samples.of(readers[0]).float()
        errors = []
        for alpha in ALPHAS:
            scale = smoothquant_scale(inputs, gather(weights, feed, head), alpha)
            seen = spread(scale, feed, head)
            rounded_inputs = input_format.round(x / seen)
            error = 0.0
            for reader in readers:
                weight = weight_of(job.model, reader).float()
                rounded = weight_format.round(weight * seen)
                error += float((rounded_inputs @ rounded.T - x @ weight.T).square().sum())
            errors.append(error)
        return ALPHAS[errors.index(min(errors))]


def _largest_weights(job: Job, readers: list[LinearSite]) -> torch.Tensor:
    """max|W| of each input channel over all readers [K]."""
    largest = [weight_of(job.model, reader).abs().amax(dim=0) for reader in readers]
    return torch.stack(largest).amax(dim=0).float()
