"""Every page on every kind of database."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_models import a_decode, a_gate, a_score, a_serving
from made_results import (
    ACME,
    COMMIT,
    a_record,
    a_run,
    attention,
    counts,
    of_another_tool,
    records_of,
)
from page_content import OpenPage, rows_of_file, words
from sqlalchemy import text

from flexq_bench.ci.history_alerts import judge_histories
from flexq_bench.db.store import add_records

PAGES = (
    *("accuracy", "alert", "compare", "decode", "engines", "fleet", "history", "home", "kernels"),
    *("leaderboard", "measurement", "paper", "pareto", "results", "ship", "sweep", "triage"),
)
CPU = {"backend": "cpu", "gpu": "A CPU"}
UNNAMED = {"model": "", "n": 256, "k": 256, "layer": "256x256"}  # a shape of no model


def _unmeasured(store: Any) -> None:
    plan = ("flexq-w6a6 gemm cold m1n4096k4096", "flexq-w6a6 gemm cold m8n4096k4096")
    store.declare(a_run(status="interrupted", plan=plan))


def _nightly(store: Any) -> None:
    for night in range(1, 4):
        at = f"2025-11-{night:02d}T22:00:00+00:00"
        run = a_run(f"night {night}", suite="nightly", trigger="nightly", created_at=at)
        commit = replace(COMMIT, sha=f"{night}" * 40, topo_order=night)
        store.add(*records_of(run, commit=commit, created_at=at))


def _serving_benchmarks(store: Any) -> None:
    metrics = {"throughput": ("req/s", "higher"), "median_ttft": ("ms", "lower")}
    for name, (unit, direction) in metrics.items():
        changes = {"kernel": "chat", "metric": name, "unit": unit, "direction": direction}
        for value, sha in ((40.0, "1" * 40), (41.0, "2" * 40)):
            run = a_run(f"{name} {value}", suite="import", trigger="import")
            changes |= {"commit": replace(COMMIT, project="acme", sha=sha)}
            store.add(a_record(run, **of_another_tool(**changes, median_us=value)))


def _engine_gates(store: Any) -> None:
    run = a_run("served", suite="served")
    store.keep(*(a_gate(f"engine {v}", v, run=run, base="vllm") for v in ("pass", "regression")))


def _counts(store: Any) -> None:
    """Registers, some of them zero, which nothing ran for."""
    static = {"backend": "static", "cache": "", "unit": "count", "regime": None, "floor_us": None}
    for metric, value in (("registers", 168.0), ("spills", 0.0)):
        store.add(a_record(a_run(metric), metric=metric, median_us=value, **static))


def _judged_imports(store: Any, *, alerting: bool) -> None:
    with store.session() as session:
        add_records(session, counts([0, 0, 0, 5]))
        judge_histories(session, alerting=alerting)


def _huge_outliers(store: Any) -> None:
    for night, time_us in enumerate((8.0, 8.1, 9e11, 1e-9, 8.0)):
        run = a_run(f"n{night}", created_at=f"2025-11-0{night + 1}T22:00:00+00:00")
        commit = replace(COMMIT, sha=f"{night}" * 40, topo_order=night)
        store.add(
            a_record(
                run, commit=commit, median_us=time_us, floor_us=None, created_at=run.created_at
            )
        )
    store.keep(a_score("fp16"), a_score("w2a2", value=1e30), a_decode("fp16", token_ms=1e9))


def _branches(store: Any) -> None:
    for name in ("main", "gone/away"):
        commit = replace(COMMIT, sha=f"{len(name)}" * 40, branch=name, topo_order=None)
        store.add(*records_of(a_run(name), commit=commit))
    with store.session() as session:
        session.execute(text("UPDATE branch SET closed_at = '2025-11-22' WHERE name = 'gone/away'"))


def _projects(store: Any, names: Iterable[str]) -> None:
    store.add(
        *(
            a_record(a_run(name), kernel=f"{name}.k", commit=replace(COMMIT, project=name),
                     project=name, uuid=f"{i:032x}")
            for i, name in enumerate(names)
        )
    )  # fmt: skip


def _unicode(store: Any) -> None:
    name = "ядро-日本 <b>*x*</b> 🚀"
    commit = replace(COMMIT, project=name, subject=name, author=name, branch=name)
    names = {"kernel": name, "model": name, "layer": name, "gpu": name, "detail": name}
    store.add(a_record(a_run(name, suite=name), **names, commit=commit, project=name))
    store.keep(a_score(name, model=name), a_gate(name, "regression", model=name))


KINDS: dict[str, Callable[[Any], object]] = {
    "empty": lambda store: None,
    "imports only": lambda store: store.add(a_record(a_run("tool"), **of_another_tool())),
    "CPU only": lambda store: store.add(*records_of(a_run("cpu"), **CPU)),
    "CPU nights": lambda store: store.add(*records_of(a_run("c", trigger="nightly"), **CPU)),
    "own kernels only": lambda store: store.add(
        a_record(a_run("own"), kernel="my.kernel", **UNNAMED, **ACME),
        a_record(a_run("own"), kernel="cublaslt-w8a8", **UNNAMED, **ACME),
    ),
    "one run": lambda store: store.add(*records_of()),
    "one sweep": lambda store: store.add(*records_of(a_run("s", suite="sweep", trigger="sweep"))),
    "nothing accepted": lambda store: store.add(a_record(status="incorrect", median_us=None)),
    "an unmeasured plan": _unmeasured,
    "other operations": lambda store: store.add(
        *(attention(context, floor_us=None) for context in (1024, 8192))
    ),
    "nights": _nightly,
    "decodes only": lambda store: store.keep(a_decode("fp16"), a_decode("flexq-w6ax")),
    "serving benchmarks": _serving_benchmarks,
    "served models": lambda store: store.keep(a_serving("fp16", 8, 100.0)),
    "engine gates": _engine_gates,
    "one value": lambda store: store.add(a_record()),
    "zeros": lambda store: store.add(a_record(a_run("zero"), **of_another_tool(), median_us=0.0)),
    "counts": _counts,
    "imports with an alert": lambda store: _judged_imports(store, alerting=True),
    "imports judged without alerts": lambda store: _judged_imports(store, alerting=False),
    "huge outliers": _huge_outliers,
    "a deleted branch": _branches,
    "two projects": lambda store: _projects(store, ("", "acme")),
    "200 projects": lambda store: _projects(store, map("p{}".format, range(200))),
    "names in any script": _unicode,
    "scores only": lambda store: store.keep(a_score("fp16"), a_score("w4a4")),
    "accuracy gates only": lambda store: store.keep(a_gate("w4a4"), a_gate("w6a8", "missing")),
    "scores and accuracy gates": lambda store: store.keep(
        a_score("fp16"), a_gate("w4a4", "regression")
    ),
}


# What pages say, and an SQL query of rows that would make it false.
FALSIFIED_BY = {
    "No project has a result": "SELECT 1 FROM series",
    "No recent verdict of a night or gate": "SELECT 1 FROM decision WHERE watched",
    "No alert was ever opened": "SELECT 1 FROM alert",
    "No alert is open": "SELECT 1 FROM alert WHERE state IN ('new', 'acknowledged')",
    "Every accuracy gate passed": "SELECT 1 FROM accuracy_gate WHERE verdict != 'pass'",
    "No scheduled run is broken": "SELECT 1 FROM run WHERE trigger = 'nightly' AND status IN "
    "('failed', 'interrupted')",
    "no night or gate compared commits lately": "SELECT 1 FROM decision WHERE watched",
    "no accuracy gate was run": "SELECT 1 FROM accuracy_gate",
    "o run was scheduled": "SELECT 1 FROM run WHERE trigger = 'nightly'",
    "No run of a suite is stored": "SELECT 1 FROM run JOIN measurement ON run_id = run.id "
    "WHERE trigger = 'manual' AND suite NOT IN ('sweep', 'decode', 'accuracy', 'served')",
    "No model was evaluated yet": "SELECT 1 FROM accuracy_result",
    "No model was evaluated or decoded": "SELECT 1 FROM accuracy_result UNION SELECT 1 FROM "
    "decode_result",
    "No checkpoint was evaluated or decoded yet": "SELECT 1 FROM accuracy_result WHERE "
    "content_hash IS NOT NULL",
    "No model was decoded yet": "SELECT 1 FROM decode_result UNION SELECT 1 FROM serving_result",
    "No engine was compared yet": "SELECT 1 FROM accuracy_gate JOIN run ON run_id = run.id WHERE "
    "suite = 'served'",
    "No sweep was requested": "SELECT 1 FROM request",
    "No worker is alive": "SELECT 1 FROM worker",
    "No device is stored yet": "SELECT 1 FROM device",
    "no branch is known": "SELECT 1 FROM branch JOIN series USING (project)",
    "No release is stored": 'SELECT 1 FROM "release"',
}


def open_every_page(store: Any, open_page: OpenPage) -> None:
    """Open each page; no sentence that it says of the database may be false."""
    for page in PAGES:
        shown = words(open_page(page))
        for sentence, query in FALSIFIED_BY.items():
            if sentence in shown:
                assert rows_of_file(store.path, query) == [], f"{page}: {sentence}"


# Each takes seconds: variations of kinds above are slow tests.
SLOW = {
    *("one value", "zeros", "huge outliers", "a deleted branch", "two projects", "200 projects"),
    *("names in any script", "scores only", "accuracy gates only", "served models"),
    *("CPU nights", "one run", "one sweep", "nothing accepted", "decodes only"),
    *("counts", "own kernels only", "imports judged without alerts"),
}
MARKED = [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS]


def test_sentences_that_are_checked_are_of_pages():
    pages = Path(__file__).parents[2] / "dashboard"
    source = "".join(path.read_text("utf-8") for path in pages.rglob("*.py"))

    assert [sentence for sentence in FALSIFIED_BY if sentence not in source] == []


@pytest.mark.parametrize("kind", MARKED)
def test_every_page_of_every_kind_of_database_is_true(store, open_page, kind):
    KINDS[kind](store)

    open_every_page(store, open_page)


@pytest.mark.parametrize("alerting", [True, False])
def test_every_page_of_stored_gates_is_true(store, open_page, compared, commits, alerting):
    wrong = compared("abq-w6a6", correct=False)
    store.judge(compared("flexq-w6a6", 1.05), wrong, commits=commits, alerting=alerting)

    open_every_page(store, open_page)
