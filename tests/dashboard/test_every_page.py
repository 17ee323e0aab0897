"""Every page on every kind of database."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from made_models import a_decode, a_gate, a_score
from made_results import COMMIT, a_record, a_run, records_of

PAGES = (
    *("accuracy", "alert", "compare", "decode", "engines", "fleet", "history", "home", "kernels"),
    *("leaderboard", "measurement", "paper", "pareto", "results", "ship", "sweep", "triage"),
)
CPU = {"backend": "cpu", "gpu": "A CPU"}
UNNAMED = {"model": "", "n": 256, "k": 256, "layer": "256x256"}  # a shape of no model
ACME = {"commit": replace(COMMIT, project="acme"), "project": "acme"}


def _of_another_tool(**changes: Any) -> dict[str, Any]:
    return {
        "kernel": "requests",
        "backend": "outside",
        "stage": "",
        "cache": "",
        "regime": None,
        "metric": "throughput",
        "unit": "req/s",
        "direction": "higher",
        "weight_bits": 0,
        "act_bits": 0,
        "operation": "",
        "parameters": "",
        **ACME,
        **dict.fromkeys("mnk"),
    } | changes


def _attention(context: int) -> dict[str, Any]:
    parameters = f"batch=1 context={context} heads=32"
    return {
        "kernel": "sdpa",
        "operation": "attention_decode",
        "parameters": parameters,
        "stage": "op",
        "floor_us": None,
        "model": "",
        "layer": "",
        "uuid": f"{context:032x}",
        **dict.fromkeys("mnk"),
    }


def _unmeasured(store: Any) -> None:
    plan = ("flexq-w6a6 gemm cold m1n4096k4096", "flexq-w6a6 gemm cold m8n4096k4096")
    store.declare(a_run(status="interrupted", plan=plan))


def _nightly(store: Any) -> None:
    for night in range(1, 4):
        at = f"2025-11-{night:02d}T22:00:00+00:00"
        run = a_run(f"night {night}", suite="nightly", trigger="nightly", created_at=at)
        commit = replace(COMMIT, sha=f"{night}" * 40, topo_order=night)
        store.add(*records_of(run, commit=commit, created_at=at))


KINDS: dict[str, Callable[[Any], object]] = {
    "empty": lambda store: None,
    "imports only": lambda store: store.add(a_record(a_run("tool"), **_of_another_tool())),
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
        *(a_record(**_attention(context)) for context in (1024, 8192))
    ),
    "nights": _nightly,
    "decodes only": lambda store: store.keep(a_decode("fp16"), a_decode("flexq-w6ax")),
    "scores and accuracy gates": lambda store: store.keep(
        a_score("fp16"), a_gate("w4a4", "regression")
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_of_every_kind_of_database_opens(store, open_page, kind):
    KINDS[kind](store)

    for page in PAGES:
        open_page(page)


@pytest.mark.parametrize("alerting", [True, False])
def test_every_page_of_stored_gates_opens(store, open_page, compared, commits, alerting):
    wrong = compared("abq-w6a6", correct=False)
    store.judge(compared("flexq-w6a6", 1.05), wrong, commits=commits, alerting=alerting)

    for page in PAGES:
        open_page(page)
