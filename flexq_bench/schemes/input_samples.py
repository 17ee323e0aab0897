"""Samples of each layer's input rows, for schemes that compare output errors by trial."""

from __future__ import annotations

import torch

from flexq_bench.schemes.model_map import LinearSite


class InputSamples:
    """Observer that stores the same number of rows of every segment, `rows` in total at most.

    Rows are spread evenly over a segment and include its first token, which has the largest values.
    """

    def __init__(self, rows: int, per_segment: int = 64) -> None:
        self._rows, self._per_segment = rows, per_segment
        self._kept: dict[str, list[torch.Tensor]] = {}

    def __call__(self, site: LinearSite, rows: torch.Tensor) -> None:
        """Store some of the input rows [tokens, K] of a site."""
        kept = self._kept.setdefault(site.name, [])
        room = self._rows - sum(part.shape[0] for part in kept)
        step = max(1, -(-rows.shape[0] // self._per_segment))
        if room > 0:
            kept.append(rows[::step][:room].clone())

    def of(self, site: LinearSite) -> torch.Tensor:
        """Return rows [<= rows, K] of a site's input; no rows for an expert without tokens."""
        kept = self._kept.get(site.name)
        return torch.empty(0, site.k) if kept is None else torch.cat(kept)
