"""Compiling what will be timed, before it is."""

from __future__ import annotations

from pathlib import Path

from flexq_bench.kernels.runtime.gpu import OF_TARGET, chosen_for
from flexq_bench.kernels.runtime.module import compile_ahead
from flexq_bench.kernels.runtime.nvrtc import Build


def test_failing_build_stops_no_other_build(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    builds = [Build.of("probes/read.cu", UNROLL=unroll, OVERLAP=0) for unroll in (2, 3)]
    unbuildable = Build.of("weight_only/gemm.cu")  # its defines are missing

    with chosen_for(OF_TARGET["sm_90"]):
        compile_ahead([unbuildable, *builds, builds[0]])

    assert len(list(Path(tmp_path).rglob("*.cubin"))) == 2


def test_a_library_has_nothing_to_compile():
    compile_ahead([])  # asks for no GPU
