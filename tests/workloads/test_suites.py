from __future__ import annotations

from collections import defaultdict

import pytest

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.models import get_model
from flexq_bench.workloads.suite import MAX_CASES, Group, Shape, Suite, layer_shapes
from flexq_bench.workloads.suites import list_suites, load_suite, read_suite

LABELS = (
    "flexq-w6a6",
    "flexq-w6a6[vanilla]",
    "flexq-w6a6[-evict-first]",
    "flexq-w6a8",
    "cublaslt-w8a8",
    "cublas-fp16",
    "abq-w2a8",
    "abq-w2*a8",
    "read-6",
    "read-8",
    "read-16",
    "empty",
)


SQUARE = Shape(256, 256, "256x256")


def a_suite(*groups):
    return Suite("mine", "for a test", "", groups)


def a_group(kernels=("flexq-w6a6",), m=(1,), shapes=(SQUARE,)):
    return Group(kernels, m, shapes)


def labels_of(suite):
    return [case.label for case in suite.cases(LABELS)]


def test_a_variant_becomes_part_of_the_case():
    (case,) = a_suite(a_group(kernels=("flexq-w6a6[-evict-first]",))).cases(LABELS)

    assert (case.kernel, case.variant) == ("flexq-w6a6", "-evict-first")


def test_unavailable_labels_of_a_suite_are_reported():
    suite = a_suite(a_group(kernels=("flexq-w6a6", "fp6-w6a16", "dgq-*", "flexq-w6a6[turbo]")))

    assert suite.unmatched(LABELS) == ("fp6-w6a16", "flexq-w6a6[turbo]")


def test_filtered_label_is_not_reported():
    suite = a_suite(a_group(kernels=("flexq-w6a6", "fp6-w6a16")))

    assert suite.restrict(kernels=["flexq-*"]).unmatched(LABELS) == ()


def test_unavailable_requested_label_is_reported():
    suite = a_suite(a_group(kernels=("flexq*",))).restrict(kernels=["flexq-w4a4"])

    assert suite.cases(LABELS) == ()
    assert suite.unmatched(LABELS) == ("flexq-w4a4",)


def test_cases_are_ordered_by_shape_m_and_kernel():
    big, small = Shape(512, 256, "big"), Shape(256, 512, "small")
    groups = [a_group((label,), (1, 8), (big, small)) for label in ("cublas-fp16", "flexq-w6a6")]
    suite = a_suite(*groups)

    order = [(c.gemm.n, c.gemm.m, c.label) for c in suite.cases(LABELS)]

    assert order == [
        (n, m, label) for n in (256, 512) for m in (1, 8) for label in ("flexq-w6a6", "cublas-fp16")
    ]


def test_models_with_equal_layers_share_a_case():
    models = [get_model("llama-2-7b"), get_model("llama-7b"), get_model("opt-6.7b")]
    suite = a_suite(a_group(shapes=layer_shapes(models, "fused")))

    cases = suite.cases(LABELS)

    assert len({case.key for case in cases}) == len(cases) == 6
    assert {case.model for case in cases if case.gemm.n == 12288} == {"llama-2-7b"}


def test_suite_with_too_many_cases_is_refused():
    suite = a_suite(a_group(kernels=("*",), m=tuple(range(1, MAX_CASES))))

    with pytest.raises(WorkloadError, match=r"makes [0-9,]+ cases, at most 100,000"):
        suite.cases(LABELS)


def test_restrictions_keep_only_what_has_all_of_them():
    suite = load_suite("paper-fig10").restrict(
        models=["llama-7b"], layers=["o_proj", "down_proj"], m=[1, 8], kernels=["flexq-*"]
    )

    cases = suite.cases(LABELS)

    assert {case.model for case in cases} == {"llama-7b"}
    assert {case.layer for case in cases} == {"o_proj", "down_proj"}
    assert {case.gemm.m for case in cases} == {1, 8}
    assert {case.label for case in cases} == {"flexq-w6a6", "flexq-w6a8"}
    assert len(cases) == 8


def test_restricting_twice_asks_for_both():
    suite = load_suite("smoke").restrict(kernels=["flexq-*"]).restrict(kernels=["*a8"])

    assert set(labels_of(suite)) == {"flexq-w6a8"}


def test_restricting_by_stage_and_cache_keeps_those():
    nightly = load_suite("nightly")

    linear = nightly.restrict(stages=["linear"]).cases(LABELS)
    hot = nightly.restrict(caches=["hot"]).cases(LABELS)

    assert {case.stage for case in linear} == {"linear"}
    assert {case.cache for case in hot} == {"hot"}


@pytest.mark.parametrize(
    ("restriction", "complaint"),
    [
        ({"models": ["opt-6.7b"]}, "no model 'opt-6.7b': it has opt-30b, "),
        ({"layers": ["gate_up_proj"]}, "no layer 'gate_up_proj': it has gate_proj, "),
        ({"m": [32]}, "no M=32: it has 1, 4, 8, 16"),
        ({"kernels": ["cublas-fp17"]}, "no kernel 'cublas-fp17': it has cublas-fp16, "),
        ({"kernels": ["read-6"]}, "no kernel 'read-6': it has "),
        ({"kernels": ["Not A Kernel"]}, "written name or name[variant]"),
        ({"stages": ["linear"]}, "no stage 'linear': it has gemm"),
        ({"models": ["opt-30b"], "layers": ["o_proj"]}, "nothing in suite paper-fig10 fits all"),
    ],
)
def test_unknown_restriction_lists_values_of_the_suite(restriction, complaint):
    with pytest.raises(WorkloadError) as caught:
        load_suite("paper-fig10").restrict(**restriction)

    assert complaint in str(caught.value)


def test_the_promised_suites_are_there():
    promised = (
        "collectives",
        "experts",
        "nightly",
        "operators",
        "paper-abq-table13",
        "paper-abq-table4",
        "paper-atom",
        "paper-fig10",
        "paper-fp6",
        "paper-table6",
        "prefill",
        "serve",
        "smoke",
    )

    assert list_suites() == promised


@pytest.mark.parametrize("name", list_suites())
def test_bundled_suites_load_with_descriptions(name):
    suite = load_suite(name)

    assert suite.name == name
    assert suite.description
    assert suite.source


def test_serve_has_every_launch_of_a_step_at_each_size():
    operators = ("decoder-attention", "decoder-norm", "decoder-silu-mul")
    cases = load_suite("serve").cases((*LABELS, *operators))

    tokens = defaultdict(set)
    for case in cases:
        if case.operation == "linear":
            tokens[case.layer].add(case.gemm.m)
        else:
            values = dict(case.workload.values)
            tokens[case.kernel].add(values.get("tokens", values.get("batch")))
    layers = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert tokens.keys() == {*layers, *operators}
    assert tokens.pop("decoder-attention") == {1, 8, 32, 128}
    assert set(map(frozenset, tokens.values())) == {frozenset({1, 8, 32, 128, 512})}


def test_smoke_suite_is_small_and_covers_both_stages():
    cases = load_suite("smoke").cases(LABELS)

    assert 20 <= len(cases) <= 30
    assert all(case.gemm.n * case.gemm.k <= 1 << 20 for case in cases)
    assert {1, 4, 8} == {case.gemm.m for case in cases}
    assert {"gemm", "linear"} == {case.stage for case in cases}
    assert any(case.gemm.k % 128 for case in cases)
    assert any(not case.gemm.k % 128 for case in cases)


def test_smoke_measures_the_floor_of_each_of_its_shapes():
    cases = load_suite("smoke").cases(LABELS)

    shapes = {(c.gemm.n, c.gemm.k) for c in cases}
    floors = {(c.gemm.n, c.gemm.k) for c in cases if c.kernel == "read-6"}

    assert floors == shapes


def test_fig10_is_four_layers_of_five_models_at_four_sizes():
    cases = load_suite("paper-fig10").restrict(kernels=["flexq-w6a6"]).cases(LABELS)

    assert len(cases) == 5 * 4 * 4
    assert {(c.gemm.n, c.gemm.k) for c in cases if c.model == "llama-2-70b"} == {
        (10240, 8192),
        (8192, 8192),
        (28672, 8192),
        (8192, 28672),
    }


def test_table6_reports_ablations_that_a_backend_has_not():
    suite = load_suite("paper-table6")

    assert {case.label for case in suite.cases(LABELS)} == {"flexq-w6a6[vanilla]", "cublaslt-w8a8"}
    assert suite.unmatched(LABELS) == (
        "cublas-w8a8[gemmex-sums]",
        "flexq-w6a6[+warp-reduction]",
        "flexq-w6a6[+pipeline]",
        "flexq-w6a6[+evict-first]",
        "flexq-w6a6[-dequant]",
    )


def test_prefill_doubles_m_from_16_to_2048():
    assert load_suite("prefill").m == (16, 32, 64, 128, 256, 512, 1024, 2048)


def test_own_suite_is_read_by_path(suite_from):
    suite = suite_from(
        """
        description = "mine"
        [[group]]
        kernels = ["flexq-w6a6"]
        m = "1:2"
        models = ["llama-7b", "opt-6.7b"]
        layers = ["down_proj", "fc2", "k_proj"]
        [[group]]
        kernels = ["cublas*"]
        m = "4"
        shapes = ["100x64"]
        stages = ["linear", "gemm"]
        caches = ["hot"]
        """
    )

    assert (suite.name, suite.source, suite.m) == ("mine", "", (1, 2, 4))
    assert suite.models == ("llama-7b", "opt-6.7b")
    assert suite.layers == ("down_proj", "k_proj", "fc2", "100x64")
    assert len(suite.cases(LABELS)) == 3 * 2 + 2 * 2  # both k_proj are 4096x4096


GROUP = """
description = "mine"
[[group]]
kernels = ["flexq-w6a6"]
m = "1"
shapes = ["64x64"]
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("kernels =", "kernel =", "mine.toml, group 1: no key 'kernel' here: the keys are kernels"),
        ("description", "discription", "mine.toml: no key 'discription' here: the keys are desc"),
        ('description = "mine"', "", "mine.toml: description is missing"),
        ("[[group]]", "[group]", "mine.toml: group must be tables"),
        ('"flexq-w6a6"', '"FlexQ W6A6"', "group 1: kernels: a kernel is written name or"),
        ('["flexq-w6a6"]', "[]", "kernels must be a list of strings, got []"),
        ('["flexq-w6a6"]', "[6]", "kernels must be a list of strings, got [6]"),
        ('m = "1"', "m = 1", "group 1: m must be a string"),
        ('m = "1"', 'm = "0"', "group 1: m: '0' is out of range: sizes are from 1 to"),
        ("64x64", "64", "group 1: shapes: a shape is written NxK"),
        ("64x64", "64x0", "group 1: shapes: K must be from 1"),
        ('shapes = ["64x64"]', "", "group 1: give either models or shapes"),
        ("shapes =", 'models = ["llama-7b"]\nshapes =', "give either models or shapes"),
        ("shapes =", 'layers = "fused"\nshapes =', "layers go with models"),
        ('shapes = ["64x64"]', 'models = ["lama-7b"]', "models: no model 'lama-7b': there are lla"),
        (
            'shapes = ["64x64"]',
            'models = ["opt-13b"]\nlayers = "down_proj"',
            "layers: none of opt-13b has a layer 'down_proj'",
        ),
        ("shapes =", 'stages = ["gem"]\nshapes =', "stages: no stage 'gem': there are gemm"),
        ("shapes =", 'caches = ["cool"]\nshapes =', "caches: no cache 'cool': there are cold"),
        ("[[group]]", "[[group]", "mine.toml is not TOML"),
        ("[[group]]", "x = " + "[" * 100_000, "mine.toml is not TOML"),
    ],
)
def test_invalid_suite_file_is_refused_with_location(suite_from, old, new, complaint):
    with pytest.raises(WorkloadError) as caught:
        suite_from(GROUP.replace(old, new, 1))

    assert complaint in str(caught.value)


def test_an_unknown_suite_is_reported_with_the_nearest_first():
    with pytest.raises(WorkloadError, match=r"no suite 'smoek': there are smoke, .*; or give"):
        load_suite("smoek")


@pytest.mark.parametrize("path", ["nowhere/mine.toml", "./mine"])
def test_missing_path_is_refused_in_one_line(path):
    with pytest.raises(WorkloadError, match=r"can't read .*: No such file or directory"):
        load_suite(path)


def test_cases_are_counted_without_making_any():
    labels = ("a", "b")
    shapes = (Shape(64, 64, "q_proj"), Shape(64, 64, "o_proj"), Shape(64, 128, "down_proj"))
    suite = Suite("s", "", "", (Group(("*",), (1, 2, 4), shapes, ("gemm", "linear")),))

    assert suite.count(labels) == len(suite.cases(labels)) == 2 * 3 * 2 * 2


OPERATORS = """
description = "attention and a layer"

[[cases]]
operation = "attention_decode"
kernels = ["sdpa", "flash*"]
parameters = {batch = "1,8", context = [64, 128], heads = 4, kv_heads = 2, layout = "paged"}
model = "tiny"

[[group]]
kernels = ["flexq-w6a6"]
m = "1,8"
shapes = ["64x32"]
"""


@pytest.fixture
def operators(tmp_path):
    path = tmp_path / "operators.toml"
    path.write_text(OPERATORS)
    return read_suite(path)


def test_suite_has_cases_of_any_operation(operators):
    cases = operators.cases(["flash-a", "flexq-w6a6", "sdpa"])

    assert [case.operation for case in cases] == ["linear"] * 2 + ["attention_decode"] * 8
    assert [case.key for case in cases[2:4]] == [
        f"{label} op cold attention_decode:batch=1,context=64,heads=4,kv_heads=2,head_dim=128,"
        "layout=paged,block=16"
        for label in ("flash-a", "sdpa")
    ]
    assert operators.count(["flash-a", "flexq-w6a6", "sdpa"]) == len(cases)
    assert operators.models == ("tiny",)


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"operations": ["linear"]}, 2),
        ({"m": [8]}, 1),
        ({"parameters": {"context": "100:"}}, 2),
        ({"parameters": {"context": "64", "layout": "paged"}}, 2),
        ({"parameters": {"m": "1"}}, 1),
        ({"models": ["tiny"]}, 4),
        ({"stages": ["op"]}, 4),
    ],
)
def test_suite_of_operations_is_restricted_by_parameters(operators, limits, left):
    assert len(operators.restrict(**limits).cases(["flexq-w6a6", "sdpa"])) == left


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"attention_decode"', '"attention_decoed"', "attention_decode"),
        ("heads = 4, ", "", "heads"),
        ("heads = 4", "heads = 0", "heads"),
        ('layout = "paged"', 'layout = "pagde"', "paged"),
        ("[64, 128]", "[]", "sizes or words"),
        ("[64, 128]", '"1:99999"', "values"),
        ('"attention_decode"', '"linear"', "group"),
    ],
)
def test_invalid_cases_of_a_suite_are_refused(tmp_path, old, new, named):
    path = tmp_path / "bad.toml"
    path.write_text(OPERATORS.replace(old, new))

    with pytest.raises(WorkloadError, match=named):
        read_suite(path)
