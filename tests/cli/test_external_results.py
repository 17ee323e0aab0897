"""Results of other tools: stored, and judged by history alone."""

from __future__ import annotations

import json
import random
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.store import add_records
from flexq_bench.exchange.exports.formats import EXPORTS
from flexq_bench.exchange.external.formats import read_results
from flexq_bench.exchange.external.records import Origin, external_records

PROJECT = "their/kernels"
OTHER = "elsewhere-gemms"
OF_P = ("--format", "csv", "--project", "p", "--commit", "b" * 40)


def an_nvbench_file(us, name="gemm-w6a8"):
    def summary(tag, kind, value):
        return {"tag": tag, "data": [{"name": "value", "type": kind, "value": str(value)}]}

    state = {
        "name": "Device=0 M=1",
        "device": 0,
        "axis_values": [{"name": "M", "type": "int64", "value": "1", "input_string": "1"}],
        "summaries": [
            summary("nv/cold/sample_size", "int64", 499),
            summary("nv/cold/time/gpu/mean", "float64", us * 1e-6),
            summary("nv/cold/time/gpu/stdev/relative", "float64", 0.01),
        ],
        "is_skipped": False,
    }
    return {
        "meta": {"version": {"nvbench": {"string": "0.3.0"}}},
        "devices": [{"id": 0, "name": "NVIDIA H200"}],
        "benchmarks": [{"name": name, "devices": [0], "axes": None, "states": [state]}],
    }


@pytest.fixture
def history(cli, tmp_path, database):
    """history([20.0, 21.0]): nvbench files of these times, at commits 1, 2, …

    The last one is imported by the command line, those before it by the library: that is faster.
    """

    def give(times, *, first=1):
        *earlier, last = enumerate(times, start=first)
        records = []
        for order, us in earlier:
            commit = CommitInfo(f"{order:040x}", None, None, dirty=False, project=PROJECT)
            path = tmp_path / f"{order}.json"
            path.write_text(json.dumps(an_nvbench_file(us)))
            at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=order)
            (reading,) = read_results("nvbench", str(path))
            origin = Origin(PROJECT, commit, time=at.isoformat())
            records += external_records(reading, origin)[0]
        with open_database(str(database)) as opened, opened.session() as session:
            add_records(session, records)
        order, us = last
        path = tmp_path / f"{order}.json"
        path.write_text(json.dumps(an_nvbench_file(us)))
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=order)
        ran = cli(
            *("db", "import", "--format", "nvbench", "--project", PROJECT),
            *("--commit", f"{order:040x}", "--time", at.isoformat(), str(path)),
        )
        assert ran.code == 0, ran.err
        return ran

    return give


def steady(n, level=20.0, seed=0):
    noise = random.Random(seed)
    return [level * (1 + 0.002 * noise.gauss(0, 1)) for _ in range(n)]


def test_step_in_nvbench_results_opens_alert_by_history_alone(cli, history, database):
    ran = history([*steady(30), *steady(8, 21.0, seed=1)])

    rows = json.loads(cli("alerts", "list", "--json").out)
    assert [(row["family"], row["bad"]["sha"]) for row in rows] == [
        (f"{PROJECT}/gemm", f"{31:040x}")
    ]
    assert "judged by history alone" in ran.out
    explained = cli("explain", str(rows[0]["id"]))
    assert explained.code == 0
    assert "by history alone, no interleaved comparison confirms it" in explained.out
    assert "flexq_bench bisect" not in explained.out
    detected = cli("detect", "1")
    assert "1 change point" in detected.out
    assert "by history alone" in detected.out


def test_alert_closes_when_level_comes_back(cli, history):
    history([*steady(30), *steady(6, 21.5, seed=1)])
    history(steady(6, 20.0, seed=2), first=37)

    (row,) = json.loads(cli("alerts", "list", "--state", "all", "--json").out)
    assert row["state"] == "fixed"
    assert row["note"].endswith("by history alone")


@pytest.fixture
def give(cli, tmp_path):
    """give([0, 5], unit="spills"): a CSV file of each value, at commits 1, 2, …; runs of import."""

    def run(values, *, first=1, benchmark="gemm", metric="spills", unit="spills", better="lower"):
        ran = []
        for order, value in enumerate(values, start=first):
            path = tmp_path / f"{benchmark}-{order}.csv"
            path.write_text(
                "benchmark,value,metric,unit,direction\n"
                f"{benchmark},{value},{metric},{unit},{better}\n"
            )
            at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=order)
            options = ("--commit", f"{order:040x}", "--time", at.isoformat(), "--device", "G")
            ran.append(
                cli("db", "import", "--format", "csv", "--project", "p", *options, str(path))
            )
            assert ran[-1].code == 0, ran[-1].err
        return ran

    return run


def alerts(cli):
    return json.loads(cli("alerts", "list", "--state", "all", "--json").out)


def test_count_that_leaves_zero_opens_alert_in_levels(cli, give):
    *_, last = give([0, 0, 0, 5])

    (row,) = alerts(cli)
    assert (row["state"], row["levels"], row["worst"]) == ("new", [0, 5, "spills"], None)
    assert "opened alert 1" in last.out
    for arguments in (("alerts", "list"), ("explain", "1"), ("detect", "1")):
        shown = cli(*arguments)
        assert shown.code == 0
        assert "0 -> 5 spills" in shown.out
        assert "%" not in shown.out


def test_count_that_is_back_closes_its_alert_with_the_level(cli, give):
    *_, last = give([0, 0, 0, 5, 0])

    (row,) = alerts(cli)
    assert row["state"] == "fixed"
    assert "alert 1 is fixed: every series is back at the earlier level of 0 spills" in last.out
    assert row["note"] in cli("explain", "1").out


def test_stated_count_that_leaves_zero_opens_alert(cli, give):
    give([0, 0, 0, 5], metric="gadgets", unit="gadgets [count]")

    (row,) = alerts(cli)
    assert row["levels"][:2] == [0, 5]
    shown = cli("explain", "1").out
    assert "0 -> 5 gadgets" in shown
    assert "[count]" not in shown


def test_counts_survive_export_and_import(cli, give, tmp_path):
    give([0, 0, 0, -5], metric="accuracy", unit="points", better="higher")
    out, other = str(tmp_path / "out.jsonl"), str(tmp_path / "other.sqlite")

    assert cli("db", "export", out).code == 0
    assert cli("db", "import", out, "--db", other).code == 0

    with open_database(other) as opened, opened.session() as session:
        values = [point.median_us for point in queries.series_history(session, 1)]
    assert values == [0, 0, 0, -5]


@pytest.mark.parametrize(("unit", "value"), [("GB/s", 0), ("ns", -1)])
def test_rate_or_time_of_zero_is_refused(cli, tmp_path, unit, value):
    path = tmp_path / "a.csv"
    path.write_text(f"benchmark,value,metric,unit,direction\ngemm,{value},m,{unit},lower\n")

    ran = cli("db", "import", *OF_P, str(path))

    assert ran.code == 2
    assert f"its value is {value}, and times and rates are above 0" in ran.err


def test_other_unit_of_a_quantity_continues_its_series(cli, give):
    rate = {"metric": "bandwidth", "better": "higher"}
    give([100.0, 100.2, 99.9, 100.1, 99.8] * 6, unit="GB/s", **rate)
    give([80_000, 80_100, 79_900], first=31, unit="MB/s", **rate)

    (series,) = json.loads(cli("list", "series", "--json").out)
    assert (series["unit"], series["measurements"]) == ("GB/s", 33)
    (row,) = alerts(cli)
    assert row["bad"]["sha"] == f"{31:040x}"
    assert "80 from here on" in cli("explain", "1").out


@pytest.mark.parametrize(
    ("unit", "better", "reason"),
    [
        ("GB/s", "lower", "what is better was reversed"),
        ("frames", "higher", "its unit changed, and can't be converted"),
    ],
)
def test_series_that_can_not_go_on_is_named(cli, give, unit, better, reason):
    give([100.0] * 3, metric="bandwidth", unit="GB/s", better="higher")
    first, second = give([80.0] * 2, first=4, metric="bandwidth", unit=unit, better=better)

    expected = f"series 2 is not compared with series 1 of the same benchmark ({reason})"
    assert expected in first.err
    assert f"100 GB/s (higher is better) at {3:040x}"[:30] in first.err
    assert expected not in second.err
    for series in ("1", "2"):
        assert expected in cli("detect", series).out
    lines = cli("list", "series").out
    assert unit in lines
    assert better in lines


def test_improvement_opens_no_alert(cli, history):
    history([*steady(16), *steady(6, 18.0, seed=1)])

    assert json.loads(cli("alerts", "list", "--state", "all", "--json").out) == []


def test_second_import_of_file_changes_nothing(cli, history, tmp_path, database):
    history(steady(3))
    again = cli(
        *("db", "import", "--format", "nvbench", "--project", PROJECT),
        *("--commit", f"{3:040x}", str(tmp_path / "3.json")),
    )
    cli("db", "export", str(tmp_path / "out.jsonl"))
    cli("db", "import", str(tmp_path / "out.jsonl"), "--db", str(tmp_path / "other.sqlite"))

    assert "0 of 1 results are new" in again.out
    for path in (database, tmp_path / "other.sqlite"):
        with open_database(str(path)) as opened, opened.session() as session:
            (series,) = queries.project_series(session)
            assert (series.project, series.kernel) == (PROJECT, "gemm-w6a8")
            assert len(queries.series_history(session, series.id)) == 3


def test_invalid_results_are_named_and_others_stored(cli, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("benchmark,value\ngood,1\nbad,-1\n")

    ran = cli("db", "import", *OF_P, str(path))

    assert ran.code == 2
    assert "1 of 1 results are new" in ran.out
    assert "refused row 3: -1 µs is not a plausible time" in ran.err


def test_results_from_the_future_store_no_file(cli, tmp_path, database):
    paths = []
    for year in (2026, 9999):
        benchmark = {"name": "gemm", "run_type": "iteration", "real_time": 1, "time_unit": "us"}
        context = {"date": f"{year}-01-01T00:00:00+00:00"}
        paths.append(tmp_path / f"{year}.json")
        paths[-1].write_text(json.dumps({"context": context, "benchmarks": [benchmark]}))
    options = ("--format", "google-benchmark", "--project", "p", "--commit", "b" * 40)

    ran = cli("db", "import", *options, *map(str, paths))

    assert ran.code == 2
    assert "9999.json: its time is 9999-01-01T00:00:00+00:00, in the future" in ran.error
    assert not database.exists()
    assert cli("db", "import", *options, str(paths[0])).code == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((*OF_P, "--time", "9999-01-01"), "--time is 9999-01-01T00:00:00+00:00, in the future"),
        (("--format", "csv"), "--project NAME with --format"),
        (("--format", "csv", "--project", "p"), "names no commits: give --commit SHA"),
        (("--format", "svg", "--project", "p", "--commit", "a" * 40), "no format 'svg'"),
        (("--format", "csv", "--project", "a b", "--commit", "a" * 40), "--project 'a b'"),
        (("--format", "csv", "--project", "p", "--commit", "; rm"), "no hexadecimal sha"),
        ((*OF_P, "--device", "a\nb"), "a name without control characters"),
        (("--project", "p"), "give --format, too"),
        (("--no-alert",), "--no-alert is of results of other tools"),
        (OF_P, "a.csv has no results: did its tool run?"),
    ],
)
def test_invalid_import_options_are_usage_errors(cli, tmp_path, options, says):
    path = tmp_path / "a.csv"
    path.write_text("benchmark,value\n" + ("" if says.startswith("a.csv") else "gemm,1\n"))

    ran = cli("db", "import", *options, str(path))

    assert ran.code == 2
    assert says in ran.error


def test_repository_orders_imported_commits(cli, tmp_path, database, git):
    clone = tmp_path / "clone"
    clone.mkdir()
    git(clone, "init", "-q")
    shas = []
    for subject in ("first", "second"):
        git(clone, "commit", "-q", "--allow-empty", "-m", subject)
        shas.append(git(clone, "rev-parse", "HEAD"))
    path = tmp_path / "a.csv"
    for value, revision in ((2, "HEAD"), (1, "HEAD~1")):
        path.write_text(f"benchmark,value\ngemm,{value}\n")
        ran = cli(
            *("db", "import", "--format", "csv", "--project", "p", "--commit", revision),
            *("--repository", str(clone), str(path)),
        )
        assert ran.code == 0, ran.err

    with open_database(str(database)) as opened, opened.session() as session:
        (series,) = queries.project_series(session)
        history = queries.series_history(session, series.id)
        listed = queries.recent_commits(session, limit=5)
    assert [(p.commit, p.median_us) for p in history] == [(shas[0], 1.0), (shas[1], 2.0)]
    assert listed == []  # commits of others are not offered beside ours


def test_abbreviated_commit_matches_stored_commit_or_warns(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no repository tells more
    Path("a.csv").write_text("benchmark,value\ngemm,1\n")

    def imported(commit):
        project = ("--format", "csv", "--project", "p", "--commit", commit)
        ran = cli("db", "import", *project, "a.csv")
        return ran.out.split(" results")[0], "is abbreviated" in ran.err

    assert imported("ab" * 5) == ("a.csv: 1 of 1", True)
    assert imported("cd" * 20) == ("a.csv: 1 of 1", False)
    assert imported("CD" * 5) == ("a.csv: 0 of 1", False)


@pytest.mark.parametrize(
    ("made_at", "is_said"), [("ef" * 20, True), ("cd" * 20, False), ("unversioned", False)]
)
def test_file_of_another_commit_is_noted(cli, tmp_path, made_at, is_said):
    stats = {"median": 1e-5, "q1": 1e-5, "q3": 1e-5, "rounds": 7}
    path = tmp_path / "made.json"
    benchmarks = [{"fullname": "test_gemm", "stats": stats}]
    path.write_text(json.dumps({"commit_info": {"id": made_at}, "benchmarks": benchmarks}))

    ran = cli(
        *("db", "import", "--format", "pytest-benchmark", "--project", "p"),
        *("--commit", "cd" * 20, str(path)),
    )

    assert ran.code == 0
    assert ("was made at commit efefefefef and is stored as of cdcdcdcdcd" in ran.err) is is_said


GOOGLE = {
    "context": {"host_name": "ci-7", "num_cpus": 8, "mhz_per_cpu": 2400},
    "benchmarks": [{"name": "BM_gemm", "run_type": "iteration", "real_time": 5, "iterations": 9}],
}


@pytest.mark.parametrize(
    ("format_name", "content", "options", "says"),
    [
        ("google-benchmark", json.dumps(GOOGLE), (), "(host ci-7, 8 CPUs of 2400 MHz): its"),
        ("google-benchmark", json.dumps(GOOGLE | {"context": {}}), (), "names no device: its"),
        ("google-benchmark", json.dumps(GOOGLE), ("--device", "ci"), ""),
        ("csv", "benchmark,value,unit\ngemm,2,us\n", (), "names no device: its results"),
        (
            "csv",
            "benchmark,value,unit,gpu\na,2,us,H200\nb,3,us,\n",
            (),
            "1 of its results are stored",
        ),
        ("nvbench", json.dumps(an_nvbench_file(20.0)), (), ""),
    ],
)
def test_results_without_device_are_noted(cli, tmp_path, format_name, content, options, says):
    path = tmp_path / "file.txt"
    path.write_text(content)

    ran = cli(
        *("db", "import", "--format", format_name, "--project", PROJECT),
        *("--commit", "1" * 40, *options, str(path)),
    )

    assert ran.code == 0, ran.err
    assert ("unknown device" in ran.err, ran.err.count("\n")) == (bool(says), int(bool(says)))
    assert says in ran.err


@pytest.fixture
def of_two_projects(cli, measured, tmp_path):
    """Three results of this repository, and one of each of two projects at the same commit."""
    for project in (PROJECT, OTHER):
        path = tmp_path / "one.csv"
        path.write_text(f"benchmark,value,gpu\n{project.replace('/', '-')},20.0,NVIDIA H200\n")
        at = ("--commit", "1" * 40, "--no-alert")
        assert (
            cli("db", "import", "--format", "csv", "--project", project, *at, str(path)).code == 0
        )


def text_of(file):
    """The text of a file; of a workbook, of all its parts."""
    if not zipfile.is_zipfile(file):
        return file.read_text()
    with zipfile.ZipFile(file) as parts:
        return "".join(parts.read(name).decode() for name in parts.namelist())


@pytest.mark.usefixtures("of_two_projects")
@pytest.mark.parametrize("name", [*EXPORTS, None])
def test_export_contains_named_projects_only(cli, tmp_path, name):
    file = tmp_path / "out.jsonl"
    for names, count in (
        ([PROJECT], 1),
        ([PROJECT, OTHER], 2),
        (["flexq-bench"], 3),
        ([PROJECT, OTHER, "flexq-bench"], 5),
    ):
        options = [] if name is None else ["--format", name]
        options += [] if count == 5 else ["--project", ",".join(names)]

        ran = cli("db", "export", str(file), *options, "--json")

        assert json.loads(ran.out)["records" if name is None else "results"] == count
        text = text_of(file)
        for project in (PROJECT, OTHER):
            assert (project in text) == (project in names)
        assert ("cublas-fp16" in text) == ("flexq-bench" in names)


@pytest.mark.usefixtures("of_two_projects")
def test_export_of_unknown_or_unsupported_project_is_usage_error(cli, tmp_path):
    ran = cli("db", "export", str(tmp_path / "r.jsonl"), "--project", "acme")
    assert (ran.code, "no project 'acme'" in ran.error, PROJECT in ran.error) == (2, True, True)

    folder = str(tmp_path / "traces")
    ran = cli("db", "export", folder, "--format", "flashinfer-bench", "--project", PROJECT)
    assert (ran.code, f"leave --project {PROJECT} out" in ran.error) == (2, True)
    assert not Path(folder).exists()
    ours = ("--format", "flashinfer-bench", "--project", "flexq-bench")
    assert cli("db", "export", folder, *ours).code == 0
