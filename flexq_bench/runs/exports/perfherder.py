"""Perfherder's performance artifact: suites with subtests.

The form is https://treeherder.mozilla.org/schemas/v1/performance-artifact.json (in the repository
mozilla/treeherder: schemas/performance-artifact.json). A kernel on a GPU is a suite, a case of it
a subtest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from db.records import Record
from flexq_bench.runs.exports.selection import label_of, newest_of_each_series, place_of, shortened

FRAMEWORK = "flexq-bench"
_LONGEST_NAME = 80  # of a subtest, in the schema that Firefox has of it
_LONGEST_UNIT = 20
_LONGEST_OPTION = 100
_LARGEST = 1e12


def write(records: Iterable[Record]) -> tuple[str, int]:
    """The text and how many subtests it has: the newest comparable result of each series."""
    suites: dict[tuple[str, str], dict[str, Any]] = {}
    count = 0
    for record in newest_of_each_series(records):
        value = record.median_us
        if value is None or abs(value) > _LARGEST:
            continue
        label = label_of(record)
        suite = suites.setdefault(
            (label, record.gpu),
            {
                "name": label,
                "extraOptions": [shortened(record.gpu, _LONGEST_OPTION)],
                "subtests": [],
            },
        )
        version = f" v{record.kernel_version}" if record.kernel_version != 1 else ""
        name = f"{record.metric} {place_of(record)}{version} p{record.protocol_version}"
        suite["subtests"].append(
            {
                "name": shortened(name, _LONGEST_NAME),
                "value": value,
                "unit": shortened(record.unit or "1", _LONGEST_UNIT),
                "lowerIsBetter": record.direction == "lower",
            }
        )
        count += 1
    artifact = {"framework": {"name": FRAMEWORK}, "suites": list(suites.values())}
    return json.dumps(artifact, indent=1, ensure_ascii=False) + "\n", count
