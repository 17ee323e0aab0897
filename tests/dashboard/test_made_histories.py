"""Random histories: every number that pages show is what SQL says of the same rows, and every
interval covers the level that the history was made with."""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from made_history import KERNELS, made, names, noise_of, records, results
from page_content import chart, table

from flexq_bench.dashboard.views.compare.frame import compare_frame, mean_rows, pairs_of_runs
from flexq_bench.dashboard.views.leaderboard.frame import leaderboard_frame
from flexq_bench.db.releases import store_releases
from flexq_bench.results.latest_rows import latest_rows
from flexq_bench.results.scoreboard import board_rows, case_changes
from flexq_bench.verdicts import Verdict

SEEDS = (1, 3)
CHANGED = (Verdict.SLOWER, Verdict.FASTER)


@pytest.fixture(params=[SEEDS[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SEEDS[1:])])
def history(store, request):
    """A history in a database, a release in its middle, and a connection for SQL alone."""
    history = made(request.param)
    store.add(*records(history))
    with store.session() as session:
        store_releases(session, {"v1": history.sha(history.nights // 2)})
    connection = sqlite3.connect(store.path)
    yield history, connection
    connection.close()


def mean_ratio(connection, kernel, order):
    """exp of the mean of ln(latest / then) over a kernel's series, by SQL and nothing else; past:
    the newest at this place of the ancestry or before it."""
    query = """
        SELECT exp(avg(ln(now.median_us / past.median_us)))
        FROM series s
        JOIN measurement now ON now.series_id = s.id AND now.created_at =
            (SELECT max(created_at) FROM measurement WHERE series_id = s.id)
        JOIN measurement past ON past.series_id = s.id AND past.created_at =
            (SELECT max(m.created_at) FROM measurement m JOIN "commit" c ON m.commit_id = c.id
             WHERE m.series_id = s.id AND c.topo_order <= ?)
        WHERE s.kernel = ?
    """
    return connection.execute(query, (order, kernel)).fetchone()[0]


def test_scoreboard_equals_sql(history, open_home):
    history, connection = history

    shown = table(open_home(), of="last week").set_index("kernel")

    for kernel in KERNELS:
        row = shown.loc[kernel]
        week = 100 * (mean_ratio(connection, kernel, history.nights - 7) - 1)
        release = 100 * (mean_ratio(connection, kernel, history.nights // 2 + 1) - 1)
        assert row["last week"] == pytest.approx(week, abs=0.005)
        assert row["release"] == pytest.approx(release, abs=0.005)
        assert row["cases"] == row["compared"] == 4


LATEST = """
    SELECT s.kernel, s.m, s.n, s.k, m.median_us, m.floor_us, base.median_us
    FROM series s
    JOIN measurement m ON m.series_id = s.id AND m.created_at =
        (SELECT max(created_at) FROM measurement WHERE series_id = s.id)
    JOIN series b ON b.kernel = 'cublaslt-w8a8' AND b.m = s.m AND b.n = s.n AND b.k = s.k
    JOIN measurement base ON base.series_id = b.id AND base.run_id = m.run_id
"""


def test_heat_map_and_roofline_equal_sql(history, open_kernels):
    _, connection = history
    rows = connection.execute(LATEST).fetchall()

    cells = {}
    for trace, m in zip(
        [t for t in chart(open_kernels(view="heat map"))["data"] if t["type"] == "heatmap"],
        (1, 8),
        strict=True,
    ):
        for kernel, line in zip(trace["y"], trace["text"], strict=True):
            for layer, text in zip(trace["x"], line, strict=True):
                cells[kernel, m, layer] = float(text.partition("<br>")[0])
    drawn = sorted(
        value
        for trace in chart(open_kernels())["data"]
        if trace.get("name") in KERNELS
        for value in trace["y"]
    )

    layers = {4096: "llama-7b o_proj", 11008: "llama-7b down_proj"}
    expected = {
        (kernel, m, layers[k]): base / median
        for kernel, m, _, k, median, _, base in rows
        if kernel != KERNELS[0]
    }
    assert cells == {key: pytest.approx(value, abs=0.0051) for key, value in expected.items()}
    reach = sorted(2 * m * n * k / median / 1e6 for _, m, n, k, median, _, _ in rows)
    assert drawn == pytest.approx(reach, rel=1e-9)


def test_leaderboard_equals_sql(history, open_leaderboard):
    _, connection = history
    query = f"{LATEST} WHERE s.m = 8 AND s.k = 11008 ORDER BY m.median_us"
    rows = connection.execute(query).fetchall()

    shown = table(open_leaderboard(model="llama-7b", layer="down_proj", m="8"), of="rank")

    assert shown["label"].tolist() == [row[0] for row in rows]
    assert shown["median_us"].tolist() == pytest.approx([row[4] for row in rows])
    assert shown["pct_of_floor"].tolist() == pytest.approx([100 * r[5] / r[4] for r in rows])
    tops = [2e-6 * m * n * k / median for _, m, n, k, median, _, _ in rows]
    assert shown["tops"].tolist() == pytest.approx(tops)
    read = [n * k * 6 / 8 / median / 1e3 for _, _, n, k, median, _, _ in rows]
    assert shown["gb_s"].tolist() == pytest.approx(read)
    assert shown["slower"].tolist() == pytest.approx([row[4] / rows[0][4] for row in rows])


def test_comparison_of_runs_equals_sql(history, open_compare):
    history, connection = history
    query = """
        SELECT s.kernel, s.m, s.k, head.median_us / base.median_us
        FROM series s
        JOIN measurement base ON base.series_id = s.id
        JOIN measurement head ON head.series_id = s.id
        JOIN run b ON base.run_id = b.id JOIN run h ON head.run_id = h.id
        WHERE b.uuid = ? AND h.uuid = ?
    """
    sides = [history.run(night).uuid for night in (0, history.nights - 1)]
    ratios = {row[:3]: row[3] for row in connection.execute(query, sides)}

    app = open_compare(base_runs=sides[0][:8], head_runs=sides[1][:8])

    rows = table(app, of="change")
    shown = {
        (row["label"], row["m"], row["k"]): 1 + row["change"] / 100
        for row in rows.to_dict("records")
    }
    assert shown == {key: pytest.approx(value) for key, value in ratios.items()}
    means = table(app, of="cases").set_index("label")["ratio"]
    for kernel in KERNELS:
        of_kernel = [math.log(value) for key, value in ratios.items() if key[0] == kernel]
        assert means[kernel] == pytest.approx(math.exp(np.mean(of_kernel)))


def covers(low: float, truth: float, high: float) -> bool:
    return low <= truth <= high


def hits(seed: int) -> Iterator[tuple[str, bool]]:
    """Yield for every interval of the four pages its kind, and whether it covers the true value."""
    history, last = made(seed), -1
    noise, known = noise_of(history), names(made(seed))
    truth = history.levels[last]
    week, release = history.levels[history.nights - 8], history.levels[history.nights // 2]
    for row in board_rows(known, noise, release_order=history.nights // 2 + 1):
        cases = list(row.series)
        for kind, change, then in (("week", row.week, week), ("release", row.release, release)):
            assert change is not None
            expected = math.exp(np.mean(np.log(truth[cases] / then[cases])))
            yield f"scoreboard {kind}", covers(change.ratio.low, expected, change.ratio.high)
    for case in case_changes(known, noise):
        expected = truth[case.series.id] / week[case.series.id]
        yield "scoreboard case", covers(case.change.ratio.low, expected, case.change.ratio.high)
    newest = results(history, history.nights - 1)
    rows = latest_rows(newest, newest, KERNELS[0], noise)
    cases_of_baseline = {
        series[1:]: i for i, series in enumerate(history.series) if series[0] == KERNELS[0]
    }
    for latest in rows:
        i = latest.result.series_id
        assert latest.level_us is not None
        assert latest.pct_of_floor is not None
        assert latest.speedup is not None
        share, speedup = latest.pct_of_floor, latest.speedup
        yield "kernels share", covers(share.low, 100 * history.floors[i] / truth[i], share.high)
        if history.series[i][0] != KERNELS[0]:
            expected = truth[cases_of_baseline[history.series[i][1:]]] / truth[i]
            yield "kernels speed-up", covers(speedup.low, expected, speedup.high)
    board = leaderboard_frame([row for row in rows if row.result.m == 1], noise)
    levels = {(row.result.uuid): truth[row.result.series_id] for row in rows}
    for row in board.to_dict("records"):
        expected = levels[row["samples"].partition("=")[2].replace("+", " ")]
        yield "leaderboard", covers(row["level_low"], expected, row["level_high"])
    sides = (history.nights - 8, history.nights - 1)
    frame = compare_frame(pairs_of_runs(*(results(history, night) for night in sides), noise))
    for row in frame.to_dict("records"):
        i, j = int(row["base_series"]), int(row["head_series"])
        expected = truth[j] / week[i]
        yield "compare", covers(row["ratio_low"], expected, row["ratio_high"])
        yield "compare base", covers(row["base_us_low"], week[i], row["base_us_high"])
        yield "compare head", covers(row["head_us_low"], truth[j], row["head_us_high"])
    for row in mean_rows(frame, noise).to_dict("records"):
        series = [i for i, (kernel, *_) in enumerate(history.series) if kernel == row["label"]]
        expected = math.exp(np.mean(np.log(truth[series] / week[series])))
        yield "compare mean", covers(row["ratio_low"], expected, row["ratio_high"])


def coverage(seeds: range) -> dict[str, float]:
    hits_by_kind = defaultdict(list)
    for seed in seeds:
        for kind, hit in hits(seed):
            hits_by_kind[kind].append(hit)
    return {kind: float(np.mean(of_kind)) for kind, of_kind in hits_by_kind.items()}


@pytest.mark.slow
def test_intervals_cover_the_truth_in_a_few_histories():
    assert {kind: c for kind, c in coverage(range(40)).items() if c < 0.9} == {}


def test_changed_cases_are_those_of_all_cases_with_a_change():
    found = set()
    for seed in range(12):
        noise, known = noise_of(made(seed)), names(made(seed))
        changed = case_changes(known, noise, verdicts=CHANGED)
        found |= {case.change.verdict for case in changed}
        assert changed == [c for c in case_changes(known, noise) if c.change.verdict in CHANGED]
    assert found == {Verdict.SLOWER}  # the kernels get slower


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 40 s of a processor, on a machine that may do other things too
def test_intervals_cover_the_truth_in_a_thousand_histories():
    assert {kind: c for kind, c in coverage(range(1000)).items() if c < 0.93} == {}


def test_runs_within_noise_are_rarely_slower_or_faster():
    called = []
    for seed in range(1, 90):
        if seed % 3 == 0:
            continue  # these have a step
        history, noise = made(seed), noise_of(made(seed))
        sides = (results(history, night) for night in (history.nights - 2, history.nights - 1))
        frame = compare_frame(pairs_of_runs(*sides, noise))
        called += [verdict in ("slower", "faster") for verdict in frame["verdict"]]

    assert np.mean(called) < 0.01
