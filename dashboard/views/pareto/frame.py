"""Checkpoints of a model with what they lose, how fast they decode and what memory that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dashboard.views.accuracy.frame import Compared
from db.queries import SYNTHETIC, DecodeRow
from flexq_bench.accuracy.results import KERNELS

RANDOM_WEIGHTS = "random weights"
OWN_WEIGHTS = "the checkpoint"
_GIB = 2**30
_COLUMNS = (
    *("scheme", "checkpoint", "through", "increase", "low", "high"),
    *("token_ms", "token_low", "token_high", "memory_gib", "memory_is", "speed_of", "missing"),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Conditions that all decodes of one chart have in common."""

    gpu: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def of(cls, row: DecodeRow) -> Setting:
        return cls(row.gpu, row.batch, row.prompt_tokens, row.new_tokens)


def judged(rows: Sequence[Compared]) -> dict[str, Compared]:
    """By content hash the perplexity of a checkpoint; through kernels where it is known so."""
    of_checkpoints = [row for row in rows if row.score.content_hash is not None]
    kernels_last = sorted(of_checkpoints, key=lambda row: row.score.through == KERNELS)
    return {str(row.score.content_hash): row for row in kernels_last}


def pareto_frame(
    checkpoints: Mapping[str, Compared], decodes: Sequence[DecodeRow], setting: Setting | None
) -> pd.DataFrame:
    """A row a checkpoint, and a row a scheme whose random weights were decoded and nothing else.

    increase, low, high: of the perplexity over that of the model as it is, percent. token_ms with
    its interval; memory_gib: the peak while decoding, of a CPU the packed weights: memory_is.
    speed_of: whose weights were decoded. missing: what is not stored.
    """
    here = [row for row in decodes if setting is not None and Setting.of(row) == setting]
    own = {row.content_hash: row for row in here if row.content_hash is not None}
    random = {row.scheme: row for row in here if row.weights == SYNTHETIC}
    rows = []
    for content_hash, compared in checkpoints.items():
        scheme = compared.score.scheme
        decode = own.get(content_hash) or random.get(scheme)
        rows.append(_row(scheme, content_hash, compared, decode))
    judged_schemes = {compared.score.scheme for compared in checkpoints.values()}
    rows += [
        _row(scheme, "", None, decode)
        for scheme, decode in random.items()
        if scheme not in judged_schemes
    ]
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def front(frame: pd.DataFrame, across: str) -> pd.DataFrame:
    """The rows that no other one beats in both `across` and increase, by `across`."""
    whole = frame.dropna(subset=[across, "increase"]).sort_values([across, "increase"])
    return whole[whole["increase"] < whole["increase"].cummin().shift(fill_value=float("inf"))]


def _row(
    scheme: str, content_hash: str, compared: Compared | None, decode: DecodeRow | None
) -> dict[str, Any]:
    change = None if compared is None else compared.difference
    missing = []
    if compared is None:
        missing.append("no perplexity of a checkpoint")
    elif change is None:
        missing.append("no perplexity of fp16 on the same segments")
    if decode is None:
        missing.append("not decoded")
    synthetic = decode is not None and decode.weights == SYNTHETIC
    memory = None if decode is None else decode.peak_memory_bytes
    kept = None if decode is None else memory or decode.weights_bytes
    return {
        "scheme": scheme,
        "checkpoint": content_hash[:12],
        "through": "" if compared is None else compared.score.through,
        "increase": None if change is None else 100 * change.interval.estimate,
        "low": None if change is None else 100 * change.interval.low,
        "high": None if change is None else 100 * change.interval.high,
        "token_ms": None if decode is None else decode.token_ms,
        "token_low": None if decode is None else decode.token_ci_low_ms,
        "token_high": None if decode is None else decode.token_ci_high_ms,
        "memory_gib": None if kept is None else kept / _GIB,
        "memory_is": "" if kept is None else "peak" if memory else "weights",
        "speed_of": "" if decode is None else RANDOM_WEIGHTS if synthetic else OWN_WEIGHTS,
        "missing": ", ".join(missing),
    }
