"""Accuracy classes on the Leaderboard page."""

from __future__ import annotations

import pytest
from made_models import a_score, worse
from made_results import a_record
from page_content import table, words

from flexq_bench.dashboard.views.leaderboard.frame import accuracy_class

TIMES = {"atom-w4a4": (4, 4, 5.0), "flexq-w6a6": (6, 6, 8.0), "fp6-w6a16": (6, 16, 9.0),
         "cublaslt-w8a8": (8, 8, 12.0)}  # fmt: skip


@pytest.fixture
def formats(store):
    for kernel, (weight, act, median) in TIMES.items():
        bits = {"weight_bits": weight, "act_bits": act}
        store.add(a_record(kernel=kernel, median_us=median, **bits))
    return store


@pytest.mark.parametrize(("bits", "of"), [((6, 16), 6), ((4, 8), 4), ((16, 16), 16), ((8, 0), 8)])
def test_class_is_the_narrower_operand(bits, of):
    assert accuracy_class(*bits) == of


def test_kernels_are_ranked_within_their_class(formats, open_leaderboard):
    rows = table(open_leaderboard(), of="rank").set_index("label")

    assert rows["in_class"].to_dict() == {
        "atom-w4a4": 1, "flexq-w6a6": 1, "fp6-w6a16": 2, "cublaslt-w8a8": 1,
    }  # fmt: skip
    assert rows.loc["fp6-w6a16", "format"] == "w6a16"


def test_class_of_the_link_leaves_narrower_formats_out(formats, open_leaderboard):
    app = open_leaderboard(**{"class": "6"})

    assert table(app, of="rank")["label"].tolist()[0] == "flexq-w6a6"
    assert "flexq-w6a6 is fastest" in words(app).replace("*", "")


def test_loss_of_a_class_names_its_model(formats, open_leaderboard):
    formats.keep(a_score("fp16"), a_score("flexq-w6ax", **worse(0.01)), a_score("w4a4"))

    assert "6 bits: flexq-w6ax +1.00 % (SmolLM2-135M)" in words(open_leaderboard())
