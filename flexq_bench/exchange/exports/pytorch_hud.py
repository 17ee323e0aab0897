"""Benchmark records of the PyTorch HUD, version 3: a JSON list with one record per result.

The format is specified in PyTorch's wiki, page "PyTorch OSS benchmark infra", section "Benchmark
results format" (github.com/pytorch/pytorch/wiki/PyTorch-OSS-benchmark-infra). `extra_info` maps
strings to strings, as in the table `oss_ci_benchmark_v3` (pytorch/test-infra,
clickhouse_db_schema/oss_ci_benchmark_v3/schema.sql); a runner's `name` and `type` are the platform
and the device, as in gather_runners_info.py there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from flexq_bench.db.records import Record
from flexq_bench.exchange.exports.selection import bits_of, comparable, label_of, place_of
from flexq_bench.workloads.operation import parse_values

_INPUT = {"linear": "gemm", "": "parameters"}  # names of inputs, by operation


def write(records: Iterable[Record]) -> tuple[str, int]:
    """Format every comparable record; returns the text and the number of records."""
    rows = [_row(record) for record in comparable(records)]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n", len(rows)


def _row(record: Record) -> dict[str, Any]:
    bits = bits_of(record)
    values = {name: str(value) for name, value in parse_values(record.parameters)}
    return {
        "benchmark": {
            "name": "flexq-bench",
            "mode": "inference",
            **({"dtype": bits} if bits else {}),
            "extra_info": {
                "suite": record.run.suite,
                "case": record.case,
                "stage": record.stage,
                "cache": record.cache,
                "protocol_version": str(record.protocol_version),
                "project": record.project,
            },
        },
        "model": {
            "name": f"{label_of(record)} {place_of(record)}",
            "type": "kernel",
            "backend": record.backend,
            "extra_info": {"model": record.model, "layer": record.layer},
        },
        **(
            {"inputs": {_INPUT.get(record.operation, record.operation): {"extra_info": values}}}
            if values
            else {}
        ),
        "dependencies": {
            record.project or "flexq-bench": {
                "sha": record.commit.sha,
                "extra_info": {"subject": record.commit.subject},
            }
        },
        "metric": {
            "name": f"{record.metric}({record.unit})",
            "benchmark_values": [record.median_us],
            "extra_info": {
                "ci_low": _text(record.ci_low_us),
                "ci_high": _text(record.ci_high_us),
                "n_samples": str(record.n_samples),
                "created_at": record.created_at,
                "direction": record.direction,
            },
        },
        "runners": [
            {
                "name": record.backend,
                "type": record.gpu,
                **({"gpu_info": record.gpu, "gpu_count": 1} if record.backend == "cuda" else {}),
                "extra_info": {"uuid": record.device.uuid},
            }
        ],
    }


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)
