"""Search, and what every page has in common."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import pytest
from made_results import COMMIT, a_record, a_run

from flexq_bench.dashboard.shared.search import search
from flexq_bench.db.engine import open_database


@pytest.fixture
def database(filled):
    commit = replace(COMMIT, sha="abcdef12" + "0" * 32, topo_order=9, subject="Faster unpacking")
    filled.add(a_record(a_run("other"), commit=commit, variant="vanilla"))
    with open_database(str(filled.path)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("text", "words", "address"),
    [
        ("vanilla", "kernel flexq-w6a6[vanilla]", "kernels?kernel=flexq-w6a6"),
        ("llama-2-70", "model llama-2-70b", "leaderboard?model=llama-2-70b"),
        ("4096 x 11008", "shape 4096 × 11008", "history?shape=4096x11008"),
        ("unpack", "commit abcdef1200 Faster unpacking", "head-commits=abcdef1200"),
        ("abcdef", "commit abcdef1200 Faster unpacking", "head-commits=abcdef1200"),
        (a_run("other").uuid[:8], f"run {a_run('other').uuid[:8]}", "results?run="),
    ],
)
def test_search_hit_leads_to_its_page(database, text, words, address):
    (hit,) = [hit for hit in search(database, text) if hit.words.startswith(words)]

    assert address in hit.address


def test_words_of_a_layer_lead_to_its_leaderboard(database):
    (hit, *_) = search(database, "7b down_proj m=8 h200")

    assert hit.words == "layer llama-7b down_proj, M = 8, NVIDIA H200, fastest kernels"
    link = parse_qs(urlsplit(hit.address).query)
    assert link == {"gpu": ["NVIDIA H200"], "model": ["llama-7b"], "layer": ["down_proj"],
                    "m": ["8"]}  # fmt: skip


@pytest.mark.parametrize("text", ["7b down_proj m=9", "7b down_proj h100", "7b no_proj m=8"])
def test_layer_that_was_not_timed_so_is_not_found(database, text):
    assert search(database, text) == []


@pytest.mark.parametrize("text", ["", "x", "nothing-like-it", "%", "';--", "9 x 9"])
def test_search_of_unknown_text_finds_nothing(database, text):
    assert search(database, text) == []


def test_every_page_has_the_field(filled, open_app):
    app = open_app()

    (field,) = [box for box in app.text_input if box.label == "Search"]
    app = field.set_value("cublaslt").run()

    assert not app.exception
    assert any("kernels?kernel=cublaslt" in link.value for link in app.sidebar.markdown)
