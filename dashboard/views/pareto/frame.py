"""Checkpoints of a model with their perplexity increase, decode time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flexq_bench.accuracy.results import KERNELS
from flexq_bench.dashboard.shared.formatting import in_gib
from flexq_bench.dashboard.views.accuracy.frame import (
    Compared,
    bases_of,
    compared,
    needed_values,
    newest,
)
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import SYNTHETIC, DecodeRow, Score

RANDOM_WEIGHTS = "random weights"
OWN_WEIGHTS = "the checkpoint"
_COLUMNS = (
    *("scheme", "checkpoint", "through", "increase", "low", "high"),
    *("token_ms", "token_low", "token_high", "memory_gib", "memory_is", "speed_of", "missing"),
)


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Conditions that all decodes of one chart have in common."""

    gpu: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def of(cls, row: DecodeRow) -> Setting:
        return cls(row.gpu, row.batch, row.prompt_tokens, row.new_tokens)


def stored_checkpoints(
    database: Database, model: str, scores: Sequence[Score]
) -> tuple[dict[str, Compared], list[DecodeRow]]:
    """Return the perplexities of a model's checkpoints by content hash, and their decodes.

    scores: the model's perplexities on one text; through kernels is preferred to the reference.
    """
    newest_scores = _newest_by_checkpoint(scores)
    bases = bases_of(newest_scores, scores)
    groups = (newest_scores, bases.values())
    score_ids = {score_id for group in groups for score_id in needed_values(group)}
    with database.session() as session:
        values = queries.score_values(session, sorted(score_ids))
        hashes = [score.content_hash for score in newest_scores if score.content_hash]
        decodes = queries.checkpoint_decodes(session, model, hashes)
    rows = compared(newest_scores, values, bases)
    kernels_last = sorted(rows, key=lambda row: row.score.through == KERNELS)
    return {str(row.score.content_hash): row for row in kernels_last}, decodes


def _newest_by_checkpoint(scores: Sequence[Score]) -> list[Score]:
    """Return the last score of each checkpoint, through kernels and through the reference."""
    by_checkpoint: dict[str, list[Score]] = {}
    for score in scores:
        if score.content_hash is not None and score.value is not None:
            by_checkpoint.setdefault(score.content_hash, []).append(score)
    return [last for group in by_checkpoint.values() for last in newest(group)]


def pareto_frame(
    checkpoints: Mapping[str, Compared], decodes: Sequence[DecodeRow], setting: Setting | None
) -> pd.DataFrame:
    """Return one row per checkpoint, and per scheme of which only random weights were decoded.

    increase, low, high: perplexity increase over the unquantized model, percent. token_ms: with its
    interval. memory_gib: peak while decoding, or on a CPU the packed weights; memory_is: which of
    them. speed_of: decoded weights. missing: data that is not stored.
    """
    here = [row for row in decodes if setting is not None and Setting.of(row) == setting]
    own = {row.content_hash: row for row in here if row.content_hash is not None}
    random = {row.scheme: row for row in here if row.weights == SYNTHETIC}
    rows = []
    for content_hash, row in checkpoints.items():
        scheme = row.score.scheme
        decode = own.get(content_hash) or random.get(scheme)
        rows.append(_row(scheme, content_hash, row, decode))
    judged_schemes = {row.score.scheme for row in checkpoints.values()}
    rows += [
        _row(scheme, "", None, decode)
        for scheme, decode in random.items()
        if scheme not in judged_schemes
    ]
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def front(frame: pd.DataFrame, across: str) -> pd.DataFrame:
    """Return the Pareto front of `across` and increase (both minimized), sorted by `across`."""
    complete = frame.dropna(subset=[across, "increase"]).sort_values([across, "increase"])
    lowest_before = complete["increase"].cummin().shift(fill_value=float("inf"))
    return complete[complete["increase"] < lowest_before]


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
    memory_or_weights = None if decode is None else memory or decode.weights_bytes
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
        "memory_gib": in_gib(memory_or_weights),
        "memory_is": "" if memory_or_weights is None else "peak" if memory else "weights",
        "speed_of": "" if decode is None else RANDOM_WEIGHTS if synthetic else OWN_WEIGHTS,
        "missing": ", ".join(missing),
    }
