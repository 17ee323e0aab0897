"""Checkpoints of a model with what they lose, how fast they decode and what memory that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dashboard.views.accuracy.frame import (
    Compared,
    bases_of,
    compared,
    needed_values,
    newest,
)
from db import queries
from db.engine import Database
from db.queries import SYNTHETIC, DecodeRow, Score
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


def stored_checkpoints(
    database: Database, model: str, scores: Sequence[Score]
) -> tuple[dict[str, Compared], list[DecodeRow]]:
    """Stored results of a model's checkpoints: by content hash the perplexity, and the decodes.

    scores: the model's perplexities on one text. That through kernels is taken where it is known.
    """
    of_checkpoints = _newest_of_each(scores)
    bases = bases_of(of_checkpoints, scores)
    wanted = {id for of in (of_checkpoints, bases.values()) for id in needed_values(of)}
    with database.session() as session:
        values = queries.score_values(session, sorted(wanted))
        hashes = [score.content_hash for score in of_checkpoints if score.content_hash]
        decodes = queries.checkpoint_decodes(session, model, hashes)
    rows = compared(of_checkpoints, values, bases)
    kernels_last = sorted(rows, key=lambda row: row.score.through == KERNELS)
    return {str(row.score.content_hash): row for row in kernels_last}, decodes


def _newest_of_each(scores: Sequence[Score]) -> list[Score]:
    """The last score of each checkpoint, through kernels and through the reference."""
    by_checkpoint: dict[str, list[Score]] = {}
    for score in scores:
        if score.content_hash is not None and score.value is not None:
            by_checkpoint.setdefault(score.content_hash, []).append(score)
    return [last for of_one in by_checkpoint.values() for last in newest(of_one)]


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
