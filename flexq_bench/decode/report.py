"""Terminal tables of decode and serving results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from flexq_bench.db.records import DecodeRecord, ServingRecord

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PartChange:
    """One part of a step under two schemes. Times in microseconds.

    share: of the base's step. speedup: base over head; None: head has no such part.
    saved: fraction of the base's step; negative if the part takes longer.
    """

    part: str
    base_us: float
    head_us: float
    share: float
    speedup: float | None
    saved: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Speed-up of head over base by parts. explained: ratio of the sums of the parts' times.

    measured: ratio of the median times per token, without a profiler.
    """

    base: DecodeRecord
    head: DecodeRecord
    changes: tuple[PartChange, ...]
    explained: float
    measured: float


def explain(base: DecodeRecord, head: DecodeRecord) -> Explanation | None:
    """Explain the speed-up of head over base: each part's speed-up and its share of the time.

    None: one of the two has no profile, or was not timed.
    """
    if not base.parts or not head.parts or not base.token_ms or not head.token_ms:
        return None
    base_us = {part["part"]: float(part["us"]) for part in base.parts}
    head_us = {part["part"]: float(part["us"]) for part in head.parts}
    step = sum(base_us.values())
    changes = []
    for name in dict.fromkeys((*base_us, *head_us)):
        before, after = base_us.get(name, 0.0), head_us.get(name, 0.0)
        speedup = before / after if after else None
        changes.append(
            PartChange(name, before, after, before / step, speedup, (before - after) / step)
        )
    explained = step / sum(head_us.values())
    return Explanation(base, head, tuple(changes), explained, base.token_ms / head.token_ms)


def explanations(records: Sequence[DecodeRecord]) -> list[Explanation]:
    """Explain every record relative to the first scheme, same batch and lengths, if profiled."""
    results = []
    for head in records:
        base = _base_of(head, records)
        if base is None or head.scheme == base.scheme:
            continue
        explanation = explain(base, head)
        if explanation is not None:
            results.append(explanation)
    return results


def decode_line(record: DecodeRecord, processes: int) -> str:
    """Format the state of a case after one more process. processes: their total number."""
    done = len(record.processes)
    if record.status != "ok":
        return f"{record.case}: {record.status}"
    token = "one token only" if record.token_ms is None else f"{record.token_ms:.3f} ms a token"
    return f"{record.case}: {token}, {done} of {processes} processes"


def serving_line(record: ServingRecord) -> str:
    """Format a serving as one line."""
    if record.tokens_per_s is None:
        return f"{record.case}: {record.status}"
    slots = record.parameters["slots"]
    return f"{record.case}: {record.tokens_per_s:,.0f} tokens/s, {slots} at a time"


def decode_table(records: Sequence[DecodeRecord]) -> Table:
    """Tabulate cases; speed and memory relative to the first scheme, same batch and lengths.

    With the same cache width too, if the first scheme was decoded with it.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("scheme", no_wrap=True)
    names = ("KV", "batch", "prompt", "new", "TTFT ms", "token ms", "± %", "p95", "tokens/s")
    for name in (*names, "×", "GiB", "× memory", "J/token"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        base = _base_of(record, records)
        table.add_row(
            record.scheme,
            str(record.kv_bits),
            str(record.batch),
            str(record.prompt_tokens),
            str(record.new_tokens),
            *(_cells(record, base) if record.status == "ok" else [record.status]),
        )
    return table


def explanation_table(explanation: Explanation) -> Table:
    """Tabulate times, speed-up, share and saved fraction of the step of each part."""
    base, head = explanation.base, explanation.head
    table = Table(
        title=f"{base.scheme} -> {_name_beside(head, base)}, batch {base.batch}, "
        f"{base.new_tokens} new tokens: "
        f"{explanation.explained:.2f}× by its parts, {explanation.measured:.2f}× measured",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("part", no_wrap=True)
    for name in (f"{base.scheme} µs", f"{head.scheme} µs", "speed-up", "share %", "saves %"):
        table.add_column(name, justify="right")
    for change in explanation.changes:
        table.add_row(
            change.part,
            f"{change.base_us:,.0f}",
            f"{change.head_us:,.0f}",
            "" if change.speedup is None else f"{change.speedup:.2f}×",
            f"{100 * change.share:.1f}",
            f"{100 * change.saved:.1f}",
        )
    return table


def serving_table(records: Sequence[ServingRecord]) -> Table:
    """Tabulate servings, one row per scheme and batch limit."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("scheme", no_wrap=True)
    names = ("KV", "limit", "slots", "requests", "tokens/s", "p50 s", "p95 s", "p99 s")
    for name in (*names, "TTFT p50 ms", "p95 ms", "token p50 ms", "p95 ms", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        latencies = (record.latency_p50_s, record.latency_p95_s, record.latency_p99_s)
        table.add_row(
            record.scheme,
            str(record.kv_bits),
            str(record.batch_limit),
            str(record.parameters["slots"]) if record.status == "ok" else record.status,
            str(record.requests),
            _number(record.tokens_per_s, ",.0f"),
            *(_number(latency, ".2f") for latency in latencies),
            _number(record.ttft_p50_ms, ".1f"),
            _number(record.ttft_p95_ms, ".1f"),
            _number(record.token_p50_ms, ".2f"),
            _number(record.token_p95_ms, ".2f"),
            _number(_gib(record.steady_memory_bytes or record.weights_bytes), ".1f"),
        )
    return table


def _cells(record: DecodeRecord, base: DecodeRecord | None) -> list[str]:
    memory = _gib(record.steady_memory_bytes or record.weights_bytes)
    base_memory = _gib(base.steady_memory_bytes or base.weights_bytes) if base else None
    spread = None
    if record.token_ms and record.token_ci_high_ms and record.token_ci_low_ms:
        wide = max(
            record.token_ci_high_ms - record.token_ms, record.token_ms - record.token_ci_low_ms
        )
        spread = 100 * wide / record.token_ms
    return [
        _number(record.prefill_ms, ".1f"),
        _number(record.token_ms, ".3f"),
        _number(spread, ".1f"),
        _number(record.token_p95_ms, ".3f"),
        _number(record.tokens_per_s, ",.0f"),
        _ratio(base.token_ms if base else None, record.token_ms),
        _number(memory, ".2f"),
        _ratio(memory, base_memory),
        _number(record.energy_j_per_token, ".2f"),
    ]


def _base_of(record: DecodeRecord, records: Sequence[DecodeRecord]) -> DecodeRecord | None:
    candidates = [
        r for r in records if r.scheme == records[0].scheme and _shape(r) == _shape(record)
    ]
    same = [r for r in candidates if r.kv_bits == record.kv_bits]
    return next(iter(same + candidates), None)


def _name_beside(head: DecodeRecord, base: DecodeRecord) -> str:
    suffix = "" if head.kv_bits == base.kv_bits else f" with a cache of {head.kv_bits} bits"
    return head.scheme + suffix


def _shape(record: DecodeRecord) -> tuple[int, int, int]:
    return record.batch, record.prompt_tokens, record.new_tokens


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else ""


def _gib(size: int | None) -> float | None:
    return None if size is None else size / _GIB


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
