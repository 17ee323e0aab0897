"""Statistics of a block's inputs where several layers read the same values: gathered once."""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.quantize.calibration import BlockStream, Statistics
from flexq_bench.quantize.model_map import Feed, LinearSite
from flexq_bench.quantize.scheme import Job


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
