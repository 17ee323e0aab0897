"""Decisions of gates on the Accuracy page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from made_models import a_gate, a_score
from made_results import COMMIT
from page_content import table_rows

from flexq_bench.db.records import GateRecord
from flexq_bench.db.releases import store_releases

LATER = replace(COMMIT, sha="d" * 40, topo_order=9)
EVIL = "<img src=x onerror=alert(1)> **bold** [a](javascript:alert(1))"


@pytest.fixture
def keep(store: Any) -> Callable[..., None]:
    """Stores gates, of a model that was evaluated."""

    def kept(*gates: GateRecord) -> None:
        store.keep(a_score("fp16"))
        store.keep(*gates)

    return kept


def test_without_one_it_says_how_to_run_a_gate(keep, open_accuracy):
    keep()

    text = " ".join(str(caption.value) for caption in open_accuracy().caption)

    assert "gate accuracy --model DIR" in text


def test_newest_verdict_is_first_with_its_deciding_limit(keep, open_accuracy, store):
    later = {"commit": LATER, "created_at": "2025-11-22T10:00:05+00:00"}
    keep(a_gate("flexq-w6ax"), a_gate("w4a4", "regression", **later))
    with store.session() as session:
        store_releases(session, {"v1.0": LATER.sha})

    rows = table_rows(open_accuracy(), of="verdict")

    assert [(row["release or commit"], row["verdict"]) for row in rows] == [
        ("v1.0", "✗ regression"),
        (COMMIT.sha[:10], "✓ pass"),
    ]
    assert rows[0]["decided by"] == "perplexity of wikitext: +0.50 % (+0.40 to +0.60)"
    assert (rows[0]["policy"], rows[0]["exit code"]) == ("default, version 1, efefefef", 1)


def test_the_link_of_a_row_leads_to_its_limits(keep, open_accuracy):
    keep(a_gate("flexq-w6ax"), a_gate("w4a4", "regression", created_at="2025-11-22T10:00:05+00:00"))
    older = table_rows(open_accuracy(), of="verdict")[1]
    path, _, query = older["limits"].partition("?")

    app = open_accuracy(**dict(part.split("=") for part in query.split("&")))

    assert path == "accuracy"
    (limit,) = table_rows(app, of="outcome")
    assert (limit["outcome"], limit["limit"], limit["flexq-w6ax"]) == ("✓ pass", "≤ +1 %", 12.06)


def test_a_worse_limit_decides_over_those_that_pass(keep, open_accuracy):
    (passed,) = a_gate("w6a6").limits
    lost = replace(passed, check="parity of kernels", outcome="missing", reason="no text",
                   change=None, low=None, high=None, value=None)  # fmt: skip
    keep(a_gate("w6a6", "missing", limits=(passed, lost)))

    (row,) = table_rows(open_accuracy(), of="verdict")

    assert row["decided by"] == "parity of kernels: no text"


def test_a_gate_without_limits_has_none_to_show(keep, open_accuracy):
    keep(a_gate("w6a6", limits=()))

    (row,) = table_rows(open_accuracy(), of="verdict")

    assert row["decided by"] == ""


def test_what_a_policy_says_is_shown_as_text(keep, open_accuracy):
    keep(a_gate("w6a6", policy=EVIL, base=EVIL))

    app = open_accuracy()

    assert EVIL in table_rows(app, of="verdict")[0]["policy"]
    texts = [text for part in (*app.caption, *app.markdown) if "img" in (text := str(part.value))]
    assert texts
    assert all(f"`{EVIL}`" in text for text in texts)  # code, in which nothing formats or runs
