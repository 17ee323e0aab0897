"""Three questions that the demo's pages answer, with the numbers that its database has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_content import OpenPage, table, words
from sqlalchemy import text

from flexq_bench.cli.demo import demo_database
from flexq_bench.db.engine import open_database


@pytest.fixture(scope="module")
def unpacked() -> Iterator[Path]:
    with demo_database() as path:
        yield path


@pytest.fixture
def demo(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's database, as that of the app."""
    monkeypatch.setenv("FLEXQ_BENCH_DB", str(unpacked))
    return unpacked


def rows(path: Path, query: str) -> list[Any]:
    with open_database(str(path), read_only=True) as database, database.session() as session:
        return list(session.execute(text(query)))


def test_home_names_what_got_slower_by_how_much_and_whose_commit(demo: Path, open_home: OpenPage):
    alerts = rows(
        demo,
        'SELECT alert.id, max(decision.log_ratio), "commit".subject, "commit".author FROM alert '
        "JOIN decision ON decision.alert_id = alert.id "
        'JOIN "commit" ON alert.bad_commit_id = "commit".id '
        "WHERE alert.state IN ('new', 'acknowledged') GROUP BY alert.id",
    )

    app = open_home()

    shown = words(app) + "".join(
        link.proto.label.replace("\\", "") for link in app.get("page_link")
    )
    assert alerts
    for number, worst, subject, author in alerts:
        assert f"Alert {number}: " in shown
        if worst is not None:
            assert f"{100 * math.expm1(worst):+.2f} %" in shown
        assert f"{subject} ({author})" in shown


def test_fastest_kernel_of_a_layer_within_a_class(demo: Path, open_leaderboard: OpenPage):
    place = {"gpu": "NVIDIA H200", "model": "llama-2-13b", "layer": "down_proj", "m": "8"}
    app = open_leaderboard(**place, **{"class": "6"})

    newest = rows(
        demo,
        "SELECT series.kernel, measurement.median_us, max(measurement.created_at) "
        "FROM measurement JOIN series ON measurement.series_id = series.id "
        "WHERE series.gpu = 'NVIDIA H200' AND m = 8 AND n = 5120 AND k = 13824 "
        "AND stage = 'gemm' AND cache = 'cold' AND metric = 'time' AND accepted "
        "AND variant = '' AND weight_bits >= 6 AND act_bits >= 6 AND kernel NOT LIKE 'read-%' "
        "GROUP BY series.id ORDER BY measurement.median_us",
    )

    shown = table(app, of="rank")
    assert [(r.label, r.median_us) for r in shown.itertuples()] == [tuple(n[:2]) for n in newest]
    assert "(SmolLM2" in words(app)  # the model that the class's loss was measured on


def test_checkpoint_to_ship_for_one_percent(demo: Path, open_ship: OpenPage):
    gates = dict(
        rows(
            demo,
            "SELECT scheme, verdict FROM accuracy_gate WHERE model = 'tiny-llama' "
            "AND content_hash IS NOT NULL ORDER BY created_at",
        )
    )
    times = dict(
        rows(
            demo,
            "SELECT scheme, token_ms FROM decode_result WHERE model = 'tiny-llama' "
            "ORDER BY created_at",
        )
    )

    shown = table(open_ship(model="tiny-llama", loss="1.0"), of="rank")

    chosen = [row for row in shown.itertuples() if row.scheme != "fp16"]
    assert chosen
    for row in chosen:
        assert gates[row.scheme] == "pass"
        assert row.token_ms == times[row.scheme]
        assert row.high <= 1.0
    assert [row.token_ms for row in chosen] == sorted(row.token_ms for row in chosen)
    assert "fp16" in shown["scheme"].tolist()
