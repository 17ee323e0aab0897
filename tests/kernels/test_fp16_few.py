"""How the FP16 kernel for few tokens shares out rows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flexq_bench.kernels.cuda.fp16 import FastestFp16Gemm, FewTokensConfig
from flexq_bench.kernels.runtime.gpu import OF_TARGET
from flexq_bench.workloads.gemm import GemmWorkload

SHAPES = [(1, 1), (100, 300), (5120, 13824), (15360, 5120), (27648, 5120), (32000, 4096)]
DEEP = FewTokensConfig(3, 16, 4, 64, 0, 1, 1)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("m", [1, 8, 9, 16])
def test_untuned_configuration_is_compiled_and_fits(on_gpu, target, m):
    on_gpu(target)
    kernel = FastestFp16Gemm()

    for n, k in SHAPES:
        chosen = kernel.default_config(GemmWorkload(m, n, k))
        assert isinstance(chosen, FewTokensConfig)
        assert chosen.build in kernel.builds()
        assert chosen.shared_bytes <= OF_TARGET[target].block_shared_bytes


def test_few_rows_use_one_block_per_sm(on_gpu):
    on_gpu("sm_90")
    kernel = FastestFp16Gemm()

    few = kernel.default_config(GemmWorkload(1, 5120, 13824))
    many = kernel.default_config(GemmWorkload(1, 27648, 5120))

    assert few.grid(1, 5120, 132)[0] == 128  # of 5 octets each: 97 % of the SMs' time
    assert many.grid(1, 27648, 132)[0] > 132


@pytest.mark.parametrize("config", [DEEP, FewTokensConfig(5, 8, 2, 128, 0, 0, 1)])
@pytest.mark.parametrize("n", [1, 33, 5120, 15360, 32003])
def test_no_block_has_more_octets_than_turns(config, n):
    octets = -(-n // 8)
    blocks = config.grid(1, n, 132)[0]
    ends = [octets * block // blocks for block in range(blocks + 1)]  # as csrc/fp16/few_tokens.cu
    shares = [after - before for before, after in pairwise(ends)]

    assert sum(shares) == octets
    assert min(shares) >= 1
    assert max(shares) - min(shares) <= 1
    if not config.blocks_an_sm:
        assert max(shares) <= config.octets


def test_sums_lie_beside_rings_that_go_on():
    alone = FewTokensConfig(3, 16, 4, 64, 0, 0, 1)

    assert alone.shared_bytes == 16 * 4 * 3 * 1024
    assert DEEP.shared_bytes == alone.shared_bytes + 2 * 16 * 3 * 256


def test_more_tokens_need_a_second_row_of_blocks():
    config = FewTokensConfig(2, 8, 2, 128, 0, 0, 2)

    assert config.grid(16, 100, 132) == (7, 1, 1)
    assert config.grid(17, 100, 132) == (7, 2, 1)
