"""Inputs of the sites of a block: their readers, their statistics, and scales folded into them."""

from __future__ import annotations

import logging
from typing import Any

import torch

from flexq_bench.schemes.calibration import BlockStream, Statistics
from flexq_bench.schemes.channels import SiteInput
from flexq_bench.schemes.model_map import LinearSite, linear_at, weight_of
from flexq_bench.schemes.scheme import QuantizationState
from flexq_bench.schemes.smoothing import fold, gather, spread

log = logging.getLogger(__name__)


def readers_of(state: QuantizationState, block: int, site_input: SiteInput) -> list[LinearSite]:
    """Return the sites of a block that read this input."""
    return [site for site in state.layout.of_block(block) if site.kind in site_input.kinds]


def observe_block(
    state: QuantizationState, block: int, statistics: Statistics, stream: BlockStream | None = None
) -> None:
    """Collect statistics of every site of the block, from `stream` or the quantized model's stream.

    Query, key and value have the same input, and so have gate and up: each input is processed once.
    An expert without tokens has statistics of zeros, and is rounded to nearest.
    """
    groups = [readers_of(state, block, site_input) for site_input in state.layout.inputs_of(block)]
    first = {readers[0].name for readers in groups}

    def observe(site: LinearSite, rows: torch.Tensor) -> None:
        if site.name in first:
            statistics(site, rows)

    (stream or state.inputs).observe(observe)
    for readers in groups:
        if readers[0].name not in statistics.count:
            log.warning("%s saw no token of the calibration text", readers[0].name)
            weight = weight_of(state.model, readers[0])
            statistics(readers[0], weight.new_zeros(1, readers[0].k))
    for readers in groups:
        for other in readers[1:]:
            for table in (
                statistics.absmax,
                statistics.abs_sum,
                statistics.square_sum,
                statistics.hessian,
                statistics.count,
            ):
                by_site: dict[str, Any] = table
                if readers[0].name in by_site:
                    by_site[other.name] = by_site[readers[0].name]


def largest_magnitudes(
    state: QuantizationState, block: int, site_input: SiteInput, statistics: Statistics
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return max|X| and max|W| over all readers, of each channel of the source [K]."""
    readers = readers_of(state, block, site_input)
    weights = torch.stack([weight_of(state.model, reader).abs().amax(dim=0) for reader in readers])
    return (
        gather(statistics.absmax[readers[0].name].float(), site_input),
        gather(weights.amax(dim=0).float(), site_input),
    )


def fold_scale(
    state: QuantizationState, block: int, site_input: SiteInput, scale: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Fold a scale of the source's channels into the block.

    Returns the new divisors of each reader's inputs, float64 [K], by the reader's name.
    """
    readers = readers_of(state, block, site_input)
    source = f"{state.layout.path}.{block}.{site_input.source}"
    fold(
        state.model.get_submodule(source),
        [linear_at(state.model, reader.name) for reader in readers],
        site_input,
        scale,
    )
    divisors = {reader.name: spread(scale, site_input).double() for reader in readers}
    state.folds.inputs.update(divisors)
    if site_input.through == "linear":
        state.folds.outputs[source] = scale.double()
    return divisors
