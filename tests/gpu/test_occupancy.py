"""Our occupancy is the driver's own: blocks of an SM, and clusters of a launch."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.cuda.imma.configuration_choice import FLEXQ
from flexq_bench.kernels.cuda.imma.configurations import SIX_BITS, WGMMA_ARCH, ClusterConfig
from flexq_bench.kernels.resource_table import all_builds, resource_rows
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.nvrtc import compile_build
from flexq_bench.kernels.runtime.occupancy import TARGETS

EVERY = 8  # builds, sorted by name: all sources and most tile sizes are among them


def test_blocks_of_an_sm_equal_the_limit_of_the_driver() -> None:
    import cupy
    from cuda.bindings import driver

    arch = current_gpu().arch
    if arch not in TARGETS:
        pytest.skip(f"no limits of {arch} are known")
    torch.cuda.current_stream().synchronize()  # makes torch's context current
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    compared = []
    for build in [b for b in all_builds() if b.block and b.runs_on(arch)][::EVERY]:
        block = build.block
        assert block is not None
        (row,) = [r for r in resource_rows(build, arch) if r.function == block.function]
        if not row.fits:
            continue
        module = cupy.cuda.function.Module()
        module.load(compile_build(build, arch).code)
        function = module.get_function(block.function).ptr
        (status,) = driver.cuFuncSetAttribute(function, attribute, block.shared_bytes)
        assert int(status) == 0, build.name
        status, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            function, block.threads, block.shared_bytes
        )
        assert int(status) == 0, build.name
        compared.append((build.name, row.blocks_per_sm, int(blocks)))

    assert len(compared) > 20
    assert [item for item in compared if item[1] != item[2]] == []


CLUSTERS = [c for c in FLEXQ.costs if isinstance(c, ClusterConfig)]


@pytest.mark.parametrize("k_split", sorted({c.k_split for c in CLUSTERS} - {1}))
def test_all_clusters_of_a_launch_run_at_once(k_split: int) -> None:
    import cupy
    from cuda.bindings import driver

    gpu = current_gpu()
    if gpu.arch != WGMMA_ARCH:
        pytest.skip("clusters are Hopper's")
    torch.cuda.current_stream().synchronize()
    config = next(c for c in CLUSTERS if c.k_split == k_split)
    shared_bytes = config.shared_bytes(SIX_BITS)
    shares = config.shares(config.tokens, 1 << 16, 8, gpu.sms)
    module = cupy.cuda.function.Module()
    module.load(compile_build(config.build(SIX_BITS), gpu.arch).code)
    function = module.get_function(config.function).ptr
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuFuncSetAttribute(function, attribute, shared_bytes)
    assert int(status) == 0
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = shares.blocks, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = config.threads, 1, 1
    launch.sharedMemBytes = shared_bytes
    size = driver.CUlaunchAttribute()
    size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size.value.clusterDim.x = k_split
    size.value.clusterDim.y = size.value.clusterDim.z = 1
    launch.attrs, launch.numAttrs = [size], 1

    status, at_once = driver.cuOccupancyMaxActiveClusters(function, launch)

    assert int(status) == 0
    assert shares.blocks // k_split <= at_once
