"""The accuracy gate's rules, on findings that are made up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexq_bench.accuracy.errors import MissingTaskError
from flexq_bench.accuracy.records import ResultOrigin
from flexq_bench.accuracy.results import PERPLEXITY, MetricResult
from flexq_bench.ci.accuracy_gate.checks import judge_fidelity
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport, gate_accuracy
from flexq_bench.ci.accuracy_gate.policy import FidelityLimit, load_accuracy_policy
from flexq_bench.ci.accuracy_gate.results import SchemeResults
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.ci.reports.accuracy import notes
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.exit_codes import ExitCode
from flexq_bench.runs.lifecycle import new_run

HEAD = 'version = 1\nschemes = ["w6a6"]\n'
NLL = np.linspace(2.0, 3.0, 20)
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
            evaluate=evaluate,
            parameters=lambda *unit: {},
            through="reference",
            reference=None,
            context=32,
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
                units=units, reference=None, checkpoint=None, texts=(), schemes=("w6a6",)
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


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("increase = 0.2", ExitCode.PASS),  # 1 % of 12.18
        ("increase = 0.1", ExitCode.REGRESSION),
        ("percent = 1.1", ExitCode.PASS),
        ("percent = 0.9", ExitCode.REGRESSION),
        ("upper_percent = 2.5", ExitCode.PASS),
        ("upper_percent = 0.9", ExitCode.REGRESSION),
        ("upper_percent = 1.2", ExitCode.AMBIGUOUS),  # the estimate itself is below
        ("at_most = 12", ExitCode.REGRESSION),  # it is 12.31
        ("at_most = 13", ExitCode.PASS),
        ("percent = 1.1\nincrease = 0.1", ExitCode.REGRESSION),
    ],
)
def test_each_perplexity_limit_counts(gate, limit, code):
    report = gate(text_limit(limit), wikitext("fp16", 0), wikitext("w6a6", 0.01, scatter=0.02))
    assert report.exit_code == code


def test_change_within_its_interval_is_reported_as_such(gate):
    limit = text_limit("upper_percent = 5")
    report = gate(limit, wikitext("fp16", 0), wikitext("w6a6", 0.001, scatter=0.02))
    assert report.judged[0].reason == "smaller than its interval"


def test_one_segment_is_ambiguous(gate):
    short = [
        a_finding(scheme, "wikitext", PERPLEXITY, [2.0 + grown])
        for scheme, grown in (("fp16", 0), ("w6a6", 0.01))
    ]
    assert gate(text_limit("upper_percent = 5"), *short).exit_code == ExitCode.AMBIGUOUS
    assert gate(text_limit("percent = 5"), *short).exit_code == ExitCode.PASS


def test_noisy_improvement_passes(gate):
    found = wikitext("fp16", 0), wikitext("w6a6", -0.01, scatter=0.2)
    report = gate(text_limit("upper_percent = 1"), *found)
    assert report.judged[0].change < 0
    assert report.exit_code == ExitCode.AMBIGUOUS
    assert "more tokens are needed" in report.judged[0].reason


def test_detectable_loss_is_reported(gate):
    found = wikitext("fp16", 0), wikitext("w6a6", 0.001, scatter=0.02)
    (judged,) = gate(text_limit("percent = 5"), *found).judged
    # 4.31 standard errors, of 20 segments that scatter by 2.05 %, less 3.2 for their own scatter
    assert judged.detectable == pytest.approx(100 * 4.31 * 0.0205 / 16.8**0.5, rel=0.02)


KL_ROWS = '[kl]\ntext = "wikitext"\n'


def kl(value: float, scatter: float = 0.0, **changes: Any) -> MetricResult:
    values = value + scatter * np.resize([1, -1], NLL.size)
    return a_finding("w6a6", "wikitext", "kl_divergence", values, direction="lower", **changes)


def statistic(metric: str, value: float, low: float, high: float, **changes: Any) -> MetricResult:
    observed = {"low": low, "high": high}
    made = a_finding("w6a6", "wikitext", metric, [value], observed=observed, n_items=5000)
    return replace(made, values=(), **changes)


@pytest.mark.parametrize(
    ("mean", "scatter", "code"),
    [
        (0.01, 0.0, ExitCode.PASS),
        (0.03, 0.0, ExitCode.REGRESSION),
        (0.019, 0.01, ExitCode.AMBIGUOUS),
    ],
)
def test_mean_divergence_is_limited(gate, mean, scatter, code):
    found = wikitext("fp16", 0), wikitext("w6a6", 0), kl(mean, scatter)
    assert gate(KL_ROWS + "mean = 0.02\n", *found).exit_code == code


@pytest.mark.parametrize(
    ("limit", "metric", "value", "direction"),
    [
        (KL_ROWS + "mean = 0.02\n", "kl_divergence", 0.01, "lower"),
        ('[agreement]\ntext = "wikitext"\ntop1 = 0.9\n', "top1_agreement", 0.95, "higher"),
    ],
)
def test_divergence_of_one_segment_is_ambiguous(gate, limit, metric, value, direction):
    short = [a_finding(scheme, "wikitext", PERPLEXITY, [2.0]) for scheme in ("fp16", "w6a6")]
    report = gate(
        limit, *short, a_finding("w6a6", "wikitext", metric, [value], direction=direction)
    )
    assert report.exit_code == ExitCode.AMBIGUOUS
    assert report.judged[0].reason == "one segment has no interval: evaluate more tokens"


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


def test_quantile_with_too_few_tokens_is_missing(gate):
    few = replace(statistic("kl_p999", 0.1, 0.1, 0.1), n_items=620)
    report = gate(KL_ROWS + "p999 = 0.2\n", wikitext("fp16", 0), wikitext("w6a6", 0), few)
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].reason.startswith("needs 1,000 tokens, has 620")


@pytest.mark.parametrize(("least", "code"), [(0.9, ExitCode.PASS), (0.97, ExitCode.REGRESSION)])
def test_agreement_has_a_lower_limit(gate, least, code):
    shares = [0.95] * 20
    top = a_finding("w6a6", "wikitext", "top1_agreement", shares, direction="higher")
    limit = f'[agreement]\ntext = "wikitext"\ntop1 = {least}\n'
    assert gate(limit, wikitext("fp16", 0), wikitext("w6a6", 0), top).exit_code == code


PLANNED = "detect = 1.0\npower = 0.95\nalpha = 0.01\n"


def test_planned_test_detects_the_planned_loss(gate):
    limits = PLANNED + text_limit("percent = 2")
    for growth, code in ((0.01, ExitCode.REGRESSION), (0.0, ExitCode.PASS)):
        found = wikitext("fp16", 0), wikitext("w6a6", growth, scatter=0.004)
        report = gate(limits, *found)
        assert report.exit_code == code
        assert report.judged[0].detectable == pytest.approx(1.0)


def test_too_few_tokens_for_a_planned_test_are_missing(gate):
    found = wikitext("fp16", 0), wikitext("w6a6", 0.002, scatter=0.1)
    report = gate(PLANNED + text_limit("percent = 2"), *found)
    assert report.exit_code == ExitCode.MISSING
    assert re.match(r"needs [0-9,]+ tokens, has 20, which show a loss", report.judged[0].reason)


def test_regression_decides_although_another_limit_lacks_data(gate):
    found = wikitext("fp16", 0), wikitext("w6a6", 0.002, scatter=0.1), kl(0.03)
    report = gate(PLANNED + text_limit("percent = 2") + KL_ROWS + "mean = 0.02\n", *found)
    assert [one.outcome for one in report.judged] == ["missing", "regression"]
    assert report.exit_code == ExitCode.REGRESSION


def test_limits_share_alpha_and_noise_is_ambiguous(gate):
    """Half is the perplexity's, half that of the mean and of the maximum; fidelity has none."""
    limits = PLANNED + text_limit("percent = 2") + KL_ROWS + "mean = 0.02\nmax = 9\n"
    limits += '[fidelity]\ntext = "wikitext"\npercent = 1\nkl_percent = 8\n'
    found = wikitext("fp16", 0), wikitext("w6a6", 0.0001, scatter=0.001)
    # 20 segments that scatter by 0.004: a standard error of 0.0009, t of 1/400 at one end is 3.2
    for mean, outcome in ((0.0225, "ambiguous"), (0.0245, "regression")):
        judged = gate(limits, *found, kl(mean, 0.004)).judged
        of_kl = next(one for one in judged if one.check == "KL mean of wikitext")
        assert of_kl.outcome == outcome, of_kl
    assert "alpha 0.5 %" in judged[0].reason


@pytest.mark.parametrize(
    ("mean", "outcome"), [(0.0025, "regression"), (0.00235, "ambiguous"), (0.00214, "pass")]
)
def test_fidelity_uses_95_percent_intervals_at_any_alpha(mean, outcome):
    """Damage of few tokens: 20 segments that scatter by 0.00085, so the difference by 0.0002."""
    own = {"wikitext": [kl(0.002)]}
    judged = SchemeResults("w6a6", "fp16", [kl(mean, 0.00085)], {}, own=own)
    limit = FidelityLimit(text="wikitext", percent=1, kl_percent=8)
    assert judge_fidelity(limit, judged)[1].outcome == outcome


def test_task_with_ten_questions_is_missing(gate):
    made = [a_finding(scheme, "piqa", "acc", [1.0] * 6 + [0.0] * 4) for scheme in ("fp16", "w6a6")]
    report = gate(PLANNED + TASK, *made)
    assert report.exit_code == ExitCode.MISSING
    assert re.match(r"needs [0-9,]+ questions for 2 points, has 10", report.judged[0].reason)


def test_planned_task_is_judged_by_mcnemars_test(gate):
    limits = PLANNED + TASK.replace("2", "20")
    assert gate(limits, piqa("fp16"), piqa("w6a6", lost=2, won=2)).exit_code == ExitCode.PASS
    assert gate(limits, piqa("fp16"), piqa("w6a6", lost=20)).exit_code == ExitCode.REGRESSION


def test_infinite_perplexity_is_a_regression(gate):
    broken = replace(wikitext("w6a6", 0), value=None, values=(), detail="the perplexity is nan")
    report = gate(text_limit("percent = 5"), wikitext("fp16", 0), broken)
    assert report.exit_code == ExitCode.REGRESSION
    assert report.judged[0].reason == "the perplexity is nan"


def test_absent_result_is_missing(gate):
    report = gate(text_limit("percent = 5"), wikitext("fp16", 0))
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].reason == "no result arrived"


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
    assert report.judged[0].outcome is GateOutcome.MISSING


@pytest.mark.parametrize(
    ("lost", "won", "code"),
    [
        (0, 0, ExitCode.PASS),
        (0, 12, ExitCode.PASS),
        (2, 0, ExitCode.AMBIGUOUS),  # one point, but it may be three
        (12, 0, ExitCode.REGRESSION),
    ],
)
def test_task_worse_than_the_margin_fails(gate, lost, won, code):
    assert gate(TASK, piqa("fp16"), piqa("w6a6", lost=lost, won=won)).exit_code == code


def test_margin_is_reversed_if_lower_is_better(gate):
    before, after = (
        piqa(scheme, lost=lost, direction="lower") for scheme, lost in (("fp16", 0), ("w6a6", 12))
    )
    assert gate(TASK, before, after).exit_code == ExitCode.PASS
    worse = piqa("w6a6", won=12, direction="lower")
    assert gate(TASK, before, worse).exit_code == ExitCode.REGRESSION


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


def test_unknown_metric_of_a_task_lists_known_ones(gate):
    report = gate(TASK.replace("acc", "f1"), piqa("fp16"), piqa("w6a6"))
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].reason == "piqa has no f1: there are acc"


def test_missing_result_outweighs_a_regression(gate):
    report = gate(text_limit("percent = 1") + TASK, wikitext("fp16", 0), wikitext("w6a6", 0.5))
    assert [one.outcome for one in report.judged] == ["regression", "missing"]
    assert report.exit_code == ExitCode.MISSING
