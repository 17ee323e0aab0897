"""Published and measured numbers as one DataFrame, in separate columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from flexq_bench.dashboard.shared.results_frame import interval_cells
from flexq_bench.dashboard.views.paper.measured import MeasuredValue
from flexq_bench.db.reference_store import ReferenceInfo

# published: of the paper. ours, ours_low, ours_high: measured here, with the 95 % interval.
COLUMNS = {
    "metric": "str",
    "kernel": "str",
    "baseline": "str",
    "model": "str",
    "m": "str",
    "bound": "str",
    "published": "float64",
    "unit": "str",
    "ours": "float64",
    "ours_low": "float64",
    "ours_high": "float64",
    "our_kernel": "str",
    "cases": "int64",
    "of": "int64",
    "caveats": "str",
    "gpu": "str",
    "hardware": "str",
    "source": "str",
    "table": "str",
    "apart": "int64",
    "differences": "str",
}


def paper_frame(rows: Sequence[tuple[ReferenceInfo, Sequence[MeasuredValue]]]) -> pd.DataFrame:
    """Return one row per published number and measured GPU; one row if nothing was measured."""
    cells = [
        _cells(published, ours) for published, measured in rows for ours in (measured or (None,))
    ]
    return pd.DataFrame(cells, columns=list(COLUMNS)).astype(COLUMNS)


def _cells(published: ReferenceInfo, ours: MeasuredValue | None) -> dict[str, Any]:
    return {
        "source": published.source,
        "table": published.source_table,
        "metric": published.metric,
        "kernel": published.kernel,
        "baseline": published.baseline,
        "model": " ".join(part for part in (published.model, published.task) if part),
        "m": "" if published.m is None else str(published.m),
        "bound": published.bound,
        "published": published.value,
        "unit": published.unit,
        "hardware": published.hardware or "not stated",
        **interval_cells("ours", None if ours is None else ours.value),
        "our_kernel": "" if ours is None else ours.kernel or published.kernel,
        "of": 0 if ours is None else ours.of,
        "caveats": "not measured here" if ours is None else "; ".join(ours.caveats),
        "gpu": "" if ours is None else ours.gpu,
        "cases": 0 if ours is None else ours.cases,
        "apart": 0 if ours is None else ours.apart,
        "differences": published.note,
    }
