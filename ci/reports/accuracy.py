"""Reports of the accuracy gate: one line, terminal table, Markdown, JUnit XML, JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.table import Table

from flexq_bench.accuracy.diagnosis import named_layers
from flexq_bench.ci.accuracy_gate.contract import LimitOutcome
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport, verdict_of
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.ci.reports.formats import JUnitCase, junit_xml, plain
from flexq_bench.ci.reports.perf import EXIT_WORDS
from flexq_bench.exit_codes import ExitCode

SCHEMA_VERSION = 1
_SUITE = "flexq-bench gate {}"
_MAX_LAYERS = 8  # rows of a table of layers
_MAX_ITEMS = 3  # tokens, texts and settings of a failing scheme that a line lists
_MAX_DETAILS = 8  # lines of a limit
_NO_OPINION = "no opinion yet"
_UNNAMED_UNITS = ("", "share", "relative error")  # which the name of the check says
_FAILING = (GateOutcome.FAIL, GateOutcome.AMBIGUOUS)
_NOTED = (*_FAILING, GateOutcome.NOT_JUDGED)


def headline(report: AccuracyReport) -> str:
    """Return the result as `failed: 1 fail, 3 pass; tiny against fp16, through kernels`."""
    word = EXIT_WORDS[report.exit_code]
    if report.quick:
        word = f"{word} at first sight" if report.exit_code == ExitCode.REGRESSION else _NO_OPINION
    counted = [_counted(report, outcome) for outcome in GateOutcome]
    return f"{word}: {', '.join(filter(None, counted))}; {_compared(report)}"


def _gate(report: AccuracyReport) -> str:
    """Return the verb of the gate: of models evaluated here, or of engines."""
    return "served" if report.head else "accuracy"


def _compared(report: AccuracyReport) -> str:
    if report.head:
        return f"{report.model}: {report.head} against {report.base}"
    return f"{report.model} against {_base(report)}, through {report.through}"


def _counted(report: AccuracyReport, outcome: GateOutcome) -> str:
    """Count the limits of an outcome, as `3 not judged, 2 of them allowed`; empty: none."""
    limits = report.with_outcome(outcome)
    allowed = sum(limit.allowed for limit in limits)
    count = f"{len(limits)} {outcome}" if limits else ""
    if not allowed:
        return count
    return f"{count} (allowed)" if allowed == len(limits) else f"{count} ({allowed} allowed)"


def terminal(report: AccuracyReport, *, every: bool = False) -> Table:
    """Return a table with a line for each check of each scheme, the worst first.

    every: a line for each limit, that is for each text of a check.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    several = len({limit.scheme for limit in report.judged}) > 1
    for name in _columns(several=several)[:-1]:
        right = name in ("value", "limit")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for limits in _lines_of(report.judged, every=every):
        _, *cells, _ = _cells(report, limits, several=several)
        table.add_row(str(limits[0].outcome), *cells)
    return table


def reasons(report: AccuracyReport, *, every: bool = False) -> Iterator[str]:
    """Yield why each line of the table is no pass."""
    for limits in _lines_of(report.judged, every=every):
        outcome, scheme, check, *_, reason = _cells(report, limits, several=True)
        if limits[0].outcome is not GateOutcome.PASS:
            yield f"{scheme}: {check}: {outcome}{': ' * bool(reason)}{reason}"


def _columns(*, several: bool) -> tuple[str, ...]:
    """Names of the columns; several: there are several schemes."""
    scheme = ("scheme",) if several else ()
    return ("outcome", *scheme, "check", "value", "limit", "coverage", "why")


def _cells(
    report: AccuracyReport, limits: Sequence[LimitOutcome], *, several: bool
) -> tuple[str, ...]:
    """Return the cells of the limits of one check, the worst of which is the first."""
    worst, *others = limits
    outcome = f"{worst.outcome} (allowed)" if worst.allowed else str(worst.outcome)
    scheme = (worst.scheme,) if several else ()
    check, value, covered, reason = worst.check, change(worst), coverage(worst), worst.reason
    if others:
        check, value = _kind(worst), f"{worst.text} {value}".rstrip()
        tokens = sum(t.tokens for t in report.coverage if t.text in {x.text for x in limits})
        covered = f"{len(limits)} texts, {tokens:,} tokens"
        named = [f"{x.text} ({_outcome(x)})" for x in others if x.outcome in _NOTED]
        reason = "; ".join(filter(None, (reason, ", ".join(named))))
    return outcome, *scheme, check, value, worst.limit, covered, reason


def _outcome(limit: LimitOutcome) -> str:
    return f"{limit.outcome}, allowed" if limit.allowed else str(limit.outcome)


def _kind(limit: LimitOutcome) -> str:
    """Return the name of a limit's check without that of its text."""
    return limit.check.removesuffix(f" of {limit.text}") if limit.text else limit.check


def _lines_of(
    judged: Sequence[LimitOutcome], *, every: bool = False
) -> Sequence[Sequence[LimitOutcome]]:
    """Group the limits of one check on several texts; the worst come first, as in a group.

    Limits that need not be judged are last. every: each limit is a group.
    """
    groups: dict[object, list[LimitOutcome]] = {}
    for limit in judged:
        key = (limit.scheme, limit.check if every else _kind(limit))
        groups.setdefault(key, []).append(limit)
    sorted_groups = [sorted(limits, key=_badness) for limits in groups.values()]
    return sorted(sorted_groups, key=lambda limits: _badness(limits[0])[:2])


def _badness(limit: LimitOutcome) -> tuple[bool, int, float]:
    """Sort key: the worst outcome and the largest loss first."""
    size = limit.change if limit.change is not None else limit.value or 0.0
    if limit.limit.startswith("±"):
        size = abs(size)
    elif limit.limit.startswith("at least"):
        size = -size
    return limit.allowed, list(GateOutcome).index(limit.outcome), -size


def worst_texts(report: AccuracyReport) -> Iterator[str]:
    """Yield for each scheme the texts that lose most, if it was judged on several."""
    losses: dict[str, dict[str, LimitOutcome]] = {}
    for limit in report.judged:
        if limit.text and limit.change is not None and limit.check.startswith("perplexity"):
            losses.setdefault(limit.scheme, {})[limit.text] = limit
    for scheme, by_text in losses.items():
        if len(by_text) < 2:
            continue
        worst = sorted(by_text.values(), key=lambda limit: -(limit.change or 0.0))[:_MAX_ITEMS]
        named = [f"{limit.text} {change(limit)}, {limit.outcome}" for limit in worst]
        yield f"{scheme}: worst texts: {'; '.join(named)}"


def notes(report: AccuracyReport, *, every: bool = False) -> Iterator[str]:
    """Yield what explains the table, as lines of plain text.

    These are warnings, what lacks data, the texts that lose most, causes and details of limits that
    don't pass, and the diagnosis of schemes that fail for no named cause. every: all details.
    """
    for warning in report.warnings:
        yield f"warning: {warning}"
    if report.approved:
        yield f"fidelity is judged by {report.approved}"
    if report.coverage:
        parts = (f"{t.text} {t.tokens:,} of {t.of_tokens:,}" for t in report.coverage)
        yield f"coverage, tokens: {'; '.join(parts)}"
    if report.absent:
        yield f"missing: {'; '.join(report.absent)}"
    yield from worst_texts(report)
    explained = {limit.scheme for limit in report.judged if limit.cause}
    for limit in report.judged:
        if limit.cause:
            yield f"{limit.scheme}: {limit.cause}"
        shown = len(limit.details) if every else _MAX_DETAILS * (limit.outcome in _NOTED)
        for line in limit.details[:shown]:
            yield f"{limit.scheme}: {limit.check}: {line}"
        if shown and len(limit.details) > shown:
            more = len(limit.details) - shown
            yield f"{limit.scheme}: {limit.check}: and {more} more (--details)"
    for diagnosis in report.diagnoses:
        if diagnosis.differing:
            differing = "; ".join(diagnosis.differing[:_MAX_ITEMS])
            yield f"{diagnosis.scheme}: differs from the original: {differing}"
        named = named_layers(diagnosis.layers, diagnosis.kl)
        if named and diagnosis.scheme not in explained:
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
    return junit_xml(
        _SUITE.format(_gate(report)), totals, _named_hashes(report), cases, "\n".join(notes(report))
    )


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
        "gate": _gate(report),
        "exit_code": int(report.exit_code),
        "headline": headline(report),
        "verdict": str(verdict_of(report.judged)),
        "counts": Counter(str(limit.outcome) for limit in report.judged),
        "quick": report.quick,
        "model": report.model,
        "model_hash": report.model_hash,
        "through": report.through,
        "content_hashes": dict(report.content_hashes),
        "base": report.base,
        "head": report.head or None,
        "reference": report.reference or None,
        "reference_hash": report.reference_hash,
        "approved_reference": report.approved or None,
        "warnings": list(report.warnings),
        "policy": report.policy,
        "commit": report.commit,
        "device": report.device,
        "checks": [asdict(limit) for limit in report.judged],
        "coverage": [asdict(text) for text in report.coverage],
        "diagnoses": [diagnosis.values() for diagnosis in report.diagnoses],
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def change(limit: LimitOutcome) -> str:
    """Format the value that the limit is of, as `+0.8 % (+0.7 … +1.0)`; empty: it has none."""
    has_interval = limit.low is not None and limit.high is not None and limit.low < limit.high
    if limit.change is not None:
        form = "{:+.2f}" if limit.unit in ("%", "points") else "{:+.2g}"
        value = limit.change
    elif limit.value is not None:
        form, value = "{:.3g}" if has_interval else "{:.4g}", limit.value
    else:
        return ""
    is_named = limit.unit in _UNNAMED_UNITS or limit.limit.endswith(f" {limit.unit}")
    unit = "" if is_named and limit.unit != "%" else limit.unit
    text = f"{form.format(value)} {unit}".rstrip()
    if has_interval:
        text += f" ({form.format(limit.low)} … {form.format(limit.high)})"
    return text


def coverage(limit: LimitOutcome) -> str:
    """Format how much was judged, and the least loss that it shows if none is found."""
    is_known = limit.detectable is not None and limit.outcome is not GateOutcome.FAIL
    shows = f"shows {limit.detectable:.3g} {limit.unit}" if is_known else ""
    return ", ".join(filter(None, (limit.coverage, shows)))


def _base(report: AccuracyReport) -> str:
    """Return the base of all comparisons: its scheme, or the other model."""
    if not report.reference:
        return report.base
    digest = f" ({report.reference_hash[:12]})" if report.reference_hash else ""
    return f"{report.base} {report.reference}{digest}"


def _lines(report: AccuracyReport) -> Iterator[str]:
    yield f"<!-- {_SUITE.format(_gate(report))} -->"
    yield f"### {_gate(report).capitalize()} gate {plain(headline(report))}"
    yield ""
    through = "" if report.head else f", through {report.through}"
    yield (
        f"Commit {plain(report.commit[:10])} on {plain(report.device)}, policy "
        f"{plain(report.policy)}{through}. Intervals are 95 %, over the same "
        "segments and questions."
    )
    yield ""
    yield from _table(report)
    items = list(notes(report))
    if items:
        yield ""
        yield from (f"- {plain(line)}" for line in items)
    yield ""
    yield "<details><summary>Every limit</summary>"
    yield ""
    yield from _table(report, every=True)
    yield from _coverage_table(report)
    yield ""
    yield "</details>"
    yield from _layer_tables(report)
    hashes = [f"`{scheme}`: `{digest}`" for scheme, digest in report.content_hashes.items()]
    if hashes:
        yield ""
        yield f"Content hash of {', '.join(hashes)}."


def _coverage_table(report: AccuracyReport) -> Iterator[str]:
    if not report.coverage:
        return
    yield ""
    yield "| text | tokens | segments | documents | positions | different tokens |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for text in report.coverage:
        cells = (
            plain(text.text),
            f"{text.tokens:,} of {text.of_tokens:,} ({text.tokens / text.of_tokens:.0%})",
            f"{text.segments:,} of {text.of_segments:,}",
            f"{text.documents:,} of {text.of_documents:,}" if text.of_documents else "",
            f"{text.context:,}",
            f"{text.vocabulary:,} of {text.of_vocabulary:,}",
        )
        yield f"| {' | '.join(cells)} |"


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


def _table(report: AccuracyReport, *, every: bool = False) -> Iterator[str]:
    columns = _columns(several=True)
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join(' ---: ' if name in ('value', 'limit') else ' --- ' for name in columns)}|"
    for limits in _lines_of(report.judged, every=every):
        worst = limits[0]
        outcome, scheme, *cells = _cells(report, limits, several=True)
        marked = f"**{outcome}**" if worst.outcome in _NOTED and not worst.allowed else outcome
        yield f"| {' | '.join((marked, f'`{scheme}`', *map(plain, cells)))} |"
