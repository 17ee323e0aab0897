"""Plans of runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.kernels import registry
from flexq_bench.kernels.external.described import DescribedKernel
from flexq_bench.runs.plan import build_plan, cases_of_keys, is_probe
from flexq_bench.workloads.suite import Group, Shape, Suite

STAGES = (("gemm", "linear"), ("linear",))


def a_suite(*kernels: str, caches=("cold",)) -> Suite:
    shapes = (Shape(256, 128, "a"), Shape(64, 128, "b"))
    return Suite("own", "", "", (Group(kernels, (1, 8), shapes, caches=caches),))


def test_plan_has_one_floor_per_shape_and_weight_width():
    plan = build_plan(a_suite("flexq-w6a6", "flexq-w6a8", "cublas-fp16"), "cpu", None)

    probes = [case.key for case in plan.cases if is_probe(case.kernel)]
    assert sorted(probes) == sorted(
        ["empty gemm cold m1n1k1"]
        + [f"read-{bits} gemm cold m1n{n}k128" for bits in (6, 16) for n in (64, 256)]
    )


def test_hot_case_has_hot_floor():
    plan = build_plan(a_suite("cublas-fp16", caches=("hot",)), "cpu", None)

    assert "read-16 gemm hot m1n64k128" in plan.keys
    assert "read-16 gemm cold m1n64k128" not in plan.keys


def test_overlapping_launches_have_an_overlapping_floor():
    plan = build_plan(a_suite("flexq", "cublas-fp16").under(("boost", "sustained")), "cuda", (9, 0))

    floors = {case.key for case in plan.cases if case.label.startswith("read-")}
    assert floors == {
        f"{label} gemm cold m1n{n}k128{regime}"
        for label in ("read-6[overlap]", "read-16")
        for n in (64, 256)
        for regime in ("", " sustained")
    }


def test_cases_of_a_shape_follow_its_floors():
    plan = build_plan(a_suite("flexq*", "cublas*"), "cpu", None)

    shapes = [(case.gemm.n, case.gemm.k) for case in plan.cases]
    assert len(dict.fromkeys(shapes)) == sum(
        shape != before for before, shape in zip([None, *shapes], shapes, strict=False)
    )
    for shape in dict.fromkeys(shapes):
        kinds = [is_probe(c.kernel) for c in plan.cases if (c.gemm.n, c.gemm.k) == shape]
        assert kinds == sorted(kinds, reverse=True)


def test_floor_in_the_suite_is_planned_once():
    plan = build_plan(a_suite("cublas-fp16", "read-16", "empty"), "cpu", None)

    assert len(set(plan.keys)) == len(plan.keys)


def test_glob_skips_kernels_that_the_gpu_cannot_run():
    old = (7, 5)
    by_label = build_plan(a_suite("flexq-w6a6"), "cuda", old)

    assert "flexq-w6a6 gemm cold m1n64k128" in by_label.keys
    with pytest.raises(UsageError, match="nothing to measure"):
        build_plan(a_suite("flexq*"), "cuda", old)


def test_external_kernel_is_planned_in_its_stages():
    fp16 = registry.resolve("cublas-fp16", "cpu").spec
    spec = replace(fp16, name="acme.one", stages=("gemm",), source_hash="0" * 64)
    groups = [Group(("acme.one",), (1,), (Shape(64, 128, "a"),), stages) for stages in STAGES]
    registry.add([DescribedKernel(spec)])
    try:
        both, lacking = (build_plan(Suite("own", "", "", (one,)), "cpu", None) for one in groups)
    finally:
        registry.remove([spec.label])

    assert [case.stage for case in both.cases if case.label == "acme.one"] == ["gemm"]
    assert [case.stage for case in lacking.cases if case.label == "acme.one"] == ["linear"]


def test_unknown_kernel_is_refused_unless_a_suite_file_names_it():
    suite = a_suite("cublas-fp16", "flexq-w9a9")

    assert build_plan(suite, "cpu", None).skipped == ("flexq-w9a9",)
    with pytest.raises(UsageError, match="no kernel 'flexq-w9a9': there are flexq-w6a"):
        build_plan(suite, "cpu", None, requested_kernels=["flexq-w9a9"])


def test_every_registered_kernel_can_be_planned():
    for backend, capability in (("cpu", None), ("cuda", (9, 0))):
        every = registry.labels(backend)
        labels = [x for x in every if registry.resolve(x, backend).spec.operation == "linear"]
        plan = build_plan(a_suite(*labels), backend, capability)
        assert {case.label for case in plan.cases} == set(labels)


def test_stored_keys_become_cases_with_layer_names():
    known = Shape(64, 128, "o_proj", "llama-7b")
    keys = ["flexq-w6a6[-evict-first] linear hot m4n64k128", "read-6 gemm cold m1n8k8"]

    named, unnamed = cases_of_keys(keys, [known])

    assert [named.key, unnamed.key] == keys
    assert (named.variant, named.model, named.layer) == ("-evict-first", "llama-7b", "o_proj")
    assert (unnamed.model, unnamed.layer) == ("", "")
