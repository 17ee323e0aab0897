"""Restore a model's dense layers after an evaluation that quantized them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from flexq_bench.schemes.model_map import LinearSite, linear_at, replace_module


@contextmanager
def restoring(model: nn.Module, sites: Sequence[LinearSite]) -> Iterator[None]:
    """Restore the dense layers of these sites at the end of the block.

    For schemes that only replace layers.
    """
    dense = {site.name: linear_at(model, site.name) for site in sites}
    try:
        yield
    finally:
        for name, layer in dense.items():
            replace_module(model, name, layer)
