"""Published tables and statements beside stored results: what is measured, and the verdicts."""

from __future__ import annotations

import gzip
import math
import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file
from flexq_bench.db.queries import DecodeRow, ResultRow, ScoreRow, ServingRow
from flexq_bench.kernels.registry import labels
from flexq_bench.results.papers.evidence import (
    TASK_NAMES,
    ZERO_SHOT,
    Evidence,
    read_evidence,
)
from flexq_bench.results.papers.statements import statement_result
from flexq_bench.results.papers.steps import AccuracyInputs, named_figures, steps_of, why_not_here
from flexq_bench.results.papers.tables import averages, shape_of, table_result
from flexq_bench.results.stored_comparison import newest_of_cases
from flexq_bench.schemes.registry import resolve
from flexq_bench.workloads.case import parse_kernel_label
from flexq_bench.workloads.models import load_catalog
from flexq_bench.workloads.published import Mismatch, get_paper, published_papers, select_tables
from flexq_bench.workloads.suites import load_suite

EXAMPLES = Path(__file__).parents[2] / "examples"
AT = datetime(2026, 1, 1, tzinfo=UTC)
GPU = "NVIDIA H100 80GB HBM3"
TABLES = [f"{paper.key}/{table.id}" for paper, table in select_tables(None)]


def a_time(label, us, m=1, n=4096, k=4096, *, cache="cold", gpu=GPU, days=0, **changes):
    name, variant = parse_kernel_label(label)
    row = ResultRow(
        uuid="u", run="r", suite="s", case=f"{label} {m} {n} {k} {cache}", series_id=1, kernel=name,
        variant=variant, backend="cuda", stage="gemm", cache=cache, gpu=gpu, model="", layer="",
        operation="linear", parameters="", m=m, n=n, k=k, weight_bits=8, act_bits=8, status="ok",
        detail="", accepted=True, median_us=us, ci_low_us=us, ci_high_us=us, n_samples=10,
        floor_us=None, pct_of_floor=None, launch_us=None, tops=None, max_rel_error=None, exact=True,
        config={}, commit="c", dirty=False, created_at=AT + timedelta(days=days),
        protocol_version=4, regime="boost",
    )  # fmt: skip
    return replace(row, **changes)


def a_score(scheme, value, *, model="small", task="wikitext", metric="perplexity", tokens=2047):
    return ScoreRow(
        model, scheme, "reference", task, "text", tokens, metric, value, 0.1, "H200", "r", AT
    )


def a_decode(scheme, token_ms, *, model="llama-7b", batch=1, new=128, memory=10**9, prompt=15):
    return DecodeRow(
        model, "synthetic", scheme, 16, batch, prompt, new, "ok", "", 1.0, token_ms, token_ms,
        token_ms, token_ms, 1000 / token_ms, None, memory, GPU, "r", AT,
    )  # fmt: skip


def a_serving(scheme, tokens_per_s, *, limit=None, kv_bits=16, batch_limit=256):
    return ServingRow(
        "llama-7b", "synthetic", scheme, kv_bits, batch_limit, limit, 96, "lognormal", "ok", "",
        tokens_per_s, None, None, None, None, None, None, None, None, {}, GPU, "r", AT,
    )  # fmt: skip


def printed_times(name, *, faster=1.0):
    """The table's own times as if they were ours, all faster by a factor."""
    ((paper, table),) = select_tables(name)
    rows = {}
    for cell in table.cells():
        m, n, k = shape_of(table, cell)
        us = 2 * m * n * k / (cell.value * 1e6) if cell.metric == "throughput" else None
        if us is None:
            us = cell.value * (1e3 if cell.unit == "ms" else 1.0)
        label = paper.kernel(cell)
        rows[label, m, n, k] = a_time(label, us / faster, m, n, k, cache=table.cache)
    return list(rows.values())


def judged(name, evidence, **options):
    ((paper, table),) = select_tables(name)
    return table_result(paper, table, evidence, **options)


def stated(name, evidence):
    key, _, part = name.partition("/")
    (statement,) = [s for s in get_paper(key).statement if s.id == part]
    return statement_result(get_paper(key), statement, evidence)


@pytest.mark.parametrize("name", TABLES)
def test_names_of_every_table_are_known_or_explained(name):
    ((paper, table),) = select_tables(name)

    for cell in table.cells():
        model = cell.at.get("model")
        if "kernel" in cell.at:
            assert paper.kernel(cell) in labels("cuda"), cell
        elif not table.cannot and not paper.why_absent(cell):
            for scheme in paper.schemes_of(cell):
                resolve(scheme)
            assert paper.schemes_of(cell), cell
            assert model is None or paper.model(model) in load_catalog(), cell
            task = str(cell.at.get("task", "mean"))
            known = (
                *ZERO_SHOT,
                *TASK_NAMES,
                "c4",
                "ptb",
                "cb",
                "copa",
                "rte",
                "wic",
                "wsc",
                "mean",
            )
            assert task in known, cell


def test_kernels_of_a_table_are_in_its_suite():
    for paper, table in select_tables(None):
        if table.suite:
            cases = load_suite(table.suite).cases(labels("cuda"))
            planned = {(c.label, c.cache, c.gemm.m, c.gemm.n, c.gemm.k) for c in cases}
            for cell in table.cells():
                where = (paper.kernel(cell), table.cache, *shape_of(table, cell))
                assert where in planned, where


def test_kernels_of_a_statement_are_in_its_suite():
    for paper in published_papers():
        for statement in paper.statement:
            if (ours := statement.ours) is not None and ours.suite:
                cases = load_suite(ours.suite).cases(labels("cuda"))
                planned = {case.label for case in cases}
                assert {ours.kernel, ours.baseline, *ours.on_down} <= planned, statement.id


def test_commands_name_known_models_and_schemes():
    commands = [c for p, figure in named_figures(published_papers()) for c in figure.commands]
    commands += [c for _, table in select_tables(None) for c in table.commands]

    assert commands
    for text in commands:
        verb, model, *rest = shlex.split(text)
        assert verb == "decode"
        assert model in load_catalog()
        for scheme in rest[rest.index("--scheme") + 1].split(","):
            resolve(scheme)


@pytest.mark.parametrize("name", ["flexq/table-6", "abq-llm/table-4", "zeroquant-fp6/table-b.1"])
def test_the_same_ratios_on_a_faster_gpu_are_reproduced(name):
    result = judged(name, Evidence(printed_times(name, faster=3)))

    assert result.kind == "reproduced"
    assert result.factor < 1.25
    assert result.held == result.pairs > 0


def test_brief_time_counts_only_where_there_is_no_other():
    whole = a_time("cublaslt-w8a8", 4.0, days=0)
    brief = a_time("cublaslt-w8a8", 8.0, days=1, protocol_version=104)

    for times in ([whole, brief], [brief]):
        key = (GPU, "cublaslt-w8a8", "cold", 1, 4096, 4096)
        assert Evidence(times).times[key] is times[0]
        assert newest_of_cases(times) == [times[0]]


def test_verdict_of_brief_times_says_so():
    times = printed_times("flexq/table-6")

    assert "brief" not in judged("flexq/table-6", Evidence(times)).verdict
    times[0] = replace(times[0], protocol_version=104)
    assert "; brief times" in judged("flexq/table-6", Evidence(times)).verdict


def test_same_order_with_other_ratios_holds():
    ours = [3.0, 9.0, 7.0, 5.0, 4.9, 4.6]
    rows = [
        replace(row, median_us=us)
        for row, us in zip(printed_times("flexq/table-6"), [36, *ours[1:]], strict=True)
    ]

    result = judged("flexq/table-6", Evidence(rows))

    assert (result.kind, result.held, result.pairs) == ("order holds", result.pairs, result.pairs)
    assert "ratios differ by up to" in result.verdict


def test_another_order_differs_and_says_where():
    rows = printed_times("flexq/table-6")
    slow = [replace(row, median_us=500.0) if row.variant == "+evict-first" else row for row in rows]

    result = judged("flexq/table-6", Evidence(slow))

    assert result.kind == "differs"
    assert result.verdict.startswith("differs since")
    assert "order holds in" in result.verdict


def test_a_newer_record_changes_numbers_and_verdict():
    rows = printed_times("abq-llm/table-4")
    before = judged("abq-llm/table-4", Evidence(rows))
    newer = a_time("abq-w2a8[native]", 1.0, days=1)

    after = judged("abq-llm/table-4", Evidence([*rows, newer]))

    assert (before.kind, after.kind) == ("reproduced", "differs")
    assert next(o.value for c, o in after.cells if c.at["step"] == "native") == 1.0


def test_table_without_results_says_why_it_is_not_judged():
    results = [judged(name, Evidence()) for name in TABLES]

    assert {result.kind for result in results} == {"not here"}
    assert all(result.verdict.startswith("can't be") for result in results)


def test_rates_and_shares_of_bandwidth_follow_from_times():
    rows = printed_times("flexq/table-6")
    result = judged("flexq/table-6", Evidence(rows))
    (ours,) = [o for c, o in result.cells if c.at["step"] == "cublas" and c.unit == "TOPS"]

    assert ours.value == pytest.approx(0.91, abs=1e-3)
    assert ours.their_share == pytest.approx(0.45, abs=0.01)
    assert ours.share == pytest.approx(4096 * 4096 / 37.02e-6 / 3352e9, rel=0.01)


def test_times_of_hot_weights_are_no_times_of_cold_ones():
    hot = Evidence(printed_times("abq-llm/table-14"))

    assert judged("abq-llm/table-14", hot).measured > 300
    assert judged("abq-llm/table-13", hot).measured == 0


def test_dashes_of_a_table_are_no_numbers_with_ours():
    ((paper, table),) = select_tables("abq-llm/table-13")
    rows = [a_time(paper.kernel(c), 5.0, *shape_of(table, c)) for c in table.cells()]

    result = judged("abq-llm/table-13", Evidence(rows))

    assert result.measured == result.printed == 362


def test_model_of_a_table_has_gpu_with_most_numbers():
    of_7b = [a_decode(scheme, 4.0) for scheme in ("fp16", "abq-w2a8")]
    of_13b = [
        replace(a_decode(scheme, 6.0, model="llama-13b"), gpu="NVIDIA H200")
        for scheme in ("fp16", "w4a16", "abq-w2a8")
    ]

    result = judged("abq-llm/table-12", Evidence(decodes=[*of_7b, *of_13b]))

    assert result.gpu == f"{GPU}, NVIDIA H200"
    assert result.measured == 2 * 5
    places = [(cell.row, cell.column) for cell, _ in result.cells]
    assert places == sorted(places)


def test_gpu_with_most_numbers_is_shown_unless_another_is_named():
    rows = printed_times("flexq/table-6")
    few = [replace(row, gpu="NVIDIA H200") for row in rows[:2]]
    evidence = Evidence([*rows, *few])

    assert judged("flexq/table-6", evidence).gpu == GPU
    assert judged("flexq/table-6", evidence, gpu="NVIDIA H200").measured == 4


def test_scores_of_another_model_are_judged_by_their_order():
    scores = [a_score("fp16", 20.0), a_score("smoothquant-w6a6", 30.0), a_score("flexq-w6ax", 22.0)]

    result = judged("flexq/table-2", Evidence(scores=scores))

    assert result.kind == "order holds"
    assert (result.held, result.pairs) == (2, 2)  # FP16 is too close to FlexQ
    assert "on small, not the paper's models" in result.verdict
    worse = [*scores[:2], a_score("flexq-w6ax", 31.0)]
    assert judged("flexq/table-2", Evidence(scores=worse)).kind == "differs"


@pytest.mark.parametrize(("clipped", "change"), [(30.0, 1.0), (31.5, None)])
def test_change_is_of_the_row_above_in_the_printed_direction(clipped, change):
    first = "atom-w4a4[activation_clip=1,weight_clip=1,gptq=false,kv_bits=16]"
    scores = [a_score(first, 31.0), a_score("atom-w4a4[gptq=false,kv_bits=16]", clipped)]

    result = judged("atom/table-4", Evidence(scores=scores))

    changes = {o.name: o.value for c, o in result.cells if c.metric == "perplexity-change"}
    assert changes["atom-w4a4[gptq=false,kv_bits=16]"] == change


def test_decrease_of_an_accuracy_is_below_the_unquantized_model():
    scores = [
        replace(a_score(scheme, value, model="llama-7b", task=task, metric="acc_norm"))
        for scheme, value in (("fp16", 0.70), ("dgq-w4a8", 0.69))
        for task in ZERO_SHOT
    ]

    result = judged("dgq/table-3", Evidence(scores=scores))

    assert [
        ours.value
        for cell, ours in result.cells
        if cell.metric == "accuracy-decrease" and ours.name == "dgq-w4a8" and ours.value is not None
    ] == pytest.approx([1.0])


def test_scores_of_the_named_model_are_compared_in_size():
    scores = [
        a_score(scheme, value, model="llama-7b")
        for scheme, value in (("fp16", 5.68), ("smoothquant-w6a6", 6.03), ("flexq-w6ax", 5.70))
    ]

    result = judged("flexq/table-2", Evidence(scores=[*scores, a_score("fp16", 30.0)]))

    assert result.kind == "reproduced"
    assert "within 1.00x" in result.verdict


def test_scores_of_different_texts_are_not_compared():
    whole = [a_score("fp16", 21.6), a_score("flexq-w6ax", 24.3), a_score("w4a4", 300.0)]
    part = [replace(a_score("fp16", 19.9, tokens=100), created_at=AT + timedelta(days=1))]

    result = stated("flexq/abstract-ppl", Evidence(scores=[*whole, *part]))

    assert result.measured.value == pytest.approx(24.3 - 21.6)


def test_mean_accuracy_is_of_all_six_tasks():
    some = [a_score("fp16", 0.5, task=task, metric="acc") for task in ZERO_SHOT[:5]]

    assert Evidence(scores=some).score("small", "fp16", "mean", "accuracy") is None
    every = [*some, a_score("fp16", 0.8, task=ZERO_SHOT[5], metric="acc")]
    assert Evidence(scores=every).score("small", "fp16", "mean", "accuracy") == pytest.approx(55.0)


@pytest.mark.parametrize(("error", "kind"), [(0.001, "differs"), (0.05, "not here")])
def test_accuracies_within_their_error_have_no_order(error, kind):
    scores = [
        replace(a_score(scheme, value, task=task, metric="acc_norm"), standard_error=error)
        for scheme, value in (("fp16", 0.60), ("smoothquant-w6a6", 0.61))
        for task in ZERO_SHOT
    ]

    assert judged("flexq/table-3", Evidence(scores=scores)).kind == kind


def test_generation_takes_the_prompt_and_every_token():
    result = judged("abq-llm/table-12", Evidence(decodes=[a_decode("fp16", 10.0)]))
    of = {
        (c.metric, c.at["scheme"], c.at["new_tokens"], c.at["model"]): o.value
        for c, o in result.cells
    }

    assert of["latency", "FP16", 128, "llama-7b"] == pytest.approx(1 + 127 * 10.0)
    assert of["memory", "FP16", 128, "llama-7b"] == pytest.approx(1.0)
    assert of["latency", "FP16", 256, "llama-7b"] is None


def test_share_of_a_generation_is_of_all_weights():
    result = judged(
        "abq-llm/table-12", Evidence(decodes=[a_decode("fp16", 12.0, model="llama-30b")])
    )

    (of,) = [o for c, o in result.cells if o.value is not None and c.metric == "latency"]
    assert of.their_share == pytest.approx(1.415, abs=0.01)
    assert of.share == pytest.approx(1.415 * 3759.08 / of.value * 1555 / 3352, rel=0.01)


def test_averages_of_table_b1_are_both_ways():
    result = judged("zeroquant-fp6/table-b.1", Evidence(printed_times("zeroquant-fp6/table-b.1")))
    of = {(a.subject, a.over): a for a in averages(result)}

    means = of["fp6-w6a16", "cublas-fp16"]
    assert means.count == 6
    assert means.theirs == pytest.approx((1.918, 1.847), abs=1e-3)
    assert means.ours == pytest.approx(means.theirs)


def test_averages_of_many_widths_are_over_the_baseline_of_each():
    found = {(a.subject, a.over): a for a in averages(judged("abq-llm/table-14", Evidence()))}

    assert set(found) == {
        (f"abq {w}", f"cutlass {w}") for w in {over.split()[1] for _, over in found}
    }
    assert len(found) == 12
    assert found["abq W6A6", "cutlass W6A6"].theirs[1] == pytest.approx(
        (1.89 * 1.64 * 1.42) ** (1 / 3), rel=0.01
    )


def test_statement_of_a_mean_has_both_means_of_its_layers():
    shapes = [(s.n, s.k) for s in load_suite("paper-fp6").shapes]
    rows = [a_time("cublas-fp16", 30.0, 8, *shape) for shape in shapes]
    rows += [
        a_time("fp6-w6a16", us, 8, *shape)
        for us, shape in zip((10, 10, 10, 30, 30, 30), shapes, strict=True)
    ]

    result = stated("zeroquant-fp6/s53-cublas", Evidence(rows))

    assert result.measured.value == pytest.approx(2.0)
    assert result.measured.geometric == pytest.approx(math.sqrt(3))
    assert (result.measured.cases, result.kind) == (6, "reproduced")
    assert result.measured.text == "2 (6 cases, 1 to 3, geometric 1.732)"


def test_best_case_is_compared_with_the_best_case():
    rows = [a_time("cublas-fp16", 30.0, 8, 13824, 5120), a_time("fp6-w6a16", 12.0, 8, 13824, 5120)]
    rows += [a_time("cublas-fp16", 30.0, 8, 5120, 13824), a_time("fp6-w6a16", 29.0, 8, 5120, 13824)]

    assert stated("zeroquant-fp6/s53-cublas-best", Evidence(rows)).measured.value == 2.5


def test_down_proj_is_compared_at_its_own_bits():
    rows = [a_time("flexq-w6a6", 10.0, 1, 4096, 11008), a_time("abq-w6a6", 50.0, 1, 4096, 11008)]
    of_down = [a_time("flexq-w6a8", 10.0, 1, 4096, 11008), a_time("abq-w6a8", 12.0, 1, 4096, 11008)]

    assert stated("flexq/s53-abq-m1", Evidence(rows)).measured is None
    assert stated("flexq/s53-abq-m1", Evidence([*rows, *of_down])).measured.value == 1.2


@pytest.mark.parametrize(
    ("ours", "kind"), [(2.4, "reproduced"), (6.0, "order holds"), (0.9, "differs")]
)
def test_a_ratio_is_judged_by_size_then_by_order(ours, kind):
    rows = [
        a_time("cublas-w8a8[gemmex-sums]", 10.0 * ours),
        a_time("flexq-w6a6[+evict-first]", 10.0),
    ]

    assert stated("flexq/s54-latency", Evidence(rows)).kind == kind


@pytest.mark.parametrize(
    ("without", "kind"), [(9.95, "reproduced"), (9.0, "differs"), (11.0, "reproduced")]
)
def test_bound_of_an_overhead_holds_or_not(without, kind):
    rows = [a_time("flexq-w6a6[+evict-first]", 10.0), a_time("flexq-w6a6[-dequant]", without)]

    assert stated("flexq/s54-dequant", Evidence(rows)).kind == kind


def test_every_statement_is_measured_or_says_why_not():
    for paper in published_papers():
        for statement in paper.statement:
            assert (statement.ours is None) == bool(statement.cannot), (paper.key, statement.id)


@pytest.mark.parametrize(("model", "kind"), [("llama-7b", "reproduced"), ("small", "not here")])
def test_perplexity_is_judged_on_the_named_model_only(model, kind):
    scores = [a_score("abq-w2*a8", 7.6, model=model)]

    assert stated("abq-llm/abstract-ppl", Evidence(scores=scores)).kind == kind


@pytest.mark.parametrize(
    ("model", "ours", "kind"),
    [
        ("llama-7b", 5000.0, "reproduced"),
        ("llama-7b", 800.0, "differs"),
        ("small", 5000.0, "not here"),
    ],
)
def test_lower_bound_of_a_perplexity_is_of_the_papers_models(model, ours, kind):
    scores = [a_score("smoothquant-w3a3", ours, model=model)]

    assert stated("atom/s52-ppl-others", Evidence(scores=scores)).kind == kind


@pytest.mark.parametrize(("model", "kind"), [("llama-7b", "reproduced"), ("small", "order holds")])
def test_bound_of_a_change_on_other_models_is_its_sign(model, kind):
    scores = [a_score("fp16", 5.0, model=model), a_score("flexq-w6ax", 5.02, model=model)]

    assert stated("flexq/abstract-ppl", Evidence(scores=scores)).kind == kind


@pytest.mark.parametrize(("ms", "kind"), [(40.0, "reproduced"), (130.0, "differs")])
def test_time_of_a_token_is_of_the_stated_batch(ms, kind):
    one = replace(a_serving("atom-w4a4", 1.0, kv_bits=4), token_p50_ms=ms)
    other = replace(one, batch_limit=8, token_p50_ms=1.0)

    assert stated("atom/s532-latency", Evidence(servings=[one, other])).kind == kind


@pytest.mark.parametrize(("norm_us", "kind"), [(9.0, "reproduced"), (11.0, "differs")])
def test_share_of_layers_must_hold_at_every_batch(norm_us, kind):
    parts = [{"part": "qkv_proj", "us": 60.0}, {"part": "attention", "us": 30.0}]
    rows = [
        replace(a_decode("fp16", 1.0, batch=batch), parts=[*parts, {"part": "norm", "us": us}])
        for batch, us in ((1, 1.0), (8, norm_us))
    ]

    assert stated("atom/s3-share", Evidence(decodes=[*rows, a_decode("fp16", 1.0)])).kind == kind


def test_places_of_the_text_are_of_their_table_or_figure():
    (statement,) = [s for s in get_paper("flexq").statement if s.id == "s54-latency"]
    (served,) = [s for s in get_paper("atom").statement if s.id == "s532-fp16"]

    assert statement.is_about("table-6")
    assert not statement.is_about("table-60")
    assert served.is_about("figure-11")
    assert not served.is_about("figure-1")


def test_serving_with_memory_limit_is_compared_at_equal_memory():
    rows = [a_serving("fp16", 100.0), a_serving("atom-w4a4", 110.0, kv_bits=4)]
    limited = [a_serving("fp16", 10.0, limit=1), a_serving("atom-w4a4", 70.0, limit=1, kv_bits=4)]

    alone = stated("atom/s532-fp16", Evidence(servings=rows))
    assert alone.measured.value == pytest.approx(1.1)
    assert "same batch" in alone.verdict
    both = stated("atom/s532-fp16", Evidence(servings=[*rows, *limited]))
    assert both.measured.value == pytest.approx(7.0)
    assert both.kind == "reproduced"


def test_memory_of_dgq_is_the_inverse_ratio():
    rows = [a_decode("smoothquant-w8a8", 1.0, memory=20), a_decode("dgq-w4a8", 1.0, memory=11)]

    assert stated("dgq/s5-memory", Evidence(decodes=rows)).measured.value == pytest.approx(0.55)


def test_prefill_is_of_long_prompts():
    short = [a_decode("w4a16", 1.0), a_decode("dgq-w4a8", 1.0)]
    long = [
        replace(a_decode(scheme, 1.0, prompt=2046, new=2), prefill_ms=ms)
        for scheme, ms in (("w4a16", 30.0), ("dgq-w4a8", 10.0))
    ]

    assert stated("dgq/s5-speed", Evidence(decodes=short)).measured is None
    assert stated("dgq/s5-speed", Evidence(decodes=long)).measured.value == pytest.approx(3.0)


def test_operations_of_attention_are_compared_at_the_stated_batch():
    rows = [
        a_time(label, us, None, None, None, stage="op", operation="decoder_attention",
               parameters=f"batch={batch},context=1024,heads=32,kv_heads=32,head_dim=128")
        for batch, label, us in (
            (128, "decoder-attention", 300.0), (128, "decoder-attention[kv4]", 100.0),
            (8, "decoder-attention", 10.0), (8, "decoder-attention[kv4]", 100.0),
        )
    ]  # fmt: skip

    assert stated("atom/s531-attention-fp16", Evidence(rows)).measured.value == pytest.approx(3.0)


def test_mismatch_marks_the_cells_that_it_names():
    ((_, table),) = select_tables("flexq/table-5")
    marks = [m for m in get_paper("flexq").mismatches(table) if m.kind == "misprint"]
    marked = [c for c in table.cells() if any(m.marks(c) for m in marks)]

    assert [c.value for c in marked] == [11.90]
    whole = Mismatch(kind="text", where="table-5", about="x")
    assert not any(whole.marks(c) for c in table.cells())


def test_only_what_is_missing_is_measured():
    rows = printed_times("flexq/table-6")
    ((paper, table),) = select_tables("flexq/table-6")

    assert steps_of(paper, table, Evidence(rows), GPU) == []
    (step,) = steps_of(paper, table, Evidence(rows[1:]), GPU)
    assert step.arguments == ("run",)
    assert 'kernels = ["cublas-w8a8[gemmex-sums]"]' in step.suite
    assert 'shapes = ["4096x4096"]' in step.suite


def planned(step, folder):
    (folder / "missing.toml").write_text(step.suite)
    return load_suite(folder / "missing.toml").cases(labels("cuda"))


def test_figure_measures_what_its_statements_compare(tmp_path):
    of = {f"{p.key}/{figure.id}": (p, figure) for p, figure in named_figures(published_papers())}
    (step,) = steps_of(*of["atom/figure-10"], Evidence(), GPU)
    cases = planned(step, tmp_path)

    gemms = [c for c in cases if c.operation == "linear"]
    assert {c.gemm.m for c in gemms} == {512}
    assert {c.label for c in gemms} == {"atom-w4a4", "cublas-fp16", "cublaslt-w8a8"}
    assert len(gemms) == 3 * 4
    assert {c.label for c in cases if c not in gemms} == {
        "decoder-attention", "decoder-attention[kv8]", "decoder-attention[kv4]",
    }  # fmt: skip
    known = [replace(a_time("empty", 1.0), case=case.key) for case in cases[1:]]
    (step,) = steps_of(*of["atom/figure-10"], Evidence(known), GPU)
    assert planned(step, tmp_path) == cases[:1]


def test_down_proj_of_figure_10_has_its_own_bits(tmp_path):
    of = {f"{p.key}/{figure.id}": (p, figure) for p, figure in named_figures(published_papers())}
    (step,) = steps_of(*of["flexq/figure-10"], Evidence(), GPU)

    of_down = {c.label for c in planned(step, tmp_path) if c.shape == (4096, 11008)}

    assert of_down == {"flexq-w6a8", "abq-w6a8", "cublas-w8a8[gemmex-sums]"}


def test_decoding_leaves_out_schemes_that_have_every_length():
    ((paper, table),) = select_tables("abq-llm/table-12")
    done = [a_decode("fp16", 1.0, new=new) for new in (128, 256, 512, 1024)]

    first, second, _ = steps_of(paper, table, Evidence(decodes=done), GPU)

    assert "fp16" not in first.arguments[first.arguments.index("--scheme") + 1].split(",")
    assert "fp16" in second.arguments[second.arguments.index("--scheme") + 1].split(",")


def test_accuracy_of_a_named_model_follows_the_protocol():
    ((paper, table),) = select_tables("flexq/table-2")
    inputs = AccuracyInputs("/models/llama-7b", ("wikitext2=wikitext:/data/wiki.test.raw",))

    assert steps_of(paper, table, Evidence(), "", AccuracyInputs()) == []
    (step,) = steps_of(paper, table, Evidence(), "", inputs)

    line = shlex.join(step.arguments)
    assert line.startswith("accuracy --model /models/llama-7b --through reference --schemes ")
    assert "flexq-w6ax" in line
    assert "--context 2048 --bos text" in line
    known = [
        a_score(scheme, 6.0, model="llama-7b", task=task)
        for scheme in ("fp16", "smoothquant-w6a6", "omniquant-w6a6", "duquant-w6a6", "flexq-w6ax")
        for task in ("wikitext2", "c4")
    ]
    assert steps_of(paper, table, Evidence(scores=known), "", inputs) == []


@pytest.mark.parametrize("given", ["wikitext2=text:/wiki.txt", "wikitext=/w.raw", "wikitext2"])
def test_accuracy_of_a_gguf_folder_on_the_given_text_resumes(tmp_path, given):
    ((paper, table),) = select_tables("abq-llm/table-1")
    inputs = AccuracyInputs(str(tmp_path), (given,))
    (tmp_path / "Small.Q4_1.gguf").touch()
    schemes = ("fp16", "abq-w4a16", "abq-w3a16", "abq-w2a16", "abq-w2*a16")
    known = [a_score(scheme, 6.0, model="Small.Q4_1") for scheme in schemes]

    assert steps_of(paper, table, Evidence(scores=known[:-1]), "", inputs)
    assert not steps_of(paper, table, Evidence(scores=known), "", inputs)


def test_reasons_name_what_a_machine_lacks():
    of = {f"{paper.key}/{table.id}": (paper, table) for paper, table in select_tables(None)}

    assert "GPT-4" in why_not_here(*of["zeroquant-fp6/table-a.1"], GPU, "folder")
    assert "--model FOLDER, of llama-13b" in why_not_here(*of["flexq/table-2"], GPU, "")
    assert why_not_here(*of["flexq/table-6"], "", "") == "this machine has no GPU"
    assert why_not_here(*of["flexq/table-6"], GPU, "") == ""


def test_records_of_the_papers_were_measured():
    files = sorted(EXAMPLES.glob("*/*papers*.jsonl.gz"))

    assert files
    assert [f.name for f in files if '"rebuilt"' in gzip.decompress(f.read_bytes()).decode()] == []


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The evidence of the records that came with the papers' runs."""
    url = f"sqlite:///{tmp_path_factory.mktemp('papers') / 'examples.sqlite'}"
    with open_database(url) as database, database.session() as session:
        for file in sorted(EXAMPLES.glob("*/*papers*.jsonl.gz")):
            import_file(session, file)
        return read_evidence(session)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["flexq/table-6", "abq-llm/table-4", "abq-llm/table-13", "abq-llm/table-14",
     "zeroquant-fp6/table-b.1"],
)  # fmt: skip
def test_every_number_of_a_kernel_table_has_ours_and_verdict(examples, name):
    found = judged(name, examples)
    ((paper, table),) = select_tables(name)
    first = paper.kernel(next(table.cells()))
    slower = [
        replace(row, median_us=0.01 * row.median_us) if first.startswith(row.kernel) else row
        for row in examples.results
    ]

    assert found.measured == found.printed
    assert found.kind != "not here"
    changed = judged(name, Evidence(slower))
    assert (changed.kind, changed.verdict) != (found.kind, found.verdict)


@pytest.mark.slow
def test_statements_of_the_papers_are_judged_by_the_examples(examples):
    results = [statement_result(p, s, examples) for p in published_papers() for s in p.statement]

    assert sum(result.kind != "not here" for result in results) >= 40
    table = judged("abq-llm/table-12", examples)
    assert table.measured == table.printed == 120
