"""The tour: a stranger's way from an empty folder to an alert."""

from __future__ import annotations

import pytest

from flexq_bench.cli import tour
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tour_ends_with_a_comment_and_an_alert(tmp_path, cli):
    ran = cli("tour", str(tmp_path / "tour"))

    assert ran.code == 0, ran.err
    root = tmp_path / "tour"
    assert "slower" in (root / "gate.md").read_text()
    with open_database(str(root / "tour.sqlite")) as database, database.session() as session:
        (alert,) = queries.alerts(session)
    assert alert.bad.subject == "Multiply twice"
    assert alert.kernels == ("tour.my-w8a16",)
    assert ran.out.count("  $ ") <= 12


def test_folder_that_exists_is_refused(tmp_path, cli):
    (tmp_path / "tour").mkdir()

    assert cli("tour", str(tmp_path / "tour")).code == 2


def test_gate_that_passes_ends_the_tour_with_an_error(tmp_path, cli, monkeypatch):
    def ran(out, *words, expected=(0,)):
        if words[0] == "init":
            (tmp_path / "tour" / "bench").mkdir()
        return 0

    monkeypatch.setattr(tour, "_run", ran)

    assert cli("tour", str(tmp_path / "tour")).code == 5
