"""A bisection that was requested on the dashboard, with its result in one line."""

from __future__ import annotations

from ci.bisect import Journal, bisect
from ci.reports.bisect import line, step_line
from flexq_bench.fleet.request_worker import Question


def answered(question: Question) -> str:
    """Run a requested bisection and return its result in one line; raises as `bisect`.

    A search that was interrupted on this host is resumed.
    """
    key, bad = question.case.key, question.commits[-1]
    report = bisect(
        question.case,
        question.good,
        question.commits,
        question.compare,
        Journal("request", key, question.good, bad, question.device),
        on_step=lambda step: question.on_step(step_line(step)),
        on_resume=lambda count: question.on_step(f"{count} results of an interrupted search"),
    )
    return line(report)
