"""How many blocks fit an SM, and that no kernel asks for one that doesn't."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from stored_resources import stored_resources

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.cuda.cublas import dense
from flexq_bench.kernels.cuda.imma import gemm as imma
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.registry import labels, resolve
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.nvrtc import Block, Build
from flexq_bench.kernels.runtime.occupancy import LIMITS, TARGETS, Occupancy, occupancy
from flexq_bench.kernels.runtime.tensor_map import NO_MAP
from flexq_bench.workloads.gemm import GemmWorkload

KB = 1024
SHAPES = [GemmWorkload(m, 512, 512) for m in (1, 2, 4, 8, 16, 64)]


@pytest.mark.parametrize(
    ("target", "registers", "threads", "shared", "expected"),
    [
        # 49 KB and the system's 1 KB: 50 of 100 KB.
        ("sm_86", 40, 256, 49 * KB, Occupancy(2, 16)),
        ("sm_86", 40, 256, 49 * KB + 1, Occupancy(1, 8)),
        ("sm_80", 40, 256, 49 * KB, Occupancy(3, 24)),
        ("sm_90", 40, 256, 49 * KB, Occupancy(4, 32)),
        # 255 registers of 32 threads are rounded up to 8192: two warps a partition.
        ("sm_90", 255, 256, 0, Occupancy(1, 8)),
        # 40 registers are 1280 a warp: 12 warps a partition, and 48 is all that sm_86 holds.
        ("sm_86", 40, 32 * 12, 0, Occupancy(4, 48)),
        ("sm_80", 41, 32 * 12, 0, Occupancy(3, 36)),
        # Small blocks run into the number of blocks.
        ("sm_80", 16, 32, 0, Occupancy(32, 32)),
        ("sm_86", 16, 32, 0, Occupancy(16, 16)),
        ("sm_89", 16, 32, 0, Occupancy(24, 24)),
        ("sm_100", 16, 32, 0, Occupancy(32, 32)),
        ("sm_120", 16, 32, 0, Occupancy(24, 24)),
        # Nothing fits.
        ("sm_86", 16, 32, 99 * KB, Occupancy(1, 1)),
        ("sm_86", 16, 32, 99 * KB + 1, Occupancy(0, 0)),
        ("sm_80", 16, 32, 163 * KB + 1, Occupancy(0, 0)),
        ("sm_90", 16, 32, 227 * KB + 1, Occupancy(0, 0)),
        ("sm_100", 16, 32, 227 * KB + 1, Occupancy(0, 0)),
        ("sm_120", 16, 32, 99 * KB + 1, Occupancy(0, 0)),
        ("sm_90", 129, 512, 0, Occupancy(0, 0)),
        ("sm_90", 16, 1025, 0, Occupancy(0, 0)),
    ],
)
def test_occupancy_is_limited_by_the_scarcest_resource(
    target, registers, threads, shared, expected
):
    found = occupancy(target, registers=registers, threads=threads, shared_bytes=shared)

    assert found == expected


def test_a_target_without_known_limits_is_refused():
    with pytest.raises(UnsupportedError, match="no limits of sm_70 are known: there are sm_80"):
        occupancy("sm_70", registers=32, threads=32, shared_bytes=0)


@pytest.fixture
def on_device(on_gpu, monkeypatch):
    """`on_gpu` without a driver, which can't say what a library would run, nor encode maps."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("plain_rows", "swizzled_rows"):
        monkeypatch.setattr(imma, name, lambda *_: NO_MAP)
    monkeypatch.setattr(imma, "launch_flags", lambda _: (None, 0))
    monkeypatch.setattr(dense, "lt_candidates", lambda *_: [])
    return on_gpu


def tuned_kernels():
    """The kernels that the target runs whose builds tell of their blocks."""
    for label in labels("cuda"):
        kernel = resolve(label, "cuda")
        if not isinstance(kernel, LinearKernel):
            continue
        if not kernel.spec.min_capability <= current_gpu().capability <= kernel.spec.max_capability:
            continue
        if any(build.block for build in kernel.builds_for(SHAPES[0], None)):
            yield kernel


@pytest.mark.parametrize("target", TARGETS)
def test_no_candidate_needs_more_than_the_target_has(on_device, target):
    on_device(target)
    too_large = {row.build for row in stored_resources() if row.target == target and not row.fits}
    limit = LIMITS[target].block_shared_bytes

    for kernel in tuned_kernels():
        for shape in SHAPES:
            chosen = [kernel.default_config(shape), *kernel.candidates(shape)]
            builds = [build for c in chosen for build in kernel.builds_for(shape, c)]
            assert all(build.runs_on(target) for build in builds)
            assert [b.name for b in builds if b.block and b.block.shared_bytes > limit] == []
            assert too_large.isdisjoint(build.name for build in builds)


def test_smaller_gpus_have_fewer_candidates(on_device):
    kernel = resolve("abq-w8a8", "cuda")
    counts = {}
    for target in ("sm_86", "sm_80", "sm_90"):
        on_device(target)
        counts[target] = len(kernel.candidates(SHAPES[0]))

    assert 0 < counts["sm_86"] < counts["sm_80"] < counts["sm_90"]


def test_the_table_marks_what_does_not_fit():
    rows = stored_resources()
    small = [r for r in rows if r.dynamic_bytes is not None and r.target == "sm_86"]

    assert {r.fits for r in small} == {True, False}
    for row in small:
        needed = row.shared_bytes + (row.dynamic_bytes or 0)
        assert row.fits or needed > 99 * KB or row.registers * (row.threads or 0) > 65536


def test_build_states_the_launched_block(on_device, monkeypatch):
    launched: dict[tuple[Build, str], set[tuple[int, int]]] = {}

    def load(build, name):
        def launch(_grid, threads, _arguments, **options):
            shared = options.get("shared_bytes", 0)
            launched.setdefault((build, name), set()).add((threads, shared))

        return SimpleNamespace(launch=launch)

    for name, imported in list(sys.modules.items()):
        if name.startswith("flexq_bench.kernels.cuda.") and hasattr(imported, "load_function"):
            monkeypatch.setattr(imported, "load_function", load)
    on_device("sm_90")
    compared = set()
    for kernel in tuned_kernels():
        if not kernel.builds():
            continue
        w = kernel.pack_weight(kernel.quantize_weight(torch.ones(64, 512)))
        for m in (1, 3, 8):
            shape = GemmWorkload(m, 64, 512)
            x = kernel.empty_activation(m, shape.k, torch.device("cpu"))
            out = torch.empty(m, shape.n, dtype=torch.float16)
            for config in (kernel.default_config(shape), *kernel.candidates(shape)):
                launched.clear()
                kernel.gemm(x, w, out, config=config)
                for build in kernel.builds_for(shape, config):
                    if build.block is not None:
                        block = build.block
                        blocks = launched[build, block.function]
                        assert {Block(block.function, *b) for b in blocks} == {block}, build.name
                        compared.add(build.source)

    imma_sources = {"imma/group_gemm.cu", "imma/group_gemm_cluster.cu"}
    assert {"abq/gemm.cu", "btc/gemm.cu", *imma_sources} <= compared
