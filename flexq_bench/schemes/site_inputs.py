"""A block's feeds in a model at hand: their readers, what passes there, scales folded into them."""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.schemes.calibration import BlockStream, Statistics
from flexq_bench.schemes.model_map import Feed, LinearSite, linear_at
from flexq_bench.schemes.scheme import Job
from flexq_bench.schemes.smoothing import fold, spread


def readers_of(job: Job, block: int, feed: Feed) -> list[LinearSite]:
    """The sites of a block that read a feed."""
    return [site for site in job.layout.of_block(block) if site.kind in feed.kinds]


def head_size(job: Job) -> int:
    """Channels of one attention head."""
    config: Any = job.model.config
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def observe_block(
    job: Job, block: int, statistics: Statistics, stream: BlockStream | None = None
) -> None:
    """Gather statistics of every site of the block, from `stream` or else the quantized model's.

    Query, key and value read the same rows; so do gate and up: each set is looked at once.
    """
    groups = [readers_of(job, block, feed) for feed in job.layout.feeds]
    first = {readers[0].name for readers in groups}

    def observe(site: LinearSite, rows: torch.Tensor) -> None:
        if site.name in first:
            statistics(site, rows)

    (stream or job.inputs).observe(observe)
    for readers in groups:
        for other in readers[1:]:
            for table in (
                statistics.absmax,
                statistics.abs_sum,
                statistics.square_sum,
                statistics.hessian,
                statistics.count,
            ):
                found: dict[str, Any] = table
                if readers[0].name in found:
                    found[other.name] = found[readers[0].name]


def fold_feed(job: Job, block: int, feed: Feed, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fold a scale of the source's channels into the block.

    By each reader's name what its inputs are divided by from now on, float64 [K].
    """
    head, readers = head_size(job), readers_of(job, block, feed)
    source = f"{job.layout.names.blocks}.{block}.{feed.source}"
    fold(
        job.model.get_submodule(source),
        [linear_at(job.model, reader.name) for reader in readers],
        feed,
        scale,
        norm_offset=job.layout.names.norm_offset,
        head_dim=head,
    )
    seen = {reader.name: spread(scale, feed, head).double() for reader in readers}
    job.folds.inputs.update(seen)
    if feed.through == "linear":
        job.folds.outputs[source] = scale.double()
    return seen
