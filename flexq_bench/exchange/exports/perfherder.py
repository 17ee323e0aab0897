"""Perfherder's performance artifact: suites with subtests.

Schema: https://treeherder.mozilla.org/schemas/v1/performance-artifact.json (in the repository
mozilla/treeherder: schemas/performance-artifact.json). A suite is a kernel on a GPU, a subtest is
one of its cases.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from flexq_bench.db.records import Record
from flexq_bench.exchange.exports.selection import (
    bits_of,
    label_of,
    newest_of_each_series,
    place_of,
    shortened,
)

FRAMEWORK = "flexq-bench"
_MAX_NAME_LENGTH = 80  # of a subtest, in Firefox' version of the schema
_MAX_UNIT_LENGTH = 20
_MAX_OPTION_LENGTH = 100
_MAX_VALUE = 1e12


def write(records: Iterable[Record]) -> tuple[str, int]:
    """Format the newest comparable result of each series; returns the text and subtest count."""
    suites: dict[tuple[str, str], dict[str, Any]] = {}
    known: set[tuple[str, str, str]] = set()
    count = 0
    for record in newest_of_each_series(records):
        value = record.median_us
        if value is None or abs(value) > _MAX_VALUE:
            continue
        label = label_of(record)
        suite = suites.setdefault(
            (label, record.gpu),
            {
                "name": label,
                "extraOptions": [shortened(record.gpu, _MAX_OPTION_LENGTH)],
                "subtests": [],
            },
        )
        version = f" v{record.kernel_version}" if record.kernel_version != 1 else ""
        name = f"{record.metric} {place_of(record)}{version} p{record.protocol_version}"
        if (label, record.gpu, name) in known:  # another series with the same name
            name = f"{name} {record.input_distribution} {bits_of(record)}".rstrip()
        known.add((label, record.gpu, name))
        suite["subtests"].append(
            {
                "name": shortened(name, _MAX_NAME_LENGTH),
                "value": value,
                "unit": shortened(record.unit or "1", _MAX_UNIT_LENGTH),
                "lowerIsBetter": record.direction == "lower",
            }
        )
        count += 1
    artifact = {"framework": {"name": FRAMEWORK}, "suites": list(suites.values())}
    return json.dumps(artifact, indent=1, ensure_ascii=False) + "\n", count
