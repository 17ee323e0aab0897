from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexq_bench.workloads.case import (
    CacheMode,
    Case,
    Stage,
    bits_label,
    kernel_label,
    parse_kernel_label,
)
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import MAX_DIMENSION

LABELS = ("flexq-w6a6", "flexq-w6a6[+evict-first]", "abq-w2*a8", "cublas-w8a8[gemmex]", "read-6")
STAGES: tuple[Stage, ...] = ("gemm", "linear")
CACHES: tuple[CacheMode, ...] = ("cold", "hot")
sizes = st.integers(1, MAX_DIMENSION)


@pytest.mark.parametrize("label", LABELS)
def test_a_label_reads_back_as_itself(label):
    assert kernel_label(*parse_kernel_label(label)) == label


@pytest.mark.parametrize(
    "label", ["", "FlexQ", "flexq w6a6", "flexq[]", "flexq[a][b]", "[vanilla]"]
)
def test_invalid_label_is_refused(label):
    with pytest.raises(WorkloadError) as caught:
        parse_kernel_label(label)

    assert repr(label) in str(caught.value)


@given(st.sampled_from(LABELS), st.sampled_from(STAGES), st.sampled_from(CACHES), sizes, sizes)
def test_a_case_reads_back_from_its_key(label, stage, cache, m, n):
    kernel, variant = parse_kernel_label(label)
    case = Case(kernel, GemmWorkload(m, n, 64), variant=variant, stage=stage, cache=cache)

    assert Case.from_key(case.key) == case


@pytest.mark.parametrize(
    "key", ["", "flexq-w6a6", "flexq-w6a6 gemm warm m1n1k1", "flexq-w6a6 gemm cold m0n1k1"]
)
def test_what_is_no_key_is_refused(key):
    with pytest.raises(WorkloadError):
        Case.from_key(key)


def test_labels_are_not_part_of_case_identity():
    gemm = GemmWorkload(1, 4096, 4096)

    assert Case("empty", gemm, model="llama-7b") == Case("empty", gemm, layer="o_proj")


@pytest.mark.parametrize("size", [0, -1, MAX_DIMENSION + 1])
@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_out_of_range_size_is_refused(name, size):
    with pytest.raises(WorkloadError, match=f"{name.upper()} must be .* got {size:,}"):
        GemmWorkload(**{"m": 1, "n": 1, "k": 1, name: size})


@pytest.mark.parametrize(
    ("bits", "group", "nbytes"),
    [
        (6, 128, 8 * 750 + 8 * 8 * 2),  # 1000 values of k are 8 groups, the last one not full
        (8, None, 8 * 1000 + 8 * 2),
        (16, None, 8 * 1000 * 2),
    ],
)
def test_weight_bytes_count_codes_and_scales(bits, group, nbytes):
    assert GemmWorkload(1, 8, 1000).weight_bytes(bits, group) == nbytes


@pytest.mark.parametrize(
    ("operation", "weight_bits", "act_bits", "label"),
    [
        ("linear", 16, 16, "w16a16"),
        ("linear", 6, 8, "w6a8"),
        ("attention_decode", 16, 16, ""),
        ("norm_quantize", 16, 8, "a8"),
        ("grouped_linear", 4, 16, "w4"),
        ("", 0, 0, ""),
    ],
)
def test_only_linear_layers_show_formats_of_sixteen_bits(operation, weight_bits, act_bits, label):
    assert bits_label(operation, weight_bits, act_bits) == label
