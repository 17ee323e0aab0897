"""The page that says which checkpoint to ship."""

from __future__ import annotations

from typing import Any

import pytest
from made_models import a_decode, a_gate, a_score, worse
from page_content import table, words

MODEL = "SmolLM2-135M"
HASHES = {"flexq-w6ax": "1a" * 32, "w4a16": "2b" * 32, "w8a16": "3c" * 32}


def keep(store: Any, scheme: str, loss: float, ms: float | None, gate: str | None) -> None:
    """Store the score, decode and gate of a checkpoint; None: it has none."""
    of = {"content_hash": HASHES[scheme]}
    store.keep(a_score(scheme, **worse(loss), **of))
    if ms is not None:
        store.keep(a_decode(scheme, 1, ms, model=MODEL, weights="a folder", case=scheme, **of))
    if gate is not None:
        store.keep(a_gate(scheme, gate, **of))


@pytest.fixture
def base(store):
    store.keep(a_score("fp16"), a_decode("fp16", 1, 5.0, model=MODEL, weights="a folder"))
    return store


def excluded(app: Any) -> dict[str, str]:
    return table(app, of="next").set_index("scheme")["reasons"].to_dict()


def test_fastest_checkpoint_whose_gate_passes_is_first(base, open_ship):
    keep(base, "flexq-w6ax", 0.004, 2.0, "pass")
    keep(base, "w8a16", 0.001, 3.0, "pass")
    keep(base, "w4a16", 0.002, 1.0, "regression")

    app = open_ship()

    rows = table(app, of="rank")
    assert rows["scheme"].tolist() == ["flexq-w6ax", "w8a16", "fp16"]
    assert rows["token_ms"].tolist() == [2.0, 3.0, 5.0]
    assert "flexq-w6ax: 2.000 ms a token" in words(app).replace("*", "")
    assert excluded(app)["w4a16"].startswith("its gate says regression")


def test_loss_above_the_tolerated_one_excludes(base, open_ship):
    keep(base, "flexq-w6ax", 0.03, 2.0, "pass")

    assert "loses 3.00 %" in excluded(open_ship())["flexq-w6ax"]
    assert table(open_ship(loss="5.0"), of="rank")["scheme"].tolist() == ["flexq-w6ax", "fp16"]


def test_gap_has_the_command_that_fills_it(base, open_ship):
    keep(base, "flexq-w6ax", 0.001, None, "pass")
    keep(base, "w8a16", 0.001, 3.0, None)

    rows = table(open_ship(), of="next").set_index("scheme")

    assert rows.loc["flexq-w6ax", "reasons"] == "not decoded here"
    assert "decode FOLDER" in rows.loc["flexq-w6ax", "next"]
    assert rows.loc["w8a16", "reasons"] == "no gate judged it"
    assert "gate accuracy" in rows.loc["w8a16", "next"]


def test_memory_is_another_order(base, open_ship):
    keep(base, "flexq-w6ax", 0.001, 2.0, "pass")

    assert table(open_ship(by="memory_gib"), of="rank")["scheme"].tolist()[0] == "flexq-w6ax"


def test_schemes_with_times_alone_are_listed_with_their_gap(store, open_ship):
    store.keep(*(a_decode(scheme, 1, 2.0, model="llama-13b") for scheme in ("fp16", "flexq-w6ax")))

    rows = table(open_ship(), of="next").set_index("scheme")

    assert "its loss is not known" in rows.loc["flexq-w6ax", "reasons"]
    assert "accuracy --model DIR" in rows.loc["flexq-w6ax", "next"]
