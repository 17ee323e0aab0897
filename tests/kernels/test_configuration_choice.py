"""What runs where nothing was timed."""

from __future__ import annotations

from itertools import product

import pytest

from flexq_bench.kernels.cuda.imma.configuration_choice import (
    DUAL_GRAINED,
    FLEXQ,
    TWO_LEVEL,
    bucket_of,
)
from flexq_bench.kernels.cuda.imma.configurations import (
    SIX_BITS,
    ClusterConfig,
    ImmaConfig,
    PersistentConfig,
    TiledConfig,
    WgmmaConfig,
)
from flexq_bench.kernels.runtime.gpu import Device
from flexq_bench.kernels.runtime.occupancy import occupancy
from flexq_bench.workloads.gemm import GemmWorkload

H100, H200 = Device(132, 3352), Device(132, 4917)
TOKENS = (1, 3, 8, 9, 16, 17, 32, 33, 64, 100, 512, 4096)
PERSISTENT = [c for c in FLEXQ.every() if isinstance(c, PersistentConfig)]
SHAPES = ((16, 128), (8, 1), (100, 576), (4096, 4096), (28672, 8192), (65536, 512), (512, 65536))


def configs_for(candidates, m, n=1 << 16, k=4096, *, in_mma_order, sms=132):
    return candidates.for_gemm(GemmWorkload(m, n, k), sms, in_mma_order=in_mma_order)


@pytest.mark.parametrize("sms", [40, 84, 108, 132])
@pytest.mark.parametrize("in_mma_order", [False, True])
def test_every_shape_gets_a_configuration_that_can_run(sms, in_mma_order):
    for m in TOKENS:
        for n, k in SHAPES:
            can_run = configs_for(FLEXQ, m, n, k, in_mma_order=in_mma_order, sms=sms)
            assert FLEXQ.choose(can_run, GemmWorkload(m, n, k), Device(sms, 2000)) in can_run


@pytest.mark.parametrize("in_mma_order", [False, True])
@pytest.mark.parametrize("candidates", [DUAL_GRAINED, TWO_LEVEL], ids=["dgq", "dual"])
def test_dual_grained_kernel_has_own_choice_for_many_tokens(candidates, in_mma_order):
    for m in (33, 40, 64, 100, 512, 4096):
        for n, k in SHAPES:
            fit = configs_for(candidates, m, n, k, in_mma_order=in_mma_order)
            can_run = [c for c in fit if not isinstance(c, ImmaConfig)]
            chosen = candidates.choose(can_run, GemmWorkload(m, n, k), H200)
            assert chosen in can_run
            assert not isinstance(chosen, WgmmaConfig) or chosen.stages > 2


def test_without_clusters_the_choice_has_none():
    for m in TOKENS:
        can_run = [c for c in configs_for(FLEXQ, m, in_mma_order=False) if c.k_split == 1]
        assert FLEXQ.choose(can_run, GemmWorkload(m, 4096, 4096), Device(84, 1008)).k_split == 1


def test_tiled_kernel_for_many_rows_above_16_tokens():
    configs = configs_for(FLEXQ, 32, in_mma_order=False)

    for n, kind in ((28672, TiledConfig), (2048, ImmaConfig)):
        assert isinstance(FLEXQ.choose(configs, GemmWorkload(32, n, 8192), H200), kind)


def test_mma_order_has_only_warpgroup_kernels():
    in_order = WgmmaConfig | ClusterConfig | PersistentConfig
    assert all(isinstance(c, in_order) for c in configs_for(FLEXQ, 64, in_mma_order=True))
    assert not any(isinstance(c, in_order) for c in configs_for(FLEXQ, 64, in_mma_order=False))


@pytest.mark.parametrize(
    ("m", "tiles"),
    [
        (17, {32}),
        (32, {32}),
        (33, {48, 64}),
        (49, {64}),
        (65, {96}),
        (97, {128}),
        (128, {128}),
    ],
)
def test_cluster_tile_is_the_smallest_that_fits_all_tokens(m, tiles):
    clusters = [c for c in configs_for(FLEXQ, m, in_mma_order=True) if isinstance(c, ClusterConfig)]

    assert {c.tokens for c in clusters} == tiles
    assert not any(isinstance(c, ClusterConfig) for c in configs_for(FLEXQ, 129, in_mma_order=True))


@pytest.mark.parametrize(
    ("m", "n", "tiles"),
    [
        (64, 1024, {(1, 2), (1, 4), (1, 8), (2, 4), (2, 8)}),
        (64, 2048, {(1, 2), (1, 4), (2, 4), (2, 8)}),
        (64, 4224, {(1, 2), (2, 4)}),
        (64, 4225, set()),
        (256, 1024, {(1, 2), (1, 4), (2, 4), (2, 8)}),
        (512, 1024, {(1, 2), (2, 4)}),
        (513, 1024, set()),
    ],
)
def test_few_output_tiles_have_more_blocks_or_smaller_ones(m, n, tiles):
    fit = configs_for(FLEXQ, m, n, in_mma_order=True)
    few = [c for c in fit if isinstance(c, ClusterConfig) and c.for_few_outputs]

    assert {(c.row_warpgroups, c.k_split) for c in few} == tiles
    assert {c.tokens for c in few} <= {min(m, 128)}
    assert all(c.outputs(m, n) * c.k_split <= 132 for c in few)


@pytest.mark.parametrize(
    ("config", "m", "n", "k", "clusters"),
    [
        (ClusterConfig(1, 64, 6, 4, 1), 64, 1024, 4096, 16),  # one for each output tile
        (ClusterConfig(1, 64, 6, 4, 1), 64, 768, 11008, 24),  # two
        (ClusterConfig(1, 64, 6, 4, 1), 64, 2112, 8192, 30),  # as many as run at once
        (ClusterConfig(2, 64, 4, 8, 1), 64, 1024, 128, 8),
        (ClusterConfig(2, 64, 4, 8, 1), 64, 2048, 8192, 15),
        (ClusterConfig(2, 64, 4, 2, 2), 64, 2048, 256, 16),
        (ClusterConfig(2, 32, 4, 2, 1), 32, 7168, 7168, 56),  # of 66; 5 % faster than all
        (ClusterConfig(2, 64, 4, 2, 1), 64, 15360, 5120, 66),  # 120 outputs
        (ClusterConfig(2, 128, 4, 2, 1), 128, 6656, 17920, 66),  # 52 of them took 8 % longer
        (ClusterConfig(2, 128, 4, 2, 1), 128, 4096, 4096, 64),
    ],
)
def test_clusters_follow_outputs_if_they_fit(config, m, n, k, clusters):
    assert config.shares(m, n, k // 128, 132).blocks == clusters * config.k_split


def test_25_to_32_tokens_use_mma_order_at_long_k():
    assert [FLEXQ.in_mma_order(m, 4096) for m in (24, 25, 32, 33)] == [False, True, True, True]
    assert [FLEXQ.in_mma_order(m, 4095) for m in (24, 25, 32, 33)] == [False, False, False, True]
    assert not TWO_LEVEL.in_mma_order(32, 4096)


def test_17_to_24_tokens_have_three_tiles_at_long_k():
    configs = configs_for(FLEXQ, 24, in_mma_order=False)

    assert {c.col_tiles for c in configs} == {3}
    assert {c.col_tiles for c in FLEXQ.for_few(24, 4095)} == {4}
    assert {c.col_tiles for c in TWO_LEVEL.for_few(24, 4096)} == {4}
    assert FLEXQ.choose(configs, GemmWorkload(24, 4096, 4096), H200) in configs


CLUSTERS = [c for c in FLEXQ.costs if isinstance(c, ClusterConfig)]


@pytest.mark.parametrize("config", CLUSTERS, ids=str)
def test_persistent_clusters_share_all_steps_of_k(config):
    for m, n, steps in product((1, 40, 257), (8, 4096, 28672), (1, 2, 8, 32, 85, 224)):
        shares = config.shares(m, n, steps, 132)
        outputs = -(-n // config.rows) * -(-m // config.tokens)
        clusters = shares.blocks // config.k_split

        assert 0 < shares.blocks <= 132
        assert shares.each * clusters + shares.longer == outputs * steps
        assert shares.longer < clusters
        assert shares.each > 0
        # No memory for partial sums only where every share is of whole outputs.
        assert shares.shared or shares.each % steps == 0
        assert shares.longest * config.k_split * clusters >= outputs * steps
        for step in range(0, outputs * steps, max(1, steps - 1)):
            assert step // steps - (step * shares.inverse >> 32) in (0, 1)


@pytest.mark.parametrize("config", [c for c in CLUSTERS if c.resident > 1], ids=str)
def test_next_launch_fits_next_to_a_persistent_block(config):
    registers = FLEXQ.costs[config].registers

    found = occupancy(
        "sm_90",
        registers=registers,
        threads=config.threads,
        shared_bytes=config.shared_bytes(SIX_BITS),
    )

    assert found.blocks == config.resident


@pytest.mark.parametrize(
    ("m", "bucket"),
    [
        (1, 1),
        (3, 4),
        (17, 24),
        (25, 32),
        (33, 48),
        (48, 48),
        (49, 64),
        (65, 96),
        (97, 128),
        (130, 256),
    ],
)
def test_bucket_rounds_tokens_up_to_tiles(m, bucket):
    assert bucket_of(m) == bucket
    assert configs_for(FLEXQ, m, in_mma_order=True) == configs_for(FLEXQ, bucket, in_mma_order=True)


@pytest.mark.parametrize(
    ("m", "n", "k", "shared"),
    [
        (1024, 4864, 28544, 20),  # of 152 output tiles; the others are computed in step
        (1024, 4864, 4096, 152),  # operands fit in L2
        (256, 28672, 28672, 224),  # one block of tokens: weights are read once in any case
        (1024, 17024, 28672, 136),  # four left over: each would be shared by 33 blocks
    ],
)
def test_only_left_over_tiles_are_shared_beyond_l2(m, n, k, shared):
    assert PersistentConfig(2, 1, 1).shares(m, n, k // 128, 132).shared == shared


@pytest.mark.parametrize("config", PERSISTENT, ids=str)
def test_persistent_blocks_share_all_steps_of_k(config):
    for m, n, steps in product((40, 257, 2048), (8, 4096, 28672), (1, 2, 8, 32, 85, 224)):
        shares = config.shares(m, n, steps, 132)
        outputs = -(-n // (config.rows * config.sharers)) * -(-m // config.tokens)
        clusters = shares.blocks // config.sharers

        assert 0 < shares.blocks <= 132
        assert shares.each * clusters + shares.longer == shares.shared * steps
        assert shares.shared <= min(outputs, 2 * clusters)
        assert shares.longer < clusters
        # A share begins in one place: a block stores at most one set of partial sums.
        assert shares.shared == 0 or shares.each > 0
        # Every block's steps and epilogues, and the additions of partial sums.
        assert shares.longest * clusters > outputs * steps
        for step in range(shares.shared * steps):
            assert step * shares.inverse >> 32 == step // steps
