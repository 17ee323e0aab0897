"""The Kernels page."""

from __future__ import annotations

import json

import pytest
from made_results import a_record, a_run, numbers, records_of
from page_content import chart, words


def test_rejected_results_are_listed_with_reasons(store, open_kernels):
    store.add(a_record(accepted=False))

    app = open_kernels()

    assert "No accepted result" in words(app)
    assert not app.get("plotly_chart")


def test_roofline_point_is_rate_over_intensity(store, open_kernels):
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


def test_heat_map_has_an_interval_in_each_cell(filled, open_kernels):
    first, second = [
        t for t in chart(open_kernels(view="heat map"))["data"] if t["type"] == "heatmap"
    ]

    assert (first["y"], first["x"]) == (["flexq-w6a6"], ["llama-7b o_proj", "llama-7b down_proj"])
    assert first["text"] == second["text"] == [["1.50<br>±1.4 %"] * 2]


def test_heat_map_marks_ratios_of_separate_runs(store, open_kernels):
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
    assert "Speed-up over flexq-w6a6" in [s.value.replace("\\", "") for s in app.header]


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


def test_variant_without_a_part_has_its_own_time(store, open_kernels):
    for variant, median in (("vanilla", 10.0), ("+pipeline", 8.0), ("-dequant", 9.0)):
        store.add(a_record(variant=variant, median_us=median))

    bars, *_ = chart(open_kernels(view="ablation"))["data"]

    assert dict(zip(bars["x"], bars["base"], strict=True))["-dequant"] == 0.0


def test_no_variants_says_which_suite_measures_them(filled, open_kernels):
    assert "run paper-table6" in words(open_kernels(view="ablation"))


def test_linear_is_compared_with_gemm_of_its_run(store, open_kernels):
    store.add(a_record(median_us=8.0), a_record(stage="linear", median_us=10.0))
    store.add(a_record(a_run("newer"), median_us=5.0, created_at="2025-11-22T10:00:05+00:00"))

    (point,) = [
        t
        for t in chart(open_kernels(view="gemm against linear"))["data"]
        if t["name"] == "flexq-w6a6"
    ]

    assert numbers(point["y"]) == [pytest.approx(10.0 / 8.0)]


def test_linear_of_another_configuration_is_marked(store, open_kernels):
    store.add(a_record(config={"warps": 8}), a_record(stage="linear", config={"warps": 4}))

    app = open_kernels(view="gemm against linear")

    assert app.dataframe[0].value["configuration"].tolist() == ["different"]
    assert "Where the configurations differ" in words(app)


def test_linear_is_compared_with_gemm_of_the_same_case(store, open_kernels):
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

    assert "<img" not in json.dumps(chart(open_kernels(view="heat map"))["data"])


def cells(app):
    """Text of the heat map's cells by kernel."""
    texts = {}
    for trace in chart(app)["data"]:
        if trace["type"] == "heatmap":
            texts |= dict(zip(trace["y"], trace["text"], strict=True))
    return texts


def test_model_has_every_kernel_on_its_shapes(store, open_kernels):
    of_llama = {"model": "llama-2-70b", "layer": "down_proj", "n": 8192, "k": 28672}
    run = a_run("one")
    store.add(
        a_record(run, kernel="cublaslt-w8a8", median_us=12.0, **of_llama),
        a_record(run, **of_llama | {"model": "llama-3-70b"}),
        a_record(run, kernel="abq-w6a6", **of_llama | {"model": "", "layer": ""}),
    )

    everything = cells(open_kernels(view="heat map"))
    narrowed = cells(open_kernels(view="heat map", model="llama-2-70b", layer="down_proj"))

    assert set(narrowed) == set(everything) == {"abq-w6a6", "flexq-w6a6"}
    assert all(len(row) == 1 for row in everything.values()), "one shape, one column"
    points = chart(open_kernels(model="llama-2-70b", layer="down_proj"))["data"]
    assert {"cublaslt-w8a8", "abq-w6a6", "flexq-w6a6"} <= {trace["name"] for trace in points}


def test_ratio_prefers_the_baseline_of_its_run(store, open_kernels):
    later = {"created_at": "2025-11-22T10:00:05+00:00"}
    run = a_run("one")
    store.add(a_record(run), a_record(run, kernel="cublaslt-w8a8", median_us=15.0))
    store.add(a_record(a_run("later"), kernel="cublaslt-w8a8", median_us=12.0, **later))

    app = open_kernels(view="heat map")

    assert cells(app)["flexq-w6a6"] == ["1.88<br>±1.4 %"]
    assert "0 of 1 ratios are of two separate runs" in words(app)


def test_ratio_of_separate_runs_includes_noise_and_a_mark(store, open_kernels):
    store.add(a_record(a_run("one")))
    store.add(a_record(a_run("two"), kernel="cublaslt-w8a8", median_us=12.0))

    (cell,) = cells(open_kernels(view="heat map"))["flexq-w6a6"]

    ratio, half = cell.split("<br>±")
    assert ratio == "1.50†"
    assert float(half.removesuffix(" %")) == pytest.approx(100 * 1.96 * 0.01 * 2**0.5, rel=0.2)


def test_sweep_is_shown_on_request(store, open_kernels):
    store.add(a_record(a_run("suite"), median_us=8.0))
    sweep = a_run("sweep", suite="sweep", trigger="sweep")
    store.add(a_record(sweep, median_us=6.0, created_at="2025-11-23T10:00:05+00:00"))

    def medians(**link):
        (points,) = [t for t in chart(open_kernels(**link))["data"] if t["name"] == "flexq-w6a6"]
        return [2 * 4096 * 4096 / 1e6 / y for y in points["y"]]

    assert medians() == [pytest.approx(8.0)]
    assert medians(sweeps="on") == [pytest.approx(6.0)]


def test_cpu_is_shown_on_request(store, open_kernels):
    store.add(a_record(a_run("cpu"), backend="cpu", gpu="A CPU", floor_us=5.0))
    store.add(a_record(a_run("gpu")))

    assert "NVIDIA H200" in words(open_kernels())
    assert "A CPU" in words(open_kernels(gpu="A CPU"))


def test_regimes_are_named_and_never_mixed(store, open_kernels):
    sustained = {"metric": "sustained_time", "regime": "sustained", "sample_gap_us": 0.0}
    store.add(a_record(regime="boost", sample_gap_us=50.0, median_us=8.0))
    store.add(a_record(a_run("load"), median_us=10.0, launch_j=1.0, **sustained))

    def shown(**link):
        app = open_kernels(**link)
        (points,) = [t for t in chart(app)["data"] if t["name"] == "flexq-w6a6"]
        return words(app), [2 * 4096 * 4096 / 1e6 / y for y in points["y"]]

    text, boost = shown()
    assert "regime: boost" in text
    assert boost == [pytest.approx(8.0)]
    text, load = shown(regime="sustained")
    assert "regime: sustained" in text
    assert load == [pytest.approx(10.0)]


def test_a_noisy_result_is_marked(store, open_kernels):
    run = a_run()
    store.add(a_record(run, kernel="cublaslt-w8a8", median_us=12.0))
    store.add(a_record(run, status="noisy", accepted=True))

    app = open_kernels(view="heat map")

    assert cells(app)["flexq-w6a6"][0].startswith("1.50~")
    assert "1 noisy, marked ~" in words(app)


def test_m_narrows_the_roofline(store, open_kernels):
    store.add(*records_of(m=(1, 8)))

    (points,) = [t for t in chart(open_kernels(m="8"))["data"] if t["name"] == "flexq-w6a6"]

    assert len(points["y"]) == 2
    assert all("M=8" in text for text in points["text"])
