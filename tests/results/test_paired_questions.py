"""Verdicts of imported results by question."""

from __future__ import annotations

import json

import pytest

from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo
from flexq_bench.exchange.external.formats import read_results
from flexq_bench.exchange.external.importing import store_readings
from flexq_bench.exchange.external.records import Origin
from flexq_bench.results.paired_questions import paired_verdicts

QUESTIONS = 200


def a_file(folder, number, right, *, questions="q"):
    """lm-eval's results with samples; right: whether each question was answered right."""
    at = f"2026-03-0{number}T10-00-00.000000"
    share = sum(right) / len(right)
    content = {
        "results": {"arc": {"acc,none": share, "acc_stderr,none": 0.03}},
        "configs": {"arc": {}},
        "higher_is_better": {"arc": {"acc": True}},
        "date": 1772359200 + 86400 * number,
    }
    path = folder / f"results_{at}.json"
    path.write_text(json.dumps(content))
    rows = (
        {"doc_id": place, "doc_hash": f"{questions}{place}", "filter": "none", "acc": float(value)}
        for place, value in enumerate(right)
    )
    (folder / f"samples_arc_{at}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def verdicts_of(tmp_path, *files):
    """Import files, one per commit, and judge by question."""
    series = set()
    with open_database(str(tmp_path / "db.sqlite")) as database:
        for number, path in enumerate(files, start=1):
            origin = Origin("acme", CommitInfo(str(number) * 40, None, None, dirty=False))
            readings = read_results("lm-eval", path)
            done = store_readings(
                database, readings, origin, lambda commits: {one.sha: one for one in commits}
            )
            assert done.has_questions
            series |= done.series
        with database.session() as session:
            return paired_verdicts(session, series)


BASE = [place % 4 > 0 for place in range(QUESTIONS)]


@pytest.mark.parametrize(
    ("flipped", "verdict", "lost", "won"),
    [
        (range(1, 40, 4), "worse", 10, 0),  # 5 points: within the error of the score itself
        (range(0, 40, 4), "better", 0, 10),
        (range(6), "no clear difference", 4, 2),
    ],
)
def test_change_is_judged_by_the_questions_that_flipped(tmp_path, flipped, verdict, lost, won):
    head = [value != (place in flipped) for place, value in enumerate(BASE)]

    (judged,) = verdicts_of(tmp_path, a_file(tmp_path, 1, BASE), a_file(tmp_path, 2, head))

    assert (judged.verdict, judged.lost, judged.won) == (verdict, lost, won)
    assert (judged.base, judged.head) == ("1" * 40, "2" * 40)
    assert judged.difference.estimate == pytest.approx((won - lost) / QUESTIONS)


def test_other_questions_are_not_compared(tmp_path):
    files = [a_file(tmp_path, 1, BASE), a_file(tmp_path, 2, BASE, questions="other")]

    assert verdicts_of(tmp_path, *files) == []
