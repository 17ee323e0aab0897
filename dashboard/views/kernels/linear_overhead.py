"""Stage `linear` relative to stage `gemm`: the cost of quantizing activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import rule
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.dashboard.shared.layer_chart import by_layer
from flexq_bench.db.queries import ResultRow
from flexq_bench.stats import ratio_interval
from flexq_bench.stats.baseline import time_of
from flexq_bench.workloads.probes import is_probe

_GEMM, _LINEAR = "gemm", "linear"


def runs_of_linear(results: Sequence[ResultRow]) -> tuple[str, ...]:
    """Return the runs of the results of stage linear, sorted."""
    return tuple(sorted({r.run for r in results if r.stage == _LINEAR}))


def stages_frame(
    frame: pd.DataFrame, results: Sequence[ResultRow], same_runs: Sequence[ResultRow]
) -> pd.DataFrame:
    """Return the rows of stage linear that have a result of stage gemm, with their ratio.

    frame: rows of these results, see results_frame.COLUMNS. same_runs: results of the runs that
    measured stage linear; a gemm result of the same run is preferred to a newer one. Added columns:
    `overhead`, linear / gemm, with `overhead_low` and `overhead_high`; `one_run`, True if both are
    of one run; `one_config`, True if both have the same configuration.
    """
    by_case: dict[tuple[Any, ...], ResultRow] = {
        (*_case(result), result.stage): result for result in results if not is_probe(result.kernel)
    }
    in_run = {
        (*_case(r), r.run): r for r in same_runs if r.stage == _GEMM and time_of(r) is not None
    }
    rows = []
    for row in frame[frame["is_timed"] & (frame["stage"] == _LINEAR)].to_dict("records"):
        case = tuple(row[name] for name in _CASE)
        linear = by_case.get((*case, _LINEAR))
        gemm = in_run.get((*case, row["run"])) or by_case.get((*case, _GEMM))
        if linear is None or gemm is None:
            continue
        linear_us, gemm_us = time_of(linear), time_of(gemm)
        if linear_us is None or gemm_us is None:
            continue
        ratio = ratio_interval(linear_us, gemm_us)
        rows.append(
            row
            | {
                "overhead": ratio.estimate,
                "overhead_low": ratio.low,
                "overhead_high": ratio.high,
                "gemm_us": gemm_us.estimate,
                "one_run": linear.run == gemm.run,
                "one_config": linear.config == gemm.config,
            }
        )
    added = ("overhead", "overhead_low", "overhead_high", "gemm_us", "one_run", "one_config")
    return pd.DataFrame(rows, columns=list(dict.fromkeys((*frame.columns, *added))))


def overhead_by_layer(points: pd.DataFrame, styles: Mapping[str, Style]) -> go.Figure:
    """Plot linear / gemm with its interval, a point per kernel and layer.

    points: of `stages_frame`, with one GPU, cache mode and M.
    """
    figure = by_layer(points, "overhead", "×", styles)
    figure.update_yaxes(title="including activation quantization / GEMM only (×)")
    rule(figure, 1.0, "GEMM only = 1")
    return figure


_CASE = ("kernel", "variant", "gpu", "cache", "m", "n", "k")


def _case(result: ResultRow) -> tuple[Any, ...]:
    return tuple(getattr(result, name) for name in _CASE)
