"""A bisection that was requested on the dashboard, with its result in one line."""

from __future__ import annotations

from flexq_bench.ci.bisect import Journal, bisect, search_case
from flexq_bench.ci.reports.bisect import line, step_line
from flexq_bench.fleet.request_worker import BisectionInput


def answered(search_input: BisectionInput) -> str:
    """Run a requested bisection and return its result in one line; raises as `bisect`.

    A search that was interrupted on this host is resumed.
    """
    case, bad = search_input.case, search_input.commits[-1]
    journal = Journal("request", case.key, search_input.good, bad, search_input.device)
    searching = search_case(
        case,
        search_input.good,
        search_input.commits,
        journal,
        on_step=lambda step: search_input.on_step(step_line(step)),
        on_resume=lambda count: search_input.on_step(f"{count} results of an interrupted search"),
    )
    reports = bisect(
        {case: searching}, lambda commit, cases: [search_input.compare(commit, cases[case])]
    )
    journal.delete()
    return line(reports[case], search_input.repository)
