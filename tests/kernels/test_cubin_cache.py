"""The cache of compiled kernels, and compilation before measurement."""

from __future__ import annotations

import pytest

from flexq_bench.kernels.runtime import nvrtc
from flexq_bench.kernels.runtime.gpu import OF_TARGET, chosen_for
from flexq_bench.kernels.runtime.module import compile_ahead
from flexq_bench.kernels.runtime.nvrtc import Build, compile_build

BUILD, OTHER = Build.of("probes/spin.cu"), Build.of("probes/spin.cu", OTHER=1)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache's folder; what is compiled is a text of the options, and stands in `compiled`."""
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: "0.0")
    monkeypatch.setattr(nvrtc, "source_hash", lambda folder, source: "0")
    monkeypatch.setattr(
        nvrtc,
        "_run_nvrtc",
        lambda text, source, options: compiled.append(source) or str(options).encode(),
    )
    compiled = []
    return tmp_path / "cubin", compiled


def fresh(build):
    """As a new process compiles it."""
    compile_build.cache_clear()
    return compile_build(build, "sm_90").code


@pytest.mark.parametrize("spoil", ["emptied", "cut off", "of another build", "a byte changed"])
def test_a_bad_entry_is_compiled_again(cache, spoil):
    folder, compiled = cache
    right = fresh(BUILD)
    [entry] = folder.iterdir()
    content = entry.read_bytes()
    fresh(OTHER)
    [other] = {*folder.iterdir()} - {entry}
    entry.write_bytes(
        {
            "emptied": b"",
            "cut off": content[:-1],
            "of another build": other.read_bytes(),
            "a byte changed": bytes([content[0] ^ 1]) + content[1:],
        }[spoil]
    )

    assert fresh(BUILD) == right
    assert len(compiled) == 3
    assert entry.read_bytes() == content
    assert fresh(BUILD) == right
    assert len(compiled) == 3


def test_failing_build_stops_no_other_build(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    builds = [Build.of("probes/read.cu", UNROLL=unroll, OVERLAP=0) for unroll in (2, 3)]
    unbuildable = Build.of("weight_only/gemm.cu")  # its defines are missing

    with chosen_for(OF_TARGET["sm_90"]):
        compile_ahead([unbuildable, *builds, builds[0]])

    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_a_library_has_nothing_to_compile():
    compile_ahead([])  # asks for no GPU
