"""Reports of the accuracy gate: one line, terminal table, Markdown, JUnit XML, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.table import Table

from flexq_bench.accuracy.diagnosis import named_layers
from flexq_bench.ci.accuracy_gate.contract import LimitOutcome
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.ci.reports.formats import JUnitCase, junit_xml, plain
from flexq_bench.ci.reports.perf import EXIT_WORDS

SCHEMA_VERSION = 1
MARKER = "<!-- flexq-bench gate accuracy -->"
SUITE = "flexq-bench gate accuracy"
_MAX_LAYERS = 8  # rows of a table of layers
_MAX_ITEMS = 3  # tokens and settings of a failing scheme that a line lists
_FAILING = (GateOutcome.FAIL, GateOutcome.AMBIGUOUS)
_NOTED = (*_FAILING, GateOutcome.NOT_JUDGED)


def headline(report: AccuracyReport) -> str:
    """Return the result as `failed: 1 regression, 3 pass; tiny against fp16, through kernels`."""
    counts = [(outcome, len(report.with_outcome(outcome))) for outcome in GateOutcome]
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts if count)
    return (
        f"{EXIT_WORDS[report.exit_code]}: {summary}; {report.model} against {_base(report)}, "
        f"through {report.through}"
    )


def terminal(report: AccuracyReport) -> Table:
    """Return a table of every limit of every scheme."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("outcome", "scheme", "check", "change", "limit", "detectable", "why"):
        right = name in ("change", "limit", "detectable")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for limit in report.judged:
        table.add_row(
            str(limit.outcome),
            limit.scheme,
            limit.check,
            change(limit),
            limit.limit,
            detectable(limit),
            limit.reason,
        )
    return table


def notes(report: AccuracyReport) -> Iterator[str]:
    """Yield warnings, what lacks data and diagnoses of failing schemes, as lines of plain text."""
    for warning in report.warnings:
        yield f"warning: {warning}"
    if report.absent:
        yield f"missing: {'; '.join(report.absent)}"
    for diagnosis in report.diagnoses:
        if diagnosis.differing:
            differing = "; ".join(diagnosis.differing[:_MAX_ITEMS])
            yield f"{diagnosis.scheme}: differs from the original: {differing}"
        if named := named_layers(diagnosis.layers, diagnosis.kl):
            yield f"{diagnosis.scheme}: look first at {named}"
        if diagnosis.note:
            yield f"{diagnosis.scheme}: {diagnosis.note}"
        if diagnosis.tokens:
            lost = [f"{t.token!r} after {t.before!r} ({t.loss:.2f} nats)" for t in diagnosis.tokens]
            yield f"{diagnosis.scheme}: lost most on {'; '.join(lost[:_MAX_ITEMS])}"


def markdown(report: AccuracyReport) -> str:
    """Format a report as a pull request comment, which the next run replaces."""
    return "\n".join(_lines(report)) + "\n"


def junit(report: AccuracyReport) -> str:
    """Format JUnit XML: failing and ambiguous checks are failures, others not judged skipped."""
    counts = {outcome: len(report.with_outcome(outcome)) for outcome in GateOutcome}
    totals = {
        "tests": len(report.judged),
        "failures": counts[GateOutcome.FAIL] + counts[GateOutcome.AMBIGUOUS],
        "errors": 0,
        "skipped": counts[GateOutcome.NOT_JUDGED],
    }
    cases = map(_junit_case, report.judged)
    return junit_xml(SUITE, totals, _named_hashes(report), cases, "\n".join(notes(report)))


def _junit_case(limit: LimitOutcome) -> JUnitCase:
    if limit.outcome not in _NOTED:
        return JUnitCase(limit.scheme, limit.check)
    tag = "skipped" if limit.outcome is GateOutcome.NOT_JUDGED else "failure"
    message = f"{change(limit)}, limit {limit.limit}".removeprefix(", ")
    kind = str(limit.outcome)
    return JUnitCase(limit.scheme, limit.check, tag, message, kind, limit.reason)


def as_json(report: AccuracyReport) -> str:
    """Format a report as one JSON object, with every check in the policy's order."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "gate": "accuracy",
        "exit_code": int(report.exit_code),
        "headline": headline(report),
        "model": report.model,
        "model_hash": report.model_hash,
        "through": report.through,
        "content_hashes": dict(report.content_hashes),
        "base": report.base,
        "reference": report.reference or None,
        "reference_hash": report.reference_hash,
        "warnings": list(report.warnings),
        "policy": report.policy,
        "commit": report.commit,
        "device": report.device,
        "checks": [asdict(limit) for limit in report.judged],
        "diagnoses": [diagnosis.values() for diagnosis in report.diagnoses],
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def change(limit: LimitOutcome) -> str:
    """Format the change, as `+0.8 % (+0.7 … +1.0)`; empty: nothing was judged."""
    if limit.change is not None:
        text = f"{limit.change:+.2f} {limit.unit}"
        if limit.low is not None and limit.high is not None:
            text += f" ({limit.low:+.2f} … {limit.high:+.2f})"
        return text
    if limit.value is None:
        return ""
    text = f"{limit.value:.4g} {limit.unit}".rstrip()
    if limit.low is not None and limit.high is not None and limit.low < limit.high:
        text += f" ({limit.low:.4g} … {limit.high:.4g})"
    return text


def detectable(limit: LimitOutcome) -> str:
    """Format the smallest loss that the data could detect, as `1.2 %`; empty: unknown."""
    return "" if limit.detectable is None else f"{limit.detectable:.3g} {limit.unit}"


def _base(report: AccuracyReport) -> str:
    """Return the base of all comparisons: its scheme, or the other model."""
    if not report.reference:
        return report.base
    return f"{report.base} {report.reference} ({(report.reference_hash or '')[:12]})"


def _lines(report: AccuracyReport) -> Iterator[str]:
    yield MARKER
    yield f"### Accuracy gate {plain(headline(report))}"
    yield ""
    yield (
        f"Commit {plain(report.commit[:10])} on {plain(report.device)}, policy "
        f"{plain(report.policy)}, through {report.through}. Intervals are 95 %, over the same "
        "segments and questions."
    )
    yield ""
    yield from _table(report.judged)
    items = list(notes(report))
    if items:
        yield ""
        yield from (f"- {plain(line)}" for line in items)
    yield from _layer_tables(report)
    hashes = [f"`{scheme}`: `{digest}`" for scheme, digest in report.content_hashes.items()]
    if hashes:
        yield ""
        yield f"Content hash of {', '.join(hashes)}."


def _layer_tables(report: AccuracyReport) -> Iterator[str]:
    for diagnosis in report.diagnoses:
        if not diagnosis.layers:
            continue
        yield ""
        kl = "" if diagnosis.kl is None else f", KL {diagnosis.kl:.3g} nats"
        yield f"Layers of `{diagnosis.scheme}`{kl}:"
        yield ""
        yield "| layer | output error | KL with the original's layer |"
        yield "| --- | ---: | ---: |"
        for layer in diagnosis.layers[:_MAX_LAYERS]:
            restored = "" if layer.kl_restored is None else f"{layer.kl_restored:.3g}"
            yield f"| {plain(layer.layer)} | {layer.error:.3g} | {restored} |"


def _named_hashes(report: AccuracyReport) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the report's properties."""
    yield "model_hash", report.model_hash
    yield "through", report.through
    if report.reference_hash:
        yield "reference", report.reference
        yield "reference_hash", report.reference_hash
    for scheme, digest in report.content_hashes.items():
        yield f"content_hash of {scheme}", digest


def _table(judged: Sequence[LimitOutcome]) -> Iterator[str]:
    yield "| scheme | check | change | limit | detectable | outcome | |"
    yield "| --- | --- | ---: | ---: | ---: | --- | --- |"
    for limit in judged:
        outcome = f"**{limit.outcome}**" if limit.outcome in _NOTED else str(limit.outcome)
        cells = (
            f"`{limit.scheme}`",
            plain(limit.check),
            change(limit),
            plain(limit.limit),
            detectable(limit),
            outcome,
            plain(limit.reason),
        )
        yield f"| {' | '.join(cells)} |"
