"""The Kernels page as a person meets it."""

from __future__ import annotations

import json

import pytest
from made_results import a_record, a_run, numbers, records_of
from page_content import chart, words


def test_an_empty_database_says_how_to_fill_it(store, open_kernels):
    assert "run smoke" in words(open_kernels())


def test_results_that_are_not_accepted_are_not_drawn_and_it_says_why(store, open_kernels):
    store.add(a_record(accepted=False))

    app = open_kernels()

    assert "No accepted result" in words(app)
    assert not app.get("plotly_chart")


def test_a_point_of_the_roofline_is_its_rate_over_its_intensity(store, open_kernels):
    store.add(a_record(m=4, median_us=8.0))

    (point,) = [t for t in chart(open_kernels())["data"] if t["name"] == "flexq-w6a6"]

    operations, weight_bytes = 2 * 4 * 4096 * 4096, 4096 * 4096 * 6 / 8
    assert point["x"] == [pytest.approx(operations / weight_bytes)]
    assert point["y"] == [pytest.approx(operations / 8.0 / 1e6)]
    # 1 % longer is 1 % less, the other way round than the interval of the time.
    assert point["error_y"]["array"] == [pytest.approx(operations / 7.92 / 1e6 - point["y"][0])]


def test_the_roof_is_what_the_measured_floor_reads(store, open_kernels):
    store.add(a_record(floor_us=4.0))

    (roof,) = [t for t in chart(open_kernels())["data"] if t["name"].startswith("the fastest")]

    read = 4096 * 4096 * 6 / 8 / 4.0 / 1e3
    assert f"{read:,.0f} GB/s" in roof["name"]
    assert roof["y"][0] == pytest.approx(roof["x"][0] * read / 1e3)


def test_only_the_newest_result_of_a_series_counts(store, open_kernels):
    store.add(a_record(a_run("old"), median_us=80.0, created_at="2025-11-20T10:00:00+00:00"))
    store.add(a_record(a_run("new"), median_us=8.0, created_at="2025-11-21T10:00:00+00:00"))

    (point,) = [t for t in chart(open_kernels())["data"] if t["name"] == "flexq-w6a6"]

    assert point["y"] == [pytest.approx(2 * 4096 * 4096 / 8.0 / 1e6)]


def test_the_map_has_a_cell_with_its_interval_for_each_kernel_layer_and_m(filled, open_kernels):
    first, second = [
        t for t in chart(open_kernels(view="heat map"))["data"] if t["type"] == "heatmap"
    ]

    assert (first["y"], first["x"]) == (["flexq-w6a6"], ["llama-7b o_proj", "llama-7b down_proj"])
    assert first["text"] == second["text"] == [["1.50<br>±1.4 %"] * 2]


def test_the_map_says_which_ratios_are_of_separate_runs(store, open_kernels):
    store.add(a_record(a_run("one"), kernel="cublaslt-w8a8", median_us=12.0))
    store.add(a_record(a_run("two")))
    store.add(*records_of(a_run("both"), m=[8]))

    app = open_kernels(view="heat map")

    assert "1 of 3 ratios are of two separate runs" in words(app)
    by_m = [t for t in chart(app)["data"] if t["type"] == "heatmap"]
    assert "in separate runs" in str(by_m[0]["customdata"])
    assert "in separate runs" not in str(by_m[1]["customdata"])


def test_the_baseline_and_the_filters_are_in_the_link(filled, open_kernels):
    app = open_kernels(view="heat map", baseline="flexq-w6a6", layer="o_proj", m="8")

    (only,) = [t for t in chart(app)["data"] if t["type"] == "heatmap"]
    assert (only["y"], only["x"]) == (["cublaslt-w8a8"], ["llama-7b o_proj"])
    assert "Speed-up over flexq-w6a6" in [s.value.replace("\\", "") for s in app.subheader]


def test_a_baseline_without_a_rival_says_so(store, open_kernels):
    store.add(a_record(kernel="cublaslt-w8a8"))

    assert "choose another baseline" in words(open_kernels(view="heat map"))


def test_a_step_starts_where_the_one_before_it_ends(store, open_kernels):
    for variant, median in (("+pipeline", 6.0), ("vanilla", 10.0), ("+warp-reduction", 8.0)):
        store.add(a_record(variant=variant, median_us=median))

    bars, ends, *_ = chart(open_kernels(view="ablation"))["data"]

    assert bars["x"] == ["vanilla", "+warp-reduction", "+pipeline"]
    assert bars["base"] == pytest.approx([0.0, 8.0, 6.0])
    assert bars["y"] == pytest.approx([10.0, 2.0, 2.0])
    assert ends["error_y"]["array"] == pytest.approx([0.1, 0.08, 0.06])


def test_a_variant_that_takes_something_out_is_a_time_by_itself(store, open_kernels):
    for variant, median in (("vanilla", 10.0), ("+pipeline", 8.0), ("-fused-dequant", 9.0)):
        store.add(a_record(variant=variant, median_us=median))

    bars, *_ = chart(open_kernels(view="ablation"))["data"]

    assert dict(zip(bars["x"], bars["base"], strict=True))["-fused-dequant"] == 0.0


def test_no_variants_says_which_suite_measures_them(filled, open_kernels):
    assert "run paper-table6" in words(open_kernels(view="ablation"))


def test_linear_stands_over_gemm_of_its_own_run_not_over_a_newer_one(store, open_kernels):
    store.add(a_record(median_us=8.0), a_record(stage="linear", median_us=10.0))
    store.add(a_record(a_run("newer"), median_us=5.0, created_at="2025-11-22T10:00:05+00:00"))

    (point,) = [
        t
        for t in chart(open_kernels(view="gemm against linear"))["data"]
        if t["name"] == "flexq-w6a6"
    ]

    assert numbers(point["y"]) == [pytest.approx(10.0 / 8.0)]


def test_a_linear_of_another_configuration_than_its_gemm_is_called_that(store, open_kernels):
    store.add(a_record(config={"warps": 8}), a_record(stage="linear", config={"warps": 4}))

    app = open_kernels(view="gemm against linear")

    assert app.dataframe[0].value["configuration"].tolist() == ["another"]
    assert "took different configurations" in words(app)


def test_linear_stands_over_gemm_of_the_same_case(store, open_kernels):
    store.add(a_record(median_us=8.0), a_record(stage="linear", median_us=10.0))
    store.add(a_record(kernel="cublaslt-w8a8", stage="linear"))  # no gemm: nothing to say

    app = open_kernels(view="gemm against linear")

    (points,) = [t for t in chart(app)["data"] if t["mode"] == "markers"]
    assert (points["name"], points["y"]) == ("flexq-w6a6", [pytest.approx(1.25)])
    assert points["error_y"]["array"][0] > 0
    assert app.dataframe[0].value["added_us"].tolist() == [pytest.approx(2.0)]


def test_one_stage_alone_says_how_to_measure_both(filled, open_kernels):
    assert "gemm,linear" in words(open_kernels(view="gemm against linear"))


def test_a_gpu_has_its_own_roofline(store, open_kernels):
    store.add(a_record(), a_record(gpu="NVIDIA A100", median_us=16.0))

    app = open_kernels(gpu="NVIDIA A100")

    (point,) = [t for t in chart(app)["data"] if t["name"] == "flexq-w6a6"]
    assert point["y"] == [pytest.approx(2 * 4096 * 4096 / 16.0 / 1e6)]


def test_names_from_records_are_never_markup_in_a_chart(store, open_kernels):
    evil = "<img src=x onerror=alert(1)>"
    store.add(a_record(layer=evil), a_record(kernel="cublaslt-w8a8", layer=evil))

    for view in ("roofline", "heat map"):
        assert "<img" not in json.dumps(chart(open_kernels(view=view))["data"])
