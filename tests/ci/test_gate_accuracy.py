"""Checks of the accuracy gate on made-up results."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexq_bench.accuracy.coverage import TextCoverage
from flexq_bench.accuracy.errors import MissingTaskError
from flexq_bench.accuracy.records import ResultOrigin
from flexq_bench.accuracy.results import KL, PERPLEXITY, MetricResult
from flexq_bench.ci.accuracy_gate.checks.fidelity import FidelityLimit, judge_fidelity
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport, gate_accuracy
from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
from flexq_bench.ci.accuracy_gate.results import SchemeResults
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.ci.reports.accuracy import notes
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.exit_codes import ExitCode
from flexq_bench.runs.lifecycle import new_run

HEAD = 'version = 1\nschemes = ["w6a6"]\n'
NLL = np.linspace(2.0, 3.0, 80)
RIGHT = [1.0] * 120 + [0.0] * 80


def a_finding(scheme: str, task: str, metric: str, values, **changes: Any) -> MetricResult:
    mean = float(np.mean(values))
    fields: dict[str, Any] = {
        "scheme": scheme,
        "task": task,
        "task_version": "1",
        "data_hash": "ab",
        "metric": metric,
        "direction": "lower" if metric == PERPLEXITY else "higher",
        "value": float(np.exp(mean)) if metric == PERPLEXITY else mean,
        "standard_error": None,
        "n_items": len(values),
        "values": tuple(map(float, values)),
        "parameters": {},
    }
    return MetricResult(**fields | changes)


def wikitext(scheme: str, growth: float, scatter: float = 0.0, **changes: Any) -> MetricResult:
    wobble = scatter * np.resize([1, -1], NLL.size)
    return a_finding(scheme, "wikitext", PERPLEXITY, NLL + np.log1p(growth) + wobble, **changes)


def piqa(scheme: str, *, lost: int = 0, won: int = 0, **changes: Any) -> MetricResult:
    answers = [*([0.0] * lost), *RIGHT[lost : 200 - won], *([1.0] * won)]
    return a_finding(scheme, "piqa", "acc", answers, **changes)


@pytest.fixture
def gate(database, tmp_path) -> Callable[..., AccuracyReport]:
    """gate("[[perplexity]]…", finding, …): the report where these were found.

    gate.evaluated: the units of the last call.
    """

    def run(
        limits: str, *findings: MetricResult | Exception, missing=None, head=HEAD
    ) -> AccuracyReport:
        path = tmp_path / "mine.toml"
        path.write_text(head + limits)

        run.evaluated = []

        def evaluate(scheme: str, task: str) -> list[MetricResult]:
            run.evaluated.append((scheme, task))
            for error in (f for f in findings if isinstance(f, Exception)):
                if task == "piqa":
                    raise error
            made = [f for f in findings if isinstance(f, MetricResult)]
            return [f for f in made if (f.scheme, f.task) == (scheme, task)]

        tasks = ("wikitext", "piqa")
        units = tuple((scheme, task) for scheme in ("fp16", "w6a6") for task in tasks)
        evaluator = SimpleNamespace(
            is_bounded=lambda scheme: False,
            evaluate=evaluate,
            parameters=lambda *unit: {},
            through="reference",
            reference=None,
            unavailable={},
            places=lambda text: range(NLL.size),
            context_of=lambda text: 32,
            enough=lambda text: NLL.size,
            coverage=lambda text, count: TextCoverage(text, *(count,) * 9),
            distinct_segments=run.distinct_segments,
        )
        origin = ResultOrigin(
            model="made",
            model_hash="cd",
            seed=0,
            run=new_run("accuracy", "gate", ()),
            commit=CommitInfo("0" * 40, None, 1, False),
            device=DeviceInfo("CPU-1", "A CPU", "cpu"),
            environment={},
        )
        setup = SimpleNamespace(
            plan=SimpleNamespace(
                units=units, reference=None, checkpoint=None, texts=(), schemes=("w6a6",), seed=0
            ),
            evaluator=evaluator,
            origin=origin,
            warnings=(),
        )
        return gate_accuracy(
            load_accuracy_policy(str(path)),
            setup,
            database,
            ["w6a6"],
            "fp16",
            missing or {},
            on_unit=lambda unit, found: None,
        )

    run.distinct_segments = lambda text: (range(NLL.size), NLL.size)
    return run


def text_limit(limit: str) -> str:
    return f'[[perplexity]]\ntext = "wikitext"\n{limit}\n'


TASK = '[[task]]\nname = "piqa"\nmetric = "acc"\nmargin_points = 2\n'


def test_detectable_loss_is_reported(gate):
    found = wikitext("fp16", 0), wikitext("w6a6", 0.001, scatter=0.02)
    (judged,) = gate(text_limit("percent = 5"), *found).judged
    # 5.25 standard errors of 80 segments that scatter by 2 %: t of 9 degrees of freedom at half of
    # alpha, 3.25, and at three quarters of 1 - power, 1.99
    assert judged.detectable == pytest.approx(100 * 5.25 * 0.0201 / 80**0.5, rel=0.02)


KL_ROWS = '[kl]\ntext = "wikitext"\n'


def kl(value: float, scatter: float = 0.0, **changes: Any) -> MetricResult:
    values = value + scatter * np.resize([1, -1], NLL.size)
    return a_finding("w6a6", "wikitext", "kl_divergence", values, direction="lower", **changes)


def statistic(metric: str, value: float, low: float, high: float, **changes: Any) -> MetricResult:
    observed = {"low": low, "high": high}
    made = a_finding("w6a6", "wikitext", metric, [value], observed=observed, n_items=5000)
    return replace(made, values=(), **changes)


def test_repeated_segments_count_once(gate):
    found = wikitext("fp16", 0), wikitext("w6a6", 0.01, scatter=0.02), kl(0.015, 0.005)
    quantile = statistic("kl_p999", 0.1, 0.095, 0.105)

    for count, code in ((4, ExitCode.AMBIGUOUS), (NLL.size, ExitCode.PASS)):
        gate.distinct_segments = lambda text, count=count: (range(count), NLL.size)
        for limit in (text_limit("upper_percent = 2.5"), KL_ROWS + "mean = 0.02\n"):
            assert gate(limit, *found).exit_code == code, (count, limit)
        few = replace(quantile, n_items=4000)
        report = gate(KL_ROWS + "p999 = 0.11\n", *found, few)
        assert report.exit_code == (ExitCode.MISSING if count == 4 else code)


@pytest.mark.parametrize("key", ["median", "p95", "p99", "p999", "max"])
def test_each_divergence_quantile_is_limited(gate, key):
    found = wikitext("fp16", 0), wikitext("w6a6", 0)
    metric = f"kl_{key}"
    for value, low, high, code in (
        (0.1, 0.09, 0.11, ExitCode.PASS),
        (0.1, 0.09, 0.21, ExitCode.AMBIGUOUS),
        (0.3, 0.29, 0.31, ExitCode.REGRESSION),
    ):
        report = gate(KL_ROWS + f"{key} = 0.2\n", *found, statistic(metric, value, low, high))
        assert report.exit_code == code, (value, high)


PLANNED = "detect = 1.0\npower = 0.95\nalpha = 0.01\n"


def test_planned_test_detects_the_planned_loss(gate):
    limits = PLANNED + text_limit("percent = 2")
    for growth, code in ((0.01, ExitCode.REGRESSION), (0.0, ExitCode.PASS)):
        found = wikitext("fp16", 0), wikitext("w6a6", growth, scatter=0.004)
        report = gate(limits, *found)
        assert report.exit_code == code
        assert report.judged[0].detectable == pytest.approx(1.0)


def test_regression_decides_although_another_limit_lacks_data(gate):
    found = wikitext("fp16", 0), wikitext("w6a6", 0.002, scatter=0.1), kl(0.03)
    report = gate(PLANNED + text_limit("percent = 2") + KL_ROWS + "mean = 0.02\n", *found)
    assert [one.outcome for one in report.judged] == ["not judged", "fail"]
    assert report.exit_code == ExitCode.REGRESSION


def test_limits_share_alpha_and_noise_is_ambiguous(gate):
    """Half is the perplexity's, half that of the mean and of the maximum; fidelity has none."""
    limits = PLANNED + text_limit("percent = 2") + KL_ROWS + "mean = 0.02\nmax = 9\n"
    limits += '[fidelity]\ntext = "wikitext"\npercent = 1\nkl_percent = 8\n'
    found = wikitext("fp16", 0), wikitext("w6a6", 0.0001, scatter=0.001)
    # 80 segments that scatter by 0.004: a standard error of 0.00045, t of 1/400 at one end is 2.9
    for mean, outcome in ((0.0211, "ambiguous"), (0.0218, "fail")):
        judged = gate(limits, *found, kl(mean, 0.004)).judged
        of_kl = next(one for one in judged if one.check == "KL mean of wikitext")
        assert of_kl.outcome == outcome, of_kl
    assert "alpha 0.5 %" in judged[0].reason


@pytest.mark.parametrize(
    ("mean", "outcome"), [(0.0025, "fail"), (0.00218, "ambiguous"), (0.00214, "pass")]
)
def test_fidelity_uses_95_percent_intervals_at_any_alpha(mean, outcome):
    """Damage of few tokens: 80 segments that scatter by 0.00085, so the difference by 0.0001."""
    own, judged = (
        SchemeResults("w6a6", "fp16", [result], {}) for result in (kl(0.002), kl(mean, 0.00085))
    )
    limit = FidelityLimit(text="wikitext", percent=1, kl_percent=8)
    assert judge_fidelity(limit, "fidelity", KL, judged, own).outcome == outcome


@pytest.mark.parametrize(("own", "limit"), [(0.0, "±0.0002 nats"), (0.1, "±8 %")])
def test_fidelity_has_its_value_and_limit_in_one_unit(own, limit):
    ours, judged = (SchemeResults("w6a6", "fp16", [kl(mean)], {}) for mean in (own, own + 0.01))
    table = FidelityLimit(text="wikitext", percent=1, kl_percent=8, kl=0.0002)
    outcome = judge_fidelity(table, "fidelity", KL, judged, ours)
    assert (outcome.limit, outcome.unit) == (limit, limit.rpartition(" ")[2])
    assert outcome.change == pytest.approx(0.01 if outcome.unit == "nats" else 10)


def test_text_without_data_is_missing_with_the_reason(gate):
    missing = {"wikitext": "no text: give --data wikitext=FILE"}
    report = gate(text_limit("percent = 5"), missing=missing)
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].reason == missing["wikitext"]
    assert "missing: the text wikitext (--data wikitext=FILE)" in notes(report)


def test_task_is_judged_without_the_planned_text(gate):
    def unknown(text):
        raise KeyError(text)

    gate.distinct_segments = unknown
    missing = {"wikitext": "no text: give --data wikitext=FILE"}
    limits = f"{text_limit('')}{TASK}"
    report = gate(limits, piqa("fp16"), piqa("w6a6"), missing=missing, head=f"{HEAD}detect = 1.0\n")
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].outcome is GateOutcome.NOT_JUDGED


def test_task_that_cannot_be_evaluated_is_missing(gate):
    report = gate(TASK, MissingTaskError("tasks need lm_eval"))
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].reason == "tasks need lm_eval"
    (line,) = notes(report)
    assert line in (
        "missing: the task piqa (--task-data DIR with piqa/validation)",
        "missing: the task piqa (tasks need lm_eval)",  # where it is not installed
    )
    # A download that is tried in vain takes half a minute: once is enough.
    assert [task for _, task in gate.evaluated].count("piqa") == 1


def test_failure_outweighs_what_is_not_judged(gate):
    report = gate(text_limit("percent = 1") + TASK, wikitext("fp16", 0), wikitext("w6a6", 0.5))
    assert [one.outcome for one in report.judged] == ["fail", "not judged"]
    assert report.exit_code == ExitCode.REGRESSION


def one_segment(scheme: str, growth: float) -> MetricResult:
    return a_finding(scheme, "wikitext", PERPLEXITY, [2.0 + growth])


ONE_SEGMENT = (one_segment("fp16", 0), one_segment("w6a6", 0.01))
SAME_TEXT = (wikitext("fp16", 0), wikitext("w6a6", 0))
ONE_PERCENT_WORSE = (wikitext("fp16", 0), wikitext("w6a6", 0.01, scatter=0.02))
NOT_FINITE = replace(wikitext("w6a6", 0), value=None, values=(), detail="the perplexity is nan")
AGREEMENT = a_finding("w6a6", "wikitext", "top1_agreement", [0.95] * 80, direction="higher")
TOP1 = '[agreement]\ntext = "wikitext"\ntop1 = 0.9\n'
LOWER_IS_BETTER = {"direction": "lower"}
TEN_QUESTIONS = [1.0] * 6 + [0.0] * 4
NO_INTERVAL = "one segment has no interval: evaluate more tokens"
PASS, REGRESSION = ExitCode.PASS, ExitCode.REGRESSION
AMBIGUOUS, MISSING = ExitCode.AMBIGUOUS, ExitCode.MISSING


@pytest.mark.parametrize(
    ("limits", "results", "code", "reason"),
    [
        (text_limit("increase = 0.2"), ONE_PERCENT_WORSE, PASS, ""),  # 1 % of 12.18
        (text_limit("increase = 0.1"), ONE_PERCENT_WORSE, REGRESSION, ""),
        (text_limit("percent = 1.1"), ONE_PERCENT_WORSE, PASS, ""),
        (text_limit("percent = 0.9"), ONE_PERCENT_WORSE, REGRESSION, ""),
        (text_limit("upper_percent = 2.5"), ONE_PERCENT_WORSE, PASS, ""),
        (text_limit("upper_percent = 0.9"), ONE_PERCENT_WORSE, REGRESSION, ""),
        # the estimate itself is below
        (text_limit("upper_percent = 1.2"), ONE_PERCENT_WORSE, AMBIGUOUS, "may have grown"),
        (text_limit("at_most = 12"), ONE_PERCENT_WORSE, REGRESSION, ""),  # it is 12.31
        (text_limit("at_most = 13"), ONE_PERCENT_WORSE, PASS, ""),
        (text_limit("percent = 1.1\nincrease = 0.1"), ONE_PERCENT_WORSE, REGRESSION, ""),
        (
            text_limit("upper_percent = 5"),
            (wikitext("fp16", 0), wikitext("w6a6", 0.001, scatter=0.02)),
            *(PASS, "smaller than its interval"),
        ),
        (
            text_limit("upper_percent = 1"),
            (wikitext("fp16", 0), wikitext("w6a6", -0.01, scatter=0.2)),
            *(AMBIGUOUS, "may have grown by .*: more tokens are needed"),
        ),
        (text_limit("upper_percent = 5"), ONE_SEGMENT, AMBIGUOUS, NO_INTERVAL),
        (text_limit("percent = 5"), ONE_SEGMENT, PASS, ""),
        (text_limit("percent = 5"), (*SAME_TEXT[:1], NOT_FINITE), REGRESSION, "the perplexity is"),
        (text_limit("percent = 5"), SAME_TEXT[:1], MISSING, "no result arrived"),
        (KL_ROWS + "mean = 0.02\n", (*SAME_TEXT, kl(0.01)), PASS, ""),
        (KL_ROWS + "mean = 0.02\n", (*SAME_TEXT, kl(0.03)), REGRESSION, ""),
        (KL_ROWS + "mean = 0.02\n", (*SAME_TEXT, kl(0.019, 0.01)), AMBIGUOUS, ""),
        (
            KL_ROWS + "mean = 0.02\n",
            (*ONE_SEGMENT, a_finding("w6a6", "wikitext", "kl_divergence", [0.01])),
            *(AMBIGUOUS, NO_INTERVAL),
        ),
        (
            KL_ROWS + "p999 = 0.2\n",
            (*SAME_TEXT, replace(statistic("kl_p999", 0.1, 0.1, 0.1), n_items=620)),
            *(MISSING, "needs 1,000 tokens, has 620"),
        ),
        (TOP1, (*SAME_TEXT, AGREEMENT), PASS, ""),
        (TOP1.replace("0.9", "0.97"), (*SAME_TEXT, AGREEMENT), REGRESSION, ""),
        (
            *(TOP1, (*ONE_SEGMENT, replace(AGREEMENT, values=AGREEMENT.values[:1]))),
            *(AMBIGUOUS, NO_INTERVAL),
        ),
        (
            PLANNED + text_limit("percent = 2"),
            (wikitext("fp16", 0), wikitext("w6a6", 0.002, scatter=0.1)),
            *(MISSING, "needs [0-9,]+ tokens, has 80, of which 80 show a loss"),
        ),
        (TASK, (piqa("fp16"), piqa("w6a6")), PASS, ""),
        (TASK, (piqa("fp16"), piqa("w6a6", won=12)), PASS, ""),
        # one point, but it may be three
        (TASK, (piqa("fp16"), piqa("w6a6", lost=2)), AMBIGUOUS, "may be worse"),
        (TASK, (piqa("fp16"), piqa("w6a6", lost=12)), REGRESSION, ""),
        (
            TASK,
            (piqa("fp16", **LOWER_IS_BETTER), piqa("w6a6", lost=12, **LOWER_IS_BETTER)),
            *(PASS, ""),
        ),
        (
            TASK,
            (piqa("fp16", **LOWER_IS_BETTER), piqa("w6a6", won=12, **LOWER_IS_BETTER)),
            *(REGRESSION, ""),
        ),
        (
            TASK.replace("acc", "f1"),
            (piqa("fp16"), piqa("w6a6")),
            *(MISSING, "piqa has no f1: there are acc"),
        ),
        (
            PLANNED + TASK,
            [a_finding(scheme, "piqa", "acc", TEN_QUESTIONS) for scheme in ("fp16", "w6a6")],
            *(MISSING, "needs [0-9,]+ questions for 2 points, has 10"),
        ),
        (
            PLANNED + TASK.replace("2", "20"),
            (piqa("fp16"), piqa("w6a6", lost=2, won=2)),
            *(PASS, ""),
        ),
        (
            PLANNED + TASK.replace("2", "20"),
            (piqa("fp16"), piqa("w6a6", lost=20)),
            *(REGRESSION, "20 questions lost"),
        ),
    ],
)
def test_each_limit_is_judged(gate, limits, results, code, reason):
    report = gate(limits, *results)

    assert report.exit_code == code
    assert re.match(reason, report.judged[0].reason)
