"""What the compiler makes of the CUDA sources, on a machine without a GPU."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stored_resources import stored_resources

from flexq_bench.kernels.cuda.imma.configuration_choice import FLEXQ
from flexq_bench.kernels.cuda.imma.configurations import SIX_BITS, ClusterConfig
from flexq_bench.kernels.errors import CompileError
from flexq_bench.kernels.registry import resolve
from flexq_bench.kernels.resource_table import (
    all_builds,
    largest_builds,
    measure_resources,
    measure_table,
)
from flexq_bench.kernels.runtime import nvrtc
from flexq_bench.kernels.runtime.machine_code import innermost_loops, instructions
from flexq_bench.kernels.runtime.nvrtc import Build, compile_build
from flexq_bench.kernels.runtime.occupancy import COMPILED_ONLY, RUN_TARGETS, TARGETS

HOPPERS = ("wgmma", "cluster", "persistent")  # imma/group_gemm_*.cu with warpgroup MMA


pytestmark = [
    pytest.mark.usefixtures("toolchain"),
    pytest.mark.timeout(900),  # every build for every target: six minutes of two idle cores
]


@pytest.fixture(scope="module")
def measured(toolchain):
    """The largest build of each source for one target, in turn; compiling all takes minutes."""
    rows = []
    for place, source in enumerate(sorted({build.source for build in all_builds()})):
        of_source = [(b, t) for t in TARGETS for b in largest_builds(t) if b.source == source]
        build, target = of_source[place % len(of_source)]
        rows += measure_resources([(build, target)])
    return sorted(rows)


def test_no_build_spills_on_any_target(measured):
    rows = [row for row in (*measured, *stored_resources()) if row.blocks_per_sm]  # it fits

    assert [row for row in rows if row.stack_bytes or row.local_bytes] == []


def test_resources_are_those_of_the_checked_in_table(measured):
    of_measured = {(row.build, row.target) for row in measured}
    stored = [row for row in stored_resources() if (row.build, row.target) in of_measured]

    changed = sorted(set(measured) ^ set(stored))

    assert changed == [], "if this is meant: python benchmarks/kernels/resources.py"


def test_resource_table_has_every_build_of_every_target():
    builds = {(b.name, t) for b in all_builds() for t in RUN_TARGETS if b.runs_on(t)}
    builds |= {(b.name, target) for target in COMPILED_ONLY for b in largest_builds(target)}

    assert {(row.build, row.target) for row in stored_resources()} == builds


@pytest.mark.slow
def test_whole_resource_table_equals_compiled_builds():
    changed = sorted(set(measure_table()) ^ set(stored_resources()))

    assert changed == [], "if this is meant: python benchmarks/kernels/resources.py"


def test_two_workers_of_one_machine_compile_a_build_once(monkeypatch, tmp_path):
    runs: list[str] = []

    def slow_nvrtc(text, source, options):
        runs.append(source)
        time.sleep(0.2)
        return b"machine code"

    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_run_nvrtc", slow_nvrtc)
    build = Build.of("cublas/rows.cu", ONLY_IN_THIS_TEST=1)
    with ThreadPoolExecutor(3) as workers:  # a lock on a file holds between threads as well
        compiled = list(workers.map(compile_build, [build] * 3, ["sm_90"] * 3))

    assert runs == ["cublas/rows.cu"]
    assert {cubin.code for cubin in compiled} == {b"machine code"}


def test_every_source_is_some_kernels():
    csrc = Path(nvrtc.__file__).parents[1] / "csrc"
    sources = [path.relative_to(csrc).as_posix() for path in csrc.rglob("*.cu")]
    assert {build.source for build in all_builds()} == set(sources)


ON_TENSOR_CORES = [
    ("flexq-w6a6", "flexq_btc", "BMMA"),
    ("flexq-w6a8", "flexq_btc", "BMMA"),
    ("flexq-imma-w6a6", "flexq_imma", "IMMA"),
    ("flexq-imma-w6a8", "flexq_imma", "IMMA"),
    ("abq-w6a6", "abq", "BMMA"),
    ("abq-w8a8", "abq", "BMMA"),
    ("w8a16", "weight_only", "HMMA"),
    ("w4a16", "weight_only", "HMMA"),
    ("fp6-w6a16", "weight_only", "HMMA"),
    ("fp5-w5a16", "weight_only", "HMMA"),
    ("dgq-w4a8", "flexq_imma", "IMMA"),
    ("group-w4a8", "flexq_imma", "IMMA"),
    ("atom-w4a4", "flexq_imma", "IMMA"),
]


def on_tensor_cores():
    """Every kernel on every target; the fast tests have each kernel on one of them."""
    for place, kernel in enumerate(ON_TENSOR_CORES):
        for number, target in enumerate(RUN_TARGETS):
            is_fast = number == place % len(RUN_TARGETS)
            yield pytest.param(*kernel, target, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("label", "function", "instruction", "target"), [*on_tensor_cores()])
def test_a_kernel_runs_on_its_tensor_core(label, function, instruction, target):
    every = resolve(label, "cuda").builds()
    of_function = [b for b in every if b.block is not None and b.block.function == function]
    builds = [b for b in of_function if b.runs_on(target)]

    for build in (builds[0], builds[-1]):
        counts = instructions(compile_build(build, target))[function]
        assert counts[instruction] >= 4
        assert counts["LDGSTS"] >= 3  # the cp.async pipeline


@pytest.mark.parametrize(
    "target",
    [COMPILED_ONLY[0], *(pytest.param(t, marks=pytest.mark.slow) for t in COMPILED_ONLY[1:])],
)
def test_binary_mma_is_emulated_on_blackwell(target):
    largest = {build.source: build for build in largest_builds(target)}
    found = {}
    for source in ("btc/gemm.cu", "imma/group_gemm.cu"):
        block = largest[source].block
        counts = instructions(compile_build(largest[source], target))[block.function]
        found[source] = (counts["BMMA"], counts["IMMA"] > 0, counts["CALL"] > 0)

    assert found == {"btc/gemm.cu": (0, True, True), "imma/group_gemm.cu": (0, True, False)}
    assert not {f"imma/group_gemm_{name}.cu" for name in HOPPERS} & set(largest)


@pytest.mark.slow
@pytest.mark.parametrize("target", COMPILED_ONLY)
def test_every_build_compiles_where_none_ever_ran(target):
    rows = measure_resources((b, target) for b in all_builds() if b.runs_on(target))

    assert {row.build for row in rows} == {b.name for b in all_builds() if b.runs_on(target)}
    # The register limits of a few configurations (`resident`) were chosen on sm_90.
    assert [row for row in rows if row.local_bytes or row.stack_bytes > 40] == []


# Which of a kernel's builds: all of them take minutes.
ONE_IN_EIGHT, ALL = slice(None, None, 8), slice(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "some"),
    [
        ("flexq-imma-w6a6", ONE_IN_EIGHT),
        *(
            pytest.param(label, ALL, marks=pytest.mark.slow)
            for label in ("flexq-imma-w6a6", "dual-w6a8", "dgq-w4a8", "group-w4a8", "atom-w4a4")
        ),
    ],
)
def test_warpgroup_mmas_are_issued_without_waiting(label, some):
    # Where the compiler can't tell what is in flight it waits for each (C7514 in its log).
    sources = [f"imma/group_gemm_{name}.cu" for name in HOPPERS]
    builds = [build for build in resolve(label, "cuda").builds() if build.source in sources]
    assert len(builds) > 5

    for build in builds[some]:
        counts = instructions(compile_build(build, "sm_90"))[build.block.function]
        assert counts["IGMMA"] > counts["WARPGROUP"], build.name


@pytest.mark.parametrize(
    "label",
    [
        *(pytest.param(f"flexq-imma-{bits}", marks=pytest.mark.slow) for bits in ("w6a6", "w6a8")),
        "atom-w4a4",
    ],
)
def test_sums_of_two_scales_are_floats_without_a_conversion(label):
    builds = [
        b for b in resolve(label, "cuda").builds() if b.source == "imma/group_gemm_persistent.cu"
    ]
    of_one_granule = [b for b in builds if dict(b.defines)["GRANULES"] == 1]

    for build in of_one_granule:
        counts = instructions(compile_build(build, "sm_90"))["flexq_imma_bulk"]
        assert counts["I2FP"] + counts["I2F"] < 8, build.name  # a division's
        assert counts["FFMA"] >= 2 * 64, build.name
        assert counts["DFMA"] == 64 // 2, build.name  # one begins two sums
    assert of_one_granule


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "some"),
    [
        ("flexq-imma-w6a6", ONE_IN_EIGHT),
        pytest.param("flexq-imma-w6a6", ALL, marks=pytest.mark.slow),
        pytest.param("flexq-imma-w6a8", ALL, marks=pytest.mark.slow),
    ],
)
def test_sums_of_clusters_begin_again_by_one_ffma(label, some):
    builds = resolve(label, "cuda").builds()
    of_clusters = [b for b in builds if b.source == "imma/group_gemm_cluster.cu"]

    for build in of_clusters[some]:
        counts = instructions(compile_build(build, "sm_90"))["flexq_imma_cluster"]
        sums = int(dict(build.defines)["TOKENS"]) // 2  # of a lane
        assert counts["I2FP"] + counts["I2F"] < 16, build.name  # those of the divisions of stream-K
        assert 3 * sums <= counts["FFMA"] <= 4 * sums, build.name
    assert of_clusters


@pytest.mark.parametrize("some", [slice(1), pytest.param(ALL, marks=pytest.mark.slow)])
def test_cluster_step_has_few_instructions_besides_scaling(some):
    """Instructions and tensor cores take turns: what is no FFMA costs as much."""
    clusters = [c for c in FLEXQ.costs if isinstance(c, ClusterConfig)]
    # The loop depends on these two settings only.
    configs = [*{(c.row_warpgroups, c.tokens): c for c in clusters}.values()][some]

    for config in configs:
        loops = innermost_loops(compile_build(config.build(SIX_BITS), "sm_90"))[config.function]
        step = min((loop for loop in loops if loop["IGMMA"]), key=Counter.total)
        granules = 2 if config.tokens == 128 else 1
        assert step["IGMMA"] == 4 * granules, config
        assert step["FFMA"] == 3 * config.tokens // 2, config
        assert step.total() - step["FFMA"] <= 104 + 40 * (granules - 1), config
    assert configs


def test_defines_that_are_missing_are_a_compile_error():
    with pytest.raises(CompileError, match="define A_BITS, TOKENS"):
        compile_build(Build.of("btc/gemm.cu"), "sm_90")
