"""`detect`: change points of any CSV and of stored series."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexq_bench.db.engine import open_database
from flexq_bench.db.store import add_record
from flexq_bench.exit_codes import ExitCode

STEP = [f"{100 + i % 3 * 0.1}" for i in range(20)] + [f"{110 + i % 3 * 0.1}" for i in range(20)]


@pytest.fixture
def csv(tmp_path: Path):
    def write(*lines: str) -> str:
        path = tmp_path / "numbers.csv"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def points(ran) -> list[dict]:
    assert ran.code == ExitCode.PASS, ran.err
    return json.loads(ran.out)["change_points"]


def test_bare_numbers_need_no_header(cli, csv):
    (change,) = points(cli("detect", "--csv", csv(*STEP), "--json"))
    (negative,) = points(cli("detect", "--csv", csv(*(f"-{us}" for us in STEP)), "--json"))

    assert (change["index"], change["row"]) == (20, 21)
    assert change["mean_before"] == pytest.approx(100.1, abs=0.02)
    assert change["mean_after"] == pytest.approx(110.1, abs=0.02)
    assert change["relative_change"] == pytest.approx(0.1, abs=0.001)
    assert change["p_value"] <= 0.01
    assert negative["index"] == 20
    assert negative["mean_after"] == pytest.approx(-change["mean_after"], rel=1e-3)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_commit_and_time_columns_are_kept(cli, csv, separator):
    rows = [separator.join((f"c{i}", number, f"day {i}")) for i, number in enumerate(STEP)]
    file = csv(separator.join(("commit", "us", "time")), *rows)

    (change,) = points(cli("detect", "--csv", file, "--json"))

    assert (change["commit"], change["time"], change["row"]) == ("c20", "day 20", 22)
    assert "c20" in cli("detect", "--csv", file).out


def test_level_change_with_device_is_no_change_point(cli, csv):
    rows = [f"{number},{'a' if i < 20 else 'b'}" for i, number in enumerate(STEP)]
    file = csv("us,device", *rows)

    ran = cli("detect", "--csv", file, "--json")

    assert points(ran) == []
    (change,) = json.loads(ran.out)["device_changes"]
    assert change["index"] == 20
    assert "the device changed at index 20" in cli("detect", "--csv", file).out


def test_column_is_selected_by_name(cli, csv):
    file = csv("flat,us", *(f"5,{number}" for number in STEP))

    assert len(points(cli("detect", "--csv", file, "--column", "us", "--json"))) == 1
    assert points(cli("detect", "--csv", file, "--column", "flat", "--json")) == []


def test_empty_cells_and_nan_are_gaps(cli, csv):
    holes = ["", "nan", "NaN", *STEP[3:]]

    ran = cli("detect", "--csv", csv("us", *holes), "--json")

    assert [change["index"] for change in points(ran)] == [20]
    assert json.loads(ran.out)["gaps"] == 3


@pytest.mark.parametrize("lines", [("1",), ("us", "1", "2")])
def test_short_file_has_too_few_values(cli, csv, lines):
    ran = cli("detect", "--csv", csv(*lines))

    assert ran.code == ExitCode.PASS
    assert "too few" in ran.out


SECRET = "5ec3e7c0ffee" * 5


@pytest.mark.parametrize(
    ("lines", "options", "says"),
    [
        (("us,tops", "1,2"), (), "choose one by --column: us, tops"),
        (("us,tops", "1,2"), ("--column", "top"), "no column 'top': there are tops"),
        (("1", "2"), ("--column", "us"), "no header"),
        (("1,2", "3,4"), (), "2 columns of numbers and no header"),
        (("commit", "abc"), (), "no column of numbers"),
        (("",), (), "holds no number"),
        (("\ufeff",), (), "holds no number"),
        (("us",), (), "holds no number"),
        (("us", *STEP[:5], "fast", *STEP[5:]), (), "row 7: 'fast' in column 'us'"),
        (("us", "100,5", "101"), (), "row 2 has 2 cells"),
        (("100", "100,5"), (), "with a decimal point"),
        (("a,us", "x,1,5"), ("--column", "us"), "row 2 has 3 cells"),
        (("us", '"100', *STEP * 10), (), "row "),  # the quote is never closed
        (("us", "1", f"token {SECRET}"), (), "row 3: a text of 66 characters in column 'us'"),
        ((f"{SECRET},us", "1,2"), (), "choose one by --column: a text of 60 characters, us"),
    ],
)
def test_invalid_csv_is_named_without_quoting_secrets(cli, csv, lines, options, says):
    ran = cli("detect", "--csv", csv(*lines), *options)

    assert ran.code == ExitCode.USAGE
    assert says in ran.error
    assert SECRET[:6] not in ran.error
    assert len(ran.error.rpartition("row ")[2]) < 200


def test_unreadable_file_is_usage_error(cli, tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")

    for path in (tmp_path / "none.csv", tmp_path, tmp_path / "binary.csv", "/dev/zero"):
        ran = cli("detect", "--csv", str(path))
        assert ran.code == ExitCode.USAGE
        assert str(path) in ran.error


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            [f"2025-01-{1 + i % 28:02}T00:00,{number}" for i, number in enumerate(STEP)],
            "row 30 is the first: sort the file by time",
        ),
        ([f"{len(STEP) - i},{number}" for i, number in enumerate(STEP)], "newest row is first"),
        (
            [f"{i},{float(us) / (1000 if i in (7, 9) else 1)}" for i, us in enumerate(STEP)],
            "2 values are about 1,000 times smaller than the others, row 9",
        ),
    ],
    ids=["out of order", "newest first", "two units"],
)
def test_doubtful_csv_prints_warning(cli, csv, lines, says):
    ran = cli("detect", "--csv", csv("time,us", *lines))

    assert ran.code == ExitCode.PASS
    assert says in ran.out


@pytest.mark.parametrize(
    "arguments", [(), ("1", "--csv", "x.csv"), ("1", "--column", "us")], ids=" ".join
)
def test_detect_needs_series_or_file(cli, arguments):
    assert cli("detect", *arguments).code == ExitCode.USAGE


def test_stored_series_is_detected_by_id(cli, measured):
    series = json.loads(cli("list", "series", "--json").out)[0]["id"]

    ran = cli("detect", str(series))

    assert ran.code == ExitCode.PASS
    assert f"series {series}" in ran.out
    unknown = cli("detect", "999")
    assert unknown.code == ExitCode.USAGE
    assert "no series 999" in unknown.error


def test_levels_are_compared_within_one_epoch(cli, database, build):
    drivers = ["580"] * 20 + ["590"] * 20 + ["600"] * 5
    medians = [*map(float, STEP), *[130.0] * 5]
    medians[30:40] = [1.6 * median for median in medians[30:40]]
    with open_database(str(database)) as opened, opened.session() as session:
        for order, (driver, median) in enumerate(zip(drivers, medians, strict=True), 1):
            values = {"median_us": median, "ci_low_us": None, "ci_high_us": None}
            at = {"run": build.a_run(f"{order}"), "commit": build.a_commit(order)}
            add_record(session, build.a_record(environment={"driver": driver}, **at, **values))

    ran = cli("detect", "1", "--json")

    (change,) = points(ran)
    assert (change["index"], change["epoch"]) == (30, 2)
    assert json.loads(ran.out)["epochs"] == [
        {"epoch": 1, "first": 0, "values": 20},
        {"epoch": 2, "first": 20, "values": 20},
        {"epoch": 3, "first": 40, "values": 5},
    ]
    shown = " ".join(cli("detect", "1").out.split())
    assert "45 values in 3 epochs: 1 change point" in shown
    assert "epoch 2 begins at index 20" in shown
    assert "its levels are its own (5 values, 8 are needed)" in shown


def test_drift_is_no_change_point(cli, csv):
    noise = [(i * 37 % 11 - 5) * 0.02 for i in range(120)]
    drifting = cli("detect", "--csv", csv(*(f"{100 + 0.1 * i + n}" for i, n in enumerate(noise))))

    assert "no change point" in drifting.out
