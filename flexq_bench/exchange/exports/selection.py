"""Selection of the records to export, and their exported names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from flexq_bench.db.records import LINEAR, Record
from flexq_bench.db.writer import series_identity
from flexq_bench.workloads.case import bits_label, kernel_label

_HASH = 8  # hexadecimal digits appended to a truncated name


def comparable(records: Iterable[Record]) -> Iterable[Record]:
    """Select the records with a valid value: other services can't mark a value as invalid."""
    return (record for record in records if record.accepted and record.median_us is not None)


def newest_of_each_series(records: Iterable[Record]) -> list[Record]:
    """The newest comparable record of each series, ordered by first occurrence."""
    newest: dict[str, Record] = {}
    for record in comparable(records):
        key = repr(sorted(series_identity(record).items(), key=lambda item: item[0]))
        known = newest.get(key)
        if known is None or known.created_at <= record.created_at:
            newest[key] = record
    return list(newest.values())


def label_of(record: Record) -> str:
    """The exported kernel name: `flexq-w6a6[vanilla]`; of a project `project/name[variant]`."""
    label = kernel_label(record.kernel, record.variant)
    return f"{record.project}/{label}" if record.project else label


def bits_of(record: Record) -> str:
    """The exported formats: `w6a8`; empty: none."""
    return bits_label(record.operation, record.weight_bits, record.act_bits)


def place_of(record: Record) -> str:
    """The exported case name, without empty parts.

    Such as `gemm cold m1n4096k4096` or `op cold attention_decode batch=1 heads=32`.
    """
    if record.operation == LINEAR:
        shape = f"m{record.m}n{record.n}k{record.k}"
    else:
        shape = f"{record.operation} {record.parameters}".strip()
    regime = "sustained" if record.regime == "sustained" else ""
    return " ".join(filter(None, (record.stage, record.cache, shape, regime)))


def shortened(text: str, most: int) -> str:
    """Truncate a text to `most` characters; a hash of the full text keeps it unique."""
    if len(text) <= most:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH]
    return f"{text[: most - _HASH - 1]}~{digest}"
