"""Charging a step's time to its parts."""

from __future__ import annotations

import pytest

from flexq_bench.decode.profile import Launch, parts_of, shares

BLOCK = (
    "decode_norm",
    "gemm",
    "decode_attention",
    "decode_attention_sum",
    "gemm",
    "scale",
    "decode_norm",
    "gemm",
    "decode_silu_mul",
    "gemm",
)
STEP = ("index_select", *BLOCK, *BLOCK, "decode_norm", "gemm", "scale", "decode_pick")


def test_linear_layers_are_identified_by_fused_kernels_around_them():
    parts = parts_of(STEP, "llama", 2)

    one = ["norm", "qkv_proj", "attention", "attention", "o_proj", "o_proj"]
    one += ["norm", "gate_up_proj", "silu_mul", "down_proj"]
    ends = ["norm", "lm_head", "lm_head", "sampling"]
    assert parts == ["embedding", *one, *one, *ends]


def test_overlapping_kernels_count_their_added_time():
    launches = [
        Launch(name, start_us=10.0 * i, end_us=10.0 * i + 15.0) for i, name in enumerate(STEP)
    ]

    found = shares(launches, "llama", 2)

    assert sum(share.us for share in found) == pytest.approx(launches[-1].end_us)
    assert {s.part: (s.count, s.us) for s in found}["attention"] == (4, 40.0)
    assert {s.part: (s.count, s.us) for s in found}["o_proj"] == (4, 40.0)


def test_a_profile_of_another_depth_is_refused():
    with pytest.raises(ValueError, match="3 layers has 7 norms, the profile has 5"):
        parts_of(STEP, "llama", 3)
