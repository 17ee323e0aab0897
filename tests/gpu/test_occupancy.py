"""Our occupancy is the driver's own."""

from __future__ import annotations

import pytest
import torch

from kernels.resource_table import all_builds, resource_rows
from kernels.runtime.gpu import current_gpu
from kernels.runtime.nvrtc import compile_build
from kernels.runtime.occupancy import TARGETS

EVERY = 8  # builds, sorted by name: all sources and most tile sizes are among them


def test_blocks_of_an_sm_are_those_that_the_driver_allows() -> None:
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
