"""Configurations without tuning are candidates, whatever the shape and the GPU."""

from __future__ import annotations

import pytest

from flexq_bench.kernels.registry import resolve
from flexq_bench.workloads.gemm import GemmWorkload

SHAPES = [
    (1, 1),
    (100, 300),
    (4096, 4096),
    (5120, 13824),
    (8192, 28672),
    (10240, 8192),
    (28672, 8192),
]
TOKENS = (1, 5, 9, 17, 33, 100)
LABELS = (
    *("dgq-w4a8", "dgq-w4a8[static]", "group-w4a8", "atom-w4a4", "dual-w6a8"),
    *("flexq-imma-w6a6", "flexq-imma-w6a8", "w8a16", "w4a16"),
    *("fp6-w6a16", "fp6-w6a16[fine]", "fp5-w5a16"),
)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("label", LABELS)
def test_untuned_configuration_is_a_candidate(on_gpu, label, target):
    on_gpu(target)
    kernel = resolve(label, "cuda")

    for m in TOKENS:
        for n, k in SHAPES:
            gemm = GemmWorkload(m, n, k)
            assert kernel.default_config(gemm) in kernel.candidates(gemm)


@pytest.mark.parametrize("label", ["mxfp6-w6a8[fp8]", "mxfp6-w6a8[e3m2,fp8]"])
def test_warpgroup_kernel_runs_any_number_of_tokens(on_gpu, label):
    test_untuned_configuration_is_a_candidate(on_gpu, label, "sm_90")


@pytest.mark.parametrize("label", ["dgq-w4a8", "fp6-w6a16"])
def test_few_rows_per_sm_use_more_warps(on_gpu, label):
    on_gpu("sm_90")
    kernel = resolve(label, "cuda")
    configs = [kernel.default_config(GemmWorkload(1, n, 8192)) for n in (4096, 12288, 28672)]

    warps = [config.as_dict()["warps"] for config in configs if config is not None]
    assert len(warps) == 3
    assert warps[0] > max(warps[1:])


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("label", ["mxfp4-w4a16", "nvfp4-w4a16", "mxfp6-w6a8[e3m2]"])
def test_sixteen_tokens_of_block_formats_have_a_candidate(on_gpu, label, target):
    on_gpu(target)
    kernel = resolve(label, "cuda")
    chosen = set()

    for n in (100, 4096, 8192, 11008, 60000):
        for k in (300, 4096, 28672):
            gemm = GemmWorkload(16, n, k)
            config = kernel.default_config(gemm)
            assert config in kernel.candidates(gemm)
            chosen.add(config)

    assert len(chosen) > 3


def test_weights_are_loaded_ahead_where_all_fit(on_gpu):
    on_gpu("sm_90")
    kernel = resolve("mxfp4-w4a16", "cuda")
    layers = [GemmWorkload(16, 7168, k) for k in (1536, 28672)]
    overlapped = next(c for c in kernel.candidates(layers[0]) if c.as_dict()["late"] == 2)

    builds = [kernel.builds_for(layer, overlapped)[-1] for layer in layers]

    assert [dict(build.defines).get("WHOLE") for build in builds] == [1, None]
