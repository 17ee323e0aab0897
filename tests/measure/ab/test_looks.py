"""Looks of a comparison on made times: the number of pairs of processes of each case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from flexq_bench.ci.gate_inputs import suffices
from flexq_bench.ci.policy import load_policy
from flexq_bench.cli.options import MAX_PROCESSES
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.measure.ab.looks import look_by_look
from flexq_bench.verdicts import CaseComparison, Comparison, Verdict, confirm
from flexq_bench.verdicts.alert_rule import pairs_for_clear
from flexq_bench.workloads.case import Case

CASE = Case.from_key("flexq-w6a6 gemm cold m1n64k64")
MOST = 24
CHANGED = (Verdict.SLOWER, Verdict.FASTER)


@dataclass
class Made:
    """A case with the ln times of its processes, [2, 24]; two blocks each."""

    logs: np.ndarray
    pairs: int = 0

    def judge(self) -> CaseComparison:
        times = 100 * np.exp(np.repeat(self.logs[:, : self.pairs], 2, axis=1))
        comparison = Comparison(times[0], times[1], np.repeat(np.arange(self.pairs), 2))
        return CaseComparison(CASE, "base", "head", comparison, confirm(comparison))


def gaussian(rng, change=0.0, sigma=0.005):
    return Made(sigma * rng.standard_normal((2, MOST)) + [[0.0], [change]])


def two_speeds(rng, change=0.0):
    slow = rng.random((2, MOST)) < 0.5
    return Made(0.12 * slow + 0.001 * rng.standard_normal((2, MOST)) + [[0.0], [change]])


def taken(cases, rules=None):
    """Verdicts of cases compared together, and their pairs of processes."""

    def measure(some, pairs):
        for case in some:
            case.pairs = max(case.pairs, pairs)

    results = list(look_by_look(cases, rules or InterleaveRules(), measure, Made.judge))
    assert len(results) == len(cases)
    return [(case.judge().confirmation.verdict, case.pairs) for case in cases]


@pytest.mark.parametrize(
    ("clear", "compared", "pairs"),
    [(1, 1, 7), (1, 26, 8), (26, 26, 7), (1, 100, 9), (1, 10**9, 12)],
)
def test_clear_change_needs_more_pairs_among_more_cases(clear, compared, pairs):
    assert pairs_for_clear(clear, compared, rate=0.005) == pairs
    assert pairs_for_clear(clear, compared, rate=0.005, is_far=True) == (
        pairs if pairs == 12 else pairs - 1
    )


@pytest.mark.parametrize("change", [0.1, 0.9, -0.9])
def test_only_a_clear_change_gets_more_pairs(change):
    rng = np.random.default_rng(1)
    cases = [gaussian(rng, change, 0.001), *(gaussian(rng, sigma=0.001) for _ in range(25))]

    (slower, pairs), *others = taken(cases)

    assert (slower in CHANGED, pairs) == (True, 7)
    assert others == [(Verdict.SAME, 5)] * 25


def test_unclear_change_gets_a_whole_look():
    case = gaussian(np.random.default_rng(2), 0.013, 0.001)  # its bounds include 1 %
    case.logs[0, 5] = case.logs[1, :6].max()

    assert taken([case]) == [(Verdict.SLOWER, 12)]


def test_look_judges_a_case_together_with_decided_cases():
    def change():
        return gaussian(np.random.default_rng(0), 0.018, 0.01)

    rng = np.random.default_rng(1)
    cases = [change(), *(gaussian(rng, sigma=0.001) for _ in range(25))]

    assert taken([change()]) == [(Verdict.SLOWER, 12)]
    assert taken(cases)[0] == (Verdict.SLOWER, 24)


def test_kernel_with_two_speeds_is_no_change():
    """Of 26 cases, one has one side slow and the other fast in six pairs, by chance."""
    rng = np.random.default_rng(3)
    cases = [two_speeds(rng) for _ in range(26)]
    case = cases[0]
    case.logs[:, :6] = np.array([[0.0], [0.12]]) + 0.001 * rng.standard_normal((2, 6))
    case.logs[:, 6] = (0.12, 0.0)

    assert taken(cases)[0][0] not in CHANGED


def test_case_with_two_speeds_ends_at_a_look():
    rng = np.random.default_rng(6)
    cases = [gaussian(rng, sigma=0.001) for _ in range(3)]
    cases[0].logs[:, 1] += 0.12

    assert taken(cases) == [(Verdict.SAME, 6), (Verdict.SAME, 5), (Verdict.SAME, 5)]


@pytest.mark.parametrize(("cpu_wait", "is_known"), [(0.0, True), (0.2, False)])
def test_more_pairs_beside_busy_processes_decide_no_unclear_change(cpu_wait, is_known):
    case = gaussian(np.random.default_rng(2), 0.03, 0.03)
    case.pairs = 12
    comparison = replace(case.judge().comparison, cpu_wait=cpu_wait)
    found = CaseComparison(CASE, "base", "head", comparison, confirm(comparison))

    assert (found.confirmation.verdict, found.is_clear) == (Verdict.AMBIGUOUS, False)
    assert (InterleaveRules().pairs_needed(found) is not None) is is_known


@pytest.mark.parametrize(
    ("pairs", "option"),
    [
        *((24, ""), (25, "--processes 7")),
        *((4 * MAX_PROCESSES, f"--processes {MAX_PROCESSES}"), (4 * MAX_PROCESSES + 1, "")),
    ],
)
def test_ambiguous_case_names_the_option_that_decides_it(pairs, option):
    case = gaussian(np.random.default_rng(2))
    case.pairs = 6
    found = replace(case.judge(), pairs_needed=pairs)

    assert f"about {pairs} pairs" in found.need
    assert ("--processes" in found.need, option in found.need) == (bool(option), True)
    if option:
        rules = InterleaveRules.with_processes(int(option.split()[1]))
        assert rules.most_pairs >= pairs


def test_ambiguous_case_that_waited_for_cpus_says_so():
    case = gaussian(np.random.default_rng(2))
    case.pairs = 6
    comparison = replace(case.judge().comparison, cpu_wait=0.2)

    assert case.judge().need == ""
    assert "20%" in replace(case.judge(), comparison=comparison).need


@pytest.mark.parametrize(("make", "most"), [(gaussian, 0), (two_speeds, 3)])
def test_early_end_adds_no_false_alarms(make, most):
    """most: of 400 comparisons, with 12 pairs for a clear change as well."""
    rng = np.random.default_rng(5)

    alarms = sum(taken([make(rng)])[0][0] in CHANGED for _ in range(400))

    assert alarms <= most


@pytest.mark.parametrize(("limit", "pairs"), [(2, 6), (10.5, 12), (50, 6)])
def test_gate_continues_while_its_limit_is_between_the_bounds(tmp_path, limit, pairs):
    path = tmp_path / "gate.toml"
    path.write_text(f'version = 1\nsuite = "smoke"\nslower_percent = {limit}\n')
    rules = InterleaveRules(suffices=partial(suffices, load_policy(str(path))))
    case = gaussian(np.random.default_rng(7), 0.1)

    assert taken([case], rules) == [(Verdict.SLOWER, pairs)]
