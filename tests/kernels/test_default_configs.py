"""What runs without tuning: always something that is compiled, whatever the shape and the GPU."""

from __future__ import annotations

import pytest

from kernels.cuda.imma_configs import every_few_nibbles
from kernels.cuda.minifloat import MinifloatGemm, choice_for
from kernels.cuda.nibbles import config_for
from workloads.gemm import GemmWorkload

SHAPES = [
    (1, 1),
    (100, 300),
    (4096, 4096),
    (5120, 13824),
    (8192, 28672),
    (10240, 8192),
    (28672, 8192),
]


@pytest.mark.parametrize("sms", [16, 84, 108, 132])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_rule_of_thumb_chooses_among_the_candidates(sms: int, n: int, k: int) -> None:
    gemm = GemmWorkload(8, n, k)

    assert config_for(gemm, sms) in every_few_nibbles()
    for variant in ("", "fine"):
        kernel = MinifloatGemm(6, variant)
        choice = choice_for(gemm, sms, grouped=variant == "fine")
        assert choice in [tuple(c.as_dict().values())[:-1] for c in kernel.configs(1)]


def test_more_rows_for_each_sm_need_fewer_warps_to_share_one() -> None:
    warps = [
        choice_for(GemmWorkload(1, n, 8192), 132, grouped=False)[1] for n in (4096, 12288, 28672)
    ]

    assert warps == sorted(warps, reverse=True)
    assert config_for(GemmWorkload(9, 4096, 4096), 132) is None
