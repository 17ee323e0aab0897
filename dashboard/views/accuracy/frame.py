"""Scores of a model compared with those of the unquantized model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from flexq_bench.accuracy.results import (
    FULL_PRECISION,
    LAYER_ERROR,
    OF_TEXTS,
    PERPLEXITY,
    REFERENCE,
    MetricDifference,
    MetricResult,
    difference,
    is_perplexity,
)
from flexq_bench.db.queries import Score

Values = Mapping[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Compared:
    """A score and its difference to the score of the unquantized model.

    difference None: this is the score of the unquantized model, no such score is stored, or the two
    can't be paired. base: score of the unquantized model.
    """

    score: Score
    difference: MetricDifference | None
    base: Score | None = None


def newest(scores: Iterable[Score]) -> list[Score]:
    """Return the last score of each scheme, through, task, data and metric."""
    last = {(s.scheme, s.through, s.task, s.data_hash, s.metric): s for s in scores}
    return list(last.values())


def display_name(score: Score) -> str:
    """Return the name of a scheme in charts.

    It includes `through`, unless that is the reference.
    """
    return score.scheme if score.through == REFERENCE else f"{score.scheme} ({score.through})"


def needed_values(scores: Iterable[Score]) -> list[int]:
    """Return the ids of the scores whose values per item are compared."""
    return [score.id for score in scores if score.value is not None]


def bases_of(scores: Sequence[Score], among: Sequence[Score]) -> dict[int, Score]:
    """Return the FULL_PRECISION score of the same task, data and metric by score id.

    A base of the same run is preferred, because it was evaluated on as many items; else the last
    one is used. Scores without a base are left out.
    """
    own, last = {}, {}
    for score in among:
        if score.scheme == FULL_PRECISION:
            key = (score.task, score.data_hash, score.metric)
            own[score.run, *key] = last[key] = score
    bases = {}
    for score in scores:
        key = (score.task, score.data_hash, score.metric)
        base = own.get((score.run, *key)) or last.get(key)
        if base is not None and score.scheme != FULL_PRECISION:
            bases[score.id] = base
    return bases


def compared(scores: Sequence[Score], values: Values, bases: Mapping[int, Score]) -> list[Compared]:
    """Return each score with its difference to its base. bases: see bases_of."""
    rows = []
    for score in scores:
        base = bases.get(score.id)
        change = (
            None
            if base is None
            else difference(_metric_result(base, values), _metric_result(score, values))
        )
        rows.append(Compared(score, change, None if change is None else base))
    return rows


def difference_frame(rows: Sequence[Compared]) -> pd.DataFrame:
    """Return a row per comparable score: change, low, high in % (perplexity) or in points."""
    return pd.DataFrame(
        [
            {
                "scheme": display_name(row.score),
                "task": row.score.task,
                "metric": row.score.metric,
                "change": 100 * row.difference.interval.estimate,
                "low": 100 * row.difference.interval.low,
                "high": 100 * row.difference.interval.high,
                "clear": row.difference.clear,
                "value": row.score.value,
            }
            for row in rows
            if row.difference is not None
        ],
        columns=["scheme", "task", "metric", "change", "low", "high", "clear", "value"],
    )


def scheme_rows(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return one row per scheme and way through it, with a perplexity or task in each column.

    Other statistics of texts, such as divergences, are in table_rows. A task that was evaluated on
    several data has a column for each.
    """
    shown = [r for r in rows if r.score.metric == PERPLEXITY or r.score.metric not in OF_TEXTS]
    data: dict[str, set[str]] = {}
    for row in shown:
        data.setdefault(row.score.task, set()).add(row.score.data_hash)
    by_scheme: dict[tuple[str, str], dict[str, Any]] = {}
    for row in shown:
        score = row.score
        cells = by_scheme.setdefault(
            (score.scheme, score.through),
            {
                "scheme": score.scheme,
                "through": score.through if score.scheme != FULL_PRECISION else "",
                "why": "",
            },
        )
        name = f"{score.task} {score.metric}"
        if len(data[score.task]) > 1:
            name += f" ({score.data_hash[:8]})"
        cells[name] = score.value
        is_base = score.scheme == FULL_PRECISION
        cells[f"{name} against {FULL_PRECISION}"] = None if is_base else _change(row)
        if score.detail and score.detail not in cells["why"]:
            cells["why"] = "; ".join(filter(None, (cells["why"], score.detail)))
    # `why` is last, after the columns of tasks.
    return [cells | {"why": cells.pop("why") or None} for cells in by_scheme.values()]


def table_rows(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    return [
        {
            "scheme": row.score.scheme,
            "through": row.score.through if row.score.scheme != FULL_PRECISION else "",
            "checkpoint": (row.score.content_hash or "")[:12],
            "task": row.score.task,
            "metric": row.score.metric,
            "value": row.score.value,
            "± standard error": row.score.standard_error,
            f"{FULL_PRECISION} on the same items": None if row.base is None else row.base.value,
            f"against {FULL_PRECISION}": _change(row),
            "p": None if row.difference is None else row.difference.p_value,
            "items": row.score.n_items,
            "status": row.score.status,
            "why": row.score.detail,
            "GPU": row.score.gpu,
            "commit": row.score.commit[:10],
            "run": row.score.run[:8],
        }
        for row in rows
        if row.score.metric != LAYER_ERROR
    ]


def kind_frame(scores: Sequence[Score], values: Values) -> pd.DataFrame:
    """Return the relative squared output error by scheme and kind of layer.

    median, least, most: over the layers of the kind.
    """
    rows = []
    for score in scores:
        layers = score.parameters.get("layers", ())
        errors = values.get(score.id, ())
        if score.metric != LAYER_ERROR or len(layers) != len(errors):
            continue
        by_kind: dict[str, list[float]] = {}
        for layer, error in zip(layers, errors, strict=True):
            by_kind.setdefault(str(layer).rpartition(".")[2], []).append(error)
        rows += [
            {
                "scheme": display_name(score),
                "kind": kind,
                "median": float(np.median(errors)),
                "least": min(errors),
                "most": max(errors),
                "layers": len(errors),
            }
            for kind, errors in by_kind.items()
        ]
    return pd.DataFrame(rows, columns=["scheme", "kind", "median", "least", "most", "layers"])


def history_frame(
    scores: Sequence[Score], values: Values, names: Mapping[str, str]
) -> pd.DataFrame:
    """Return the change of perplexity against FULL_PRECISION at each commit, oldest first.

    names: sha -> release. Both scores are of the same commit.
    """
    parts = []
    for place, sha in enumerate(dict.fromkeys(s.commit for s in scores)):
        at_commit = [s for s in scores if s.commit == sha and s.metric == PERPLEXITY]
        last = newest(at_commit)
        frame = difference_frame(compared(last, values, bases_of(last, at_commit)))
        parts.append(frame.assign(place=place, commit=names.get(sha, sha[:10])))
    return pd.concat(parts, ignore_index=True) if parts else difference_frame([])


def _metric_result(score: Score, values: Values) -> MetricResult:
    return MetricResult(
        scheme=score.scheme,
        task=score.task,
        task_version=score.task_version,
        data_hash=score.data_hash,
        metric=score.metric,
        direction="lower" if score.direction == "lower" else "higher",
        value=score.value,
        standard_error=score.standard_error,
        n_items=score.n_items,
        values=values.get(score.id, ()),
        parameters=score.parameters,
        detail=score.detail,
    )


def _change(row: Compared) -> str:
    if row.difference is None:
        return ""
    unit = "%" if is_perplexity(row.score.metric) else "points"
    interval = row.difference.interval
    low, estimate, high = (
        f"{100 * value:+.2f}" for value in (interval.low, interval.estimate, interval.high)
    )
    text = f"{estimate} {unit} ({low} to {high})"
    return text if row.difference.clear else f"{text}, within noise"
