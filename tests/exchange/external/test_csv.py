"""CSV files of results: separators, decimal signs, rows that are refused."""

from __future__ import annotations

import re

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import Refused


def test_csv_rows_are_results(read):
    text = "benchmark,value,unit,low,high,m,n,k,gpu\ngemm,2,ms,1.9,2.1,8,64,32,NVIDIA H200\n\n"

    (one,) = read("csv", text).results

    assert (one.median, one.low, one.high) == pytest.approx((2000, 1900, 2100))
    assert (one.shape, one.device) == ((8, 64, 32), "NVIDIA H200")


def test_csv_rows_of_other_metrics_keep_their_unit(read):
    (one,) = read(
        "csv", "benchmark,value,unit,metric,direction\ncopy,3.2,TB/s,bandwidth,higher\n"
    ).results

    assert (one.metric, one.unit, one.direction, one.median) == ("bandwidth", "TB/s", "higher", 3.2)


def test_csv_rows_of_other_metrics_have_a_direction(read):
    reading = read("csv", "benchmark,value,unit,metric\ncopy,3.2,TB/s,bandwidth\n")

    assert reading.refused == (
        Refused("row 2", "bandwidth needs a column direction: lower or higher is better"),
    )


def test_csv_may_state_the_scale_of_a_metric(read):
    header = "benchmark,value,metric,unit,direction,scale\n"
    rows = ("a,0,m,widgets,lower,count", "b,-2,m,ms,lower,difference", "c,0,m,widgets,lower,ratio")
    text = header + "".join(f"{row}\n" for row in rows)

    found = read("csv", text + "a,1,m,x,lower,sum\na,1,time,us,lower,count\n")

    assert [(one.median, one.unit) for one in found.results] == [
        (0, "widgets [count]"), (-2, "ms [difference]"),
    ]  # fmt: skip
    assert [one.reason for one in found.refused] == [
        "its value is 0, and times and rates are above 0: give a count its unit",
        "the scale is ratio, count or difference, not 'sum'",
        "a time is a ratio: name another metric to compare its differences",
    ]


def test_csv_headers_have_any_case_and_order(read):
    (one,) = read("csv", "\ufeffUnit,Value, Benchmark \r\nns,1500,gemm\r\n").results

    assert (one.name, one.median) == ("gemm", pytest.approx(1.5))


@pytest.mark.parametrize(
    "text",
    [
        "benchmark;value;low;samples\ngemm;1,5;1,25;16\nother;1234;;\n",
        "benchmark;value;low;samples\ngemm;1.5;1.25;16\nother;1234;;\n",
        "benchmark;value;low;samples\ngemm;1,500;1,250;16\nother;1234;;\n",
        "benchmark\tvalue\tlow\tsamples\ngemm\t1,5\t1,250\t16\nother\t1234\n",
        "sep=;\r\nValue;Benchmark;Low;Samples\r\n1,5;gemm;1,25;16\r\n1234;other\r\n",
    ],
)
def test_csv_with_semicolons_or_tabs_may_have_decimal_commas(read, text):
    reading = read("csv", text)

    assert reading.refused == ()
    first, second = reading.results
    assert (first.name, first.median, first.low, first.n_samples) == ("gemm", 1.5, 1.25, 16)
    assert (second.name, second.median) == ("other", 1234.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "benchmark;value\ngemm;1,5\nother;1.5\n",
            "has '1,5' in row 2 and '1.5' in row 3: write one decimal sign, and none between",
        ),
        ("benchmark;value\ngemm;1.234,5\n", "has '1.234,5' in row 2 and '1.234,5' in row 2"),
        ("benchmark\tvalue\ngemm\t1,234\n", "which may be thousands or a fraction"),
        ("benchmark|value\ngemm|1\n", "columns separated by '|': write commas, semicolons or"),
        ("benchmark;value;ms\ngemm;1;2\n", "no column 'ms'"),
    ],
)
def test_ambiguous_csv_is_refused(read, text, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        read("csv", text)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("gemm,-1,us,1", "-1 µs is not a plausible time"),
        ("gemm,inf,us,1", "value is inf"),
        ("gemm,nan,us,1", "value is nan"),
        ("gemm,x,us,1", "value is no number"),
        ("gemm,1_000,us,1", "value is no number"),
        ("gemm,1e-6,us,2147483647", "1e-06 µs is not a plausible time: 4.29e+09 TOPS"),
        ("gemm,1,fortnight,1", "its unit is no time's: use one of ns, us, ms, s"),
        ("gemm,1,us,0", "m, n and k are 1 to 2147483647"),
        ("gemm,1,us,1.5", "m is no count"),
        (",1,us,1", "it has no benchmark, or no value"),
        ("gemm,1,us,1,9", "it has 5 cells, the header has 4"),
        ("a\x1b[31mb,1,us,1", "its name holds control characters"),
        ("x" * 401 + ",1,us,1", "its name has 401 letters, 400 are the most"),
    ],
)
def test_csv_rows_out_of_range_are_refused(read, row, why):
    reading = read("csv", f"benchmark,value,unit,m\n{row}\ngood,1,us,1\n")

    assert [one.name for one in reading.results] == ["good"]
    assert reading.refused == (Refused("row 2", why),)


def test_too_large_csv_value_is_refused_alone(read):
    rows = "good,5e11,B/s,bandwidth,higher\nthroughput,2e12,B/s,bandwidth,higher\n"
    reading = read("csv", f"benchmark,value,unit,metric,direction\n{rows}")

    assert [one.name for one in reading.results] == ["good"]
    assert reading.refused == (
        Refused("row 3", "a value of it exceeds 1e+12: give it in a larger unit"),
    )


def test_csv_of_spreadsheets_is_read(read):
    reading = read("csv", 'benchmark,value,,\rgemm,1,,\rother,"1,5",,\r')

    assert [(one.name, one.median) for one in reading.results] == [("gemm", 1.0)]
    assert reading.refused == (
        Refused("row 3", "value is no number: write it with a decimal point"),
    )


def test_truncated_last_csv_row_is_refused(read):
    text = "benchmark,value,unit,m\ngemm,21.4,us,1\nother,2"

    assert read("csv", text).refused == (
        Refused("row 3", "the file is cut off within it: copy it again"),
    )
    assert read("csv", f"{text}49.5,us,1").refused == ()  # its line has no end


def test_json_lines_are_refused_by_their_place_in_the_file(read):
    reading = read("jsonl", '{"benchmark":"a","value":1}\n\n[1]\n{"benchmark":"b","value":"x"}\n')

    assert [(one.name, one.reason) for one in reading.refused] == [
        ("line 3", "it is no object"),
        ("line 4", "value is no number"),
    ]
