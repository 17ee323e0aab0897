"""Units of metrics: conversions, and the scale on which values are compared."""

from __future__ import annotations

import pytest

from flexq_bench.db.units import COUNT, DIFFERENCE, RATIO, conversion, is_rate, scale_of, with_scale


@pytest.mark.parametrize(
    ("unit", "scale"),
    [
        *((unit, RATIO) for unit in ("us", "ns", "GB/s", "bytes_per_second", "TFLOPS", "req/s")),
        *((unit, RATIO) for unit in ("frames per second", "J/token", "MHz")),
        *((unit, COUNT) for unit in ("bytes", "MiB", "KB", "registers", "spills", "count")),
        *((unit, DIFFERENCE) for unit in ("%", "points", "")),
        *((unit, COUNT) for unit in ("B/op", "allocs/op", "bytes/iter")),
        *((unit, RATIO) for unit in ("ns/op", "ops/s", "op/sec")),
        *(("widgets [count]", COUNT), ("points [ratio]", RATIO), ("us[difference]", DIFFERENCE)),
        *(("[count]", DIFFERENCE), ("a [sum]", DIFFERENCE)),
    ],
)
def test_scale_follows_the_unit(unit, scale):
    assert scale_of("a metric", unit) == scale


def test_time_is_a_ratio_whatever_its_unit():
    assert scale_of("time", "") == RATIO


@pytest.mark.parametrize(
    ("unit", "to", "factor"),
    [
        ("ns", "us", 1e-3),
        ("GB/s", "MB/s", 1e3),
        ("GiB/s", "GB/s", 1.073741824),
        ("bytes_per_second", "MB/s", 1e-6),
        ("MB/ms", "GB/s", 1.0),
        ("TFLOPS", "GFLOP/s", 1e3),
        ("mJ/token", "J/token", 1e-3),
        ("%", "fraction", 0.01),
        ("KiB", "bytes", 1024),
        ("GB/s", "GB", None),
        ("usec", "us", 1.0),
        ("Milliseconds", "us", 1e3),
        ("nanoseconds", "us", 1e-3),
        ("hours", "s", 3600),
        ("kilobytes", "bytes", 1000),
        ("us", "bytes", None),
        ("points", "marks", None),
        ("MB/s [difference]", "GB/s [difference]", 1e-3),
        ("MB/s [difference]", "GB/s", None),
        ("us [difference]", "us", None),
    ],
)
def test_units_of_one_quantity_are_converted(unit, to, factor):
    found = conversion(unit, to)

    assert found == (None if factor is None else pytest.approx(factor))


def test_scale_is_stated_behind_a_unit_that_lacks_it():
    assert with_scale("widgets", COUNT) == "widgets [count]"
    assert with_scale("widgets [count]", RATIO) == "widgets [ratio]"
    assert with_scale("bytes [ratio]", COUNT) == "bytes"
    assert is_rate("GB/s [difference]")
    with pytest.raises(ValueError, match="ratio, count or difference, not 'sum'"):
        with_scale("widgets", "sum")
