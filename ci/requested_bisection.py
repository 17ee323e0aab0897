"""A bisection that somebody requested from a page, answered in a line."""

from __future__ import annotations

from ci.bisect import Journal, bisect
from ci.reports.bisect import line, step_line
from flexq_bench.fleet.request_worker import Question


def answered(question: Question) -> str:
    """The line that answers a bisection; raises as `bisect`.

    It goes on where a server that died left the same search on this host.
    """
    key, bad = question.case.key, question.commits[-1]
    report = bisect(
        question.case,
        question.good,
        question.commits,
        question.compare,
        Journal("request", key, question.good, bad, question.device),
        on_step=lambda step: question.on_step(step_line(step)),
        on_resume=lambda count: question.on_step(f"{count} answers of an interrupted search"),
    )
    return line(report)
