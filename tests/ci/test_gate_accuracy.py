"""The accuracy gate's rules, on findings that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ci.accuracy_policy import load_accuracy_policy
from ci.gate_accuracy import AccuracyReport, gate_accuracy
from db.records import CommitInfo, DeviceInfo
from flexq_bench.accuracy.errors import MissingTaskError
from flexq_bench.accuracy.records import Origin
from flexq_bench.accuracy.results import PERPLEXITY, MetricResult
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
    """gate("[[perplexity]]…", finding, …): the report where these were found."""

    def run(limits: str, *findings: MetricResult | Exception, missing=None) -> AccuracyReport:
        path = tmp_path / "mine.toml"
        path.write_text(HEAD + limits)

        def evaluate(scheme: str, task: str) -> list[MetricResult]:
            for error in (f for f in findings if isinstance(f, Exception)):
                if task == "piqa":
                    raise error
            made = [f for f in findings if isinstance(f, MetricResult)]
            return [f for f in made if (f.scheme, f.task) == (scheme, task)]

        tasks = ("wikitext", "piqa")
        units = tuple((scheme, task) for scheme in ("fp16", "w6a6") for task in tasks)
        evaluator = SimpleNamespace(
            evaluate=evaluate, parameters=lambda *unit: {}, through="reference"
        )
        origin = Origin(
            model="made",
            model_hash="cd",
            seed=0,
            run=new_run("accuracy", "gate", ()),
            commit=CommitInfo("0" * 40, None, 1, False),
            device=DeviceInfo("CPU-1", "A CPU", "cpu"),
            environment={},
        )
        setup = SimpleNamespace(
            plan=SimpleNamespace(units=units), evaluator=evaluator, origin=origin
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
        ("upper_percent = 1.2", ExitCode.REGRESSION),  # the estimate itself is below
        ("percent = 1.1\nincrease = 0.1", ExitCode.REGRESSION),
    ],
)
def test_each_limit_of_a_perplexity_counts(gate, limit, code):
    report = gate(text_limit(limit), wikitext("fp16", 0), wikitext("w6a6", 0.01, scatter=0.02))
    assert report.exit_code == code


def test_a_change_smaller_than_its_interval_is_called_that(gate):
    limit = text_limit("upper_percent = 5")
    report = gate(limit, wikitext("fp16", 0), wikitext("w6a6", 0.001, scatter=0.02))
    assert report.judged[0].reason == "smaller than its interval"


def test_one_segment_has_no_interval_and_decides_nothing(gate):
    short = [
        a_finding(scheme, "wikitext", PERPLEXITY, [2.0 + grown])
        for scheme, grown in (("fp16", 0), ("w6a6", 0.01))
    ]
    assert gate(text_limit("upper_percent = 5"), *short).exit_code == ExitCode.AMBIGUOUS
    assert gate(text_limit("percent = 5"), *short).exit_code == ExitCode.PASS


def test_a_model_that_blows_up_is_a_regression(gate):
    broken = replace(wikitext("w6a6", 0), value=None, values=(), detail="the perplexity is nan")
    report = gate(text_limit("percent = 5"), wikitext("fp16", 0), broken)
    assert report.exit_code == ExitCode.REGRESSION
    assert report.judged[0].reason == "the perplexity is nan"


def test_what_never_arrived_is_missing(gate):
    report = gate(text_limit("percent = 5"), wikitext("fp16", 0))
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].reason == "no result arrived"


def test_a_text_that_nobody_gave_is_missing_with_the_reason(gate):
    missing = {"wikitext": "no text: give --data wikitext=FILE"}
    report = gate(text_limit("percent = 5"), missing=missing)
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].reason == missing["wikitext"]


@pytest.mark.parametrize(
    ("lost", "won", "code"),
    [
        (0, 0, ExitCode.PASS),
        (0, 12, ExitCode.PASS),
        (2, 0, ExitCode.AMBIGUOUS),  # one point, but it may be three
        (12, 0, ExitCode.REGRESSION),
    ],
)
def test_a_task_may_not_be_worse_than_the_margin(gate, lost, won, code):
    assert gate(TASK, piqa("fp16"), piqa("w6a6", lost=lost, won=won)).exit_code == code


def test_where_lower_is_better_the_margin_is_the_other_way(gate):
    before, after = (
        piqa(scheme, lost=lost, direction="lower") for scheme, lost in (("fp16", 0), ("w6a6", 12))
    )
    assert gate(TASK, before, after).exit_code == ExitCode.PASS
    worse = piqa("w6a6", won=12, direction="lower")
    assert gate(TASK, before, worse).exit_code == ExitCode.REGRESSION


def test_a_task_that_can_not_be_evaluated_here_is_missing(gate):
    report = gate(TASK, MissingTaskError("tasks need lm_eval"))
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].reason == "tasks need lm_eval"


def test_a_metric_that_a_task_lacks_is_missing_and_names_those_there_are(gate):
    report = gate(TASK.replace("acc", "f1"), piqa("fp16"), piqa("w6a6"))
    assert report.exit_code == ExitCode.MISSING
    assert report.judged[0].reason == "piqa has no f1: there are acc"


def test_missing_comes_before_a_regression(gate):
    report = gate(text_limit("percent = 1") + TASK, wikitext("fp16", 0), wikitext("w6a6", 0.5))
    assert [one.outcome for one in report.judged] == ["regression", "missing"]
    assert report.exit_code == ExitCode.MISSING
