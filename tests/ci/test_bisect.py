"""Binary search for the commit that changed a case."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from flexq_bench.ci import bisect
from flexq_bench.ci.bisect import (
    BisectionStep,
    Journal,
    StepOutcome,
    side_is_clear,
    step_of,
)
from flexq_bench.ci.reports.bisect import step_line
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.verdicts import CaseComparison, Comparison, confirm
from flexq_bench.workloads.case import Case

CASE = Case.from_key("flexq-w6a6 gemm cold m1n64k64")
COMMITS = [f"c{i:02}" for i in range(1, 33)]


def answering(culprit: str, skipped: frozenset[str] = frozenset(), asked: list[str] | None = None):
    """Answers as commits would give; every question is noted."""

    def ask(commit: str) -> BisectionStep:
        if asked is not None:
            asked.append(commit)
        if commit in skipped:
            return BisectionStep(commit, StepOutcome.SKIPPED, "does not build")
        changed = commit >= culprit
        return BisectionStep(
            commit, StepOutcome.CHANGED if changed else StepOutcome.UNCHANGED, "", 0.0
        )

    return ask


def search(good, commits, answer, *more):
    """Run a search with an answer to each of its questions."""

    def asking(commit):
        return (yield commit)

    searching = bisect.search(good, commits, asking, *more)
    try:
        commit = next(searching)
        while True:
            commit = searching.send(answer(commit))
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("culprit", COMMITS)
def test_every_culprit_is_found_in_few_comparisons(culprit):
    asked: list[str] = []

    found = search("good", COMMITS, answering(culprit, asked=asked))

    assert found.suspects == (culprit,)
    assert found.last_unchanged == ("good" if culprit == "c01" else f"c{int(culprit[1:]) - 1:02}")
    assert len(asked) <= 5


def test_commits_that_may_be_next_are_prepared_before_each_step():
    steps: list[str] = []
    prepared: list[set[str]] = []

    search(
        "good",
        COMMITS,
        answering("c20", asked=steps),
        {"c32": BisectionStep("c32", StepOutcome.CHANGED, "", 0.0)},
        lambda commits: prepared.append(set(commits)),
    )

    assert len(prepared) == len(steps)
    assert all(step in ready for step, ready in zip(steps[1:], prepared[:-1], strict=True))
    assert all(len(ready) <= 2 for ready in prepared)


def test_skipped_commits_are_searched_around():
    found = search("good", COMMITS, answering("c20", frozenset({"c16", "c17", "c24"})))

    assert found.suspects == ("c20",)
    assert found.steps["c16"].outcome is StepOutcome.SKIPPED


def test_indistinguishable_commits_are_all_suspects():
    found = search("good", COMMITS, answering("c20", frozenset({"c18", "c19"})))

    assert found.suspects == ("c18", "c19", "c20")
    assert found.last_unchanged == "c17"


def test_resumed_search_reuses_stored_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    before: list[str] = []
    whole = search("good", COMMITS, answering("c20", asked=before))
    Journal("case", "good", "bad").write({c: whole.steps[c] for c in before[:3]})

    after: list[str] = []
    known = Journal("case", "good", "bad").read()
    found = search("good", COMMITS, answering("c20", asked=after), known)

    assert found.suspects == ("c20",)
    assert after == before[3:]
    assert Journal("case", "good", "other").read() == {}


def test_searches_of_several_cases_share_comparisons(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    culprits = {replace(CASE, cache=cache): c for cache, c in (("cold", "c07"), ("hot", "c21"))}
    asked: list[tuple[str, int]] = []

    def compare(commit, cases):
        asked.append((commit, len(cases)))
        for case in cases:
            head = 120.0 if commit >= culprits[case] else 100.0
            measured = Comparison((100.0,) * 24, (head, head + 0.1) * 12, tuple(range(24)))
            yield CaseComparison(case, "good", commit, measured, confirm(measured))

    def search_of(case):
        journal = Journal(case.key)
        return bisect.search_case(
            case, "good", COMMITS, journal, on_step=lambda _: None, on_resume=lambda _: None
        )

    reports = bisect.bisect({case: search_of(case) for case in culprits}, compare)

    assert {case: reports[case].location.suspects for case in culprits} == {
        case: (culprit,) for case, culprit in culprits.items()
    }
    assert asked[:2] == [("c32", 2), ("c16", 2)]  # then each has its own half
    assert len({commit for commit, _ in asked}) == len(asked) <= 10


def test_damaged_journal_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    journal = Journal("case")
    journal.write({"a": BisectionStep("a", StepOutcome.CHANGED, "slower", 0.02)})
    assert journal.read()["a"].log_ratio == 0.02

    journal.path.write_text(journal.path.read_text()[:10])

    assert journal.read() == {}


def compared(change: float, scatter: float = 0.001):
    """A comparison of 6 pairs of processes."""
    apart = (1, -1, 0.4, -0.6, 0.7, -0.5)  # not two speeds
    head = [100 * math.exp(change + scatter * one) for one in apart for _ in "ab"]
    return Comparison([100.0] * 12, head, [i // 2 for i in range(12)])


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize(
    ("share", "scatter", "outcome"),
    [
        (0.0, 0.001, StepOutcome.UNCHANGED),
        (0.3, 0.001, StepOutcome.UNCHANGED),
        (0.7, 0.001, StepOutcome.CHANGED),
        (1.0, 0.001, StepOutcome.CHANGED),
        (0.5, 0.001, StepOutcome.SKIPPED),
        (1.0, 0.05, StepOutcome.SKIPPED),
    ],
)
def test_commit_is_classified_by_half_of_the_change(direction, share, scatter, outcome):
    whole = 0.04 * direction

    assert step_of("a", compared(share * whole, scatter), whole).outcome is outcome


def test_commit_without_data_is_skipped_with_the_reason():
    nothing = Comparison([], [], [])

    step = step_of("a", nothing, 0.04, "the worker died")

    assert (step.outcome, step.reason, step.log_ratio) == (
        StepOutcome.SKIPPED,
        "the worker died",
        None,
    )
    assert "are needed" in step_of("a", nothing, 0.04).reason


@pytest.mark.parametrize(
    ("share", "scatter", "is_enough"),
    [(0.0, 0.001, True), (1.0, 0.001, True), (0.5, 0.001, False), (1.0, 0.05, False)],
)
def test_step_ends_when_its_side_is_clear(share, scatter, is_enough):
    comparison = compared(share * 0.04, scatter)
    result = CaseComparison(CASE, "good", "commit", comparison, confirm(comparison))
    rules = InterleaveRules(suffices=partial(side_is_clear, 0.04))

    assert rules.is_enough(result) is is_enough


def test_step_line_has_the_number_of_pairs():
    step = step_of("a" * 40, compared(0.04, 0.001), 0.04)

    assert step.pairs == 6
    assert step_line(step).startswith("aaaaaaaaaa changed after 6 pairs: +4")
