"""Kernels with a ring by TMA: their sums as floats, the outputs that blocks share."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import operands
import pytest
import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.cuda.imma.configuration_choice import FLEXQ, TWO_LEVEL
from flexq_bench.kernels.cuda.imma.configurations import (
    ClusterConfig,
    PersistentConfig,
    WgmmaConfig,
)
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.formats.dual_grained import int8_values
from flexq_bench.kernels.reference import Reference, reference_gemm
from flexq_bench.kernels.registry import resolve
from flexq_bench.kernels.runtime.gpu import current_gpu

PERSISTENT = [c for c in FLEXQ.every() if isinstance(c, PersistentConfig)]
CLUSTERS = [c for c in FLEXQ.every() if isinstance(c, ClusterConfig)]
LABELS = ("flexq-imma-w6a6", "flexq-imma-w6a8")
# Of one scale a group and sum in the same order: the same bits.
WARPGROUPS = WgmmaConfig(1, 2, 3, 1)


@pytest.fixture(autouse=True)
def _only_on_hopper() -> None:
    if current_gpu().arch != "sm_90":
        pytest.skip("warpgroup MMA is Hopper's")


def linear_kernel(label: str) -> LinearKernel:
    kernel = resolve(label, "cuda")
    assert isinstance(kernel, LinearKernel)
    return kernel


@lru_cache(maxsize=4)
def random_operands(label: str, m: int, n: int, k: int) -> tuple[Operand, Operand]:
    """Random codes over the whole range, scales over decades."""
    kernel = linear_kernel(label)
    a = kernel.spec.activation
    x = operands.unit_operand(operands.random_codes(m, k, a.bits, seed=m + k), a.bits, a.group)
    w = operands.random_weight(kernel.spec.weight, n, k, seed=n)
    return operands.rescaled(x, seed=1).to("cuda"), operands.rescaled(w, seed=2).to("cuda")


@lru_cache(maxsize=4)
def reference_of(label: str, m: int, n: int, k: int) -> Reference:
    return reference_gemm(*random_operands(label, m, n, k))


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("config", [c for c in PERSISTENT if not c.split], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(33, 72, 128), (300, 1000, 1000), (700, 4104, 2048)])
def test_whole_outputs_equal_those_of_the_warpgroup_kernel(
    label: str, config: PersistentConfig, m: int, n: int, k: int
) -> None:
    kernel = linear_kernel(label)
    x, w = random_operands(label, m, n, k)
    packed_x, packed_w = kernel.pack_activation(x), kernel.pack_weight(w)
    bias = torch.linspace(-1, 1, n, device="cuda").half()
    outs = [torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2)]

    for out, chosen in zip(outs, (config, WARPGROUPS), strict=True):
        kernel.gemm(packed_x, packed_w, out, bias=bias, config=chosen)

    assert torch.equal(*outs)


@pytest.mark.parametrize("config", [*(c for c in PERSISTENT if c.split), *CLUSTERS], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (128, 256, 4096),
        (257, 1000, 4096),
        (700, 2048, 1024),
        (128, 17000, 1024),
        (600, 20000, 4096),  # beyond L2: only tiles that are left over are shared
    ],
)
def test_shared_outputs_are_the_same_at_every_launch(
    config: PersistentConfig | ClusterConfig, m: int, n: int, k: int
) -> None:
    _assert_right_at_every_launch("flexq-imma-w6a6", config, m, n, k)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("config", CLUSTERS, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(33, 72, 100), (47, 1000, 1000), (64, 17, 2944), (63, 4104, 128), (129, 1, 1)]
)
def test_clusters_repeat_their_results_for_any_shape(
    label: str, config: ClusterConfig, m: int, n: int, k: int
) -> None:
    _assert_right_at_every_launch(label, config, m, n, k)


@pytest.mark.parametrize("config", CLUSTERS, ids=str)
def test_overlapping_launch_reads_the_output_of_the_previous_launch(config: ClusterConfig) -> None:
    kernel, k = linear_kernel("flexq-imma-w6a8"), 4096
    generator = torch.Generator(device="cuda").manual_seed(config.tokens)
    weight = torch.randn(k, k, generator=generator, device="cuda") / k**0.5
    w = kernel.pack_weight(kernel.quantize_weight(weight.half()))
    x = torch.randn(config.tokens, k, generator=generator, device="cuda").half()
    packed = kernel.empty_activation(config.tokens, k, x.device)

    def chained(*, one_by_one: bool) -> torch.Tensor:
        out = x
        for _ in range(8):
            kernel.activate(out, packed)
            out = torch.full_like(x, torch.nan)
            kernel.gemm(packed, w, out, config=config)
            if one_by_one:
                torch.cuda.synchronize()
        return out

    assert torch.equal(chained(one_by_one=False), chained(one_by_one=True))


def _assert_right_at_every_launch(
    label: str, config: PersistentConfig | ClusterConfig, m: int, n: int, k: int
) -> None:
    kernel = linear_kernel(label)
    x, w = random_operands(label, m, n, k)
    packed_x, packed_w = kernel.pack_activation(x), kernel.pack_weight(w)
    outs = [torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda") for _ in range(5)]

    for out in outs:
        kernel.gemm(packed_x, packed_w, out, config=config)

    reference = reference_of(label, m, n, k)
    fits = reference.y.abs() < 65504
    off = (outs[0].double() - reference.y).abs()[fits]
    near = 1e-3 * reference.y.abs() + 1e-5 * reference.magnitude + 2.0**-24
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert bool((off <= near[fits]).all())


BY_TMA = [c for c in TWO_LEVEL.every() if isinstance(c, PersistentConfig | ClusterConfig)]


@pytest.mark.parametrize("config", BY_TMA, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(33, 72, 100), (129, 1, 129), (257, 1000, 4096), (300, 136, 300), (700, 4104, 2048)],
)
def test_one_integer_sum_over_k_is_exact_in_every_configuration(
    config: PersistentConfig | ClusterConfig, m: int, n: int, k: int
) -> None:
    kernel = linear_kernel("dual-w6a8")
    x = operands.unit_operand(operands.random_codes(m, k, 8, seed=m), 8, None, 2.0**-7)
    w = operands.random_weight(kernel.spec.weight, n, k, seed=n)
    packed_x, packed_w = (
        kernel.pack_activation(x.to("cuda")),
        kernel.pack_weight(replace(w, row_scales=w.row_scales * 2.0**-7).to("cuda")),
    )
    bias = torch.linspace(-1, 1, n).half()
    outs = [torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda") for _ in range(3)]

    for out in outs:
        kernel.gemm(packed_x, packed_w, out, bias=bias.to("cuda"), config=config)

    sums = operands.int_gemm(x.values.cuda(), int8_values(w).cuda()).cpu()
    assert int(sums.abs().max()) < 2**24
    expected = (sums.float() * 2.0**-14 + bias.float()).half()
    assert all(torch.equal(out.cpu(), expected) for out in outs)


@pytest.mark.parametrize("config", [c for c in BY_TMA if isinstance(c, ClusterConfig)], ids=str)
def test_blocks_wait_for_all_loads_when_memory_is_busy(
    config: ClusterConfig,
) -> None:
    kernel = linear_kernel("dual-w6a8")
    m, n, k = 64, 270 * current_gpu().sms, 1792  # blocks start after others have ended
    x = operands.unit_operand(operands.random_codes(m, k, 8, seed=m), 8, None, 2.0**-7)
    w = operands.random_weight(kernel.spec.weight, n, k, seed=n)
    packed_x, packed_w = kernel.pack_activation(x.to("cuda")), kernel.pack_weight(w.to("cuda"))
    outs = [torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2)]
    is_same = torch.ones((), dtype=torch.bool, device="cuda")

    kernel.gemm(packed_x, packed_w, outs[0], config=config)
    for _ in range(2000):  # with a ring that a set of warps could pass, it hung within 1,000
        kernel.gemm(packed_x, packed_w, outs[1], config=config)
        is_same &= (outs[0] == outs[1]).all()

    assert bool(is_same)


@pytest.mark.parametrize("config", [*PERSISTENT, *CLUSTERS], ids=str)
@pytest.mark.parametrize(("x_code", "w_code"), [(-128, -32), (-128, 31), (127, -32)])
def test_the_largest_sums_stay_in_the_binade(
    config: PersistentConfig | ClusterConfig, x_code: int, w_code: int
) -> None:
    kernel = linear_kernel("flexq-imma-w6a8")
    m, n, k = 130, 192, 2048
    x = operands.unit_operand(torch.full((m, k), x_code, dtype=torch.int8), 8, 128, 0.25)
    w = operands.unit_operand(torch.full((n, k), w_code, dtype=torch.int8), 6, 128, 2.0**-12)
    out = torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda")

    packed_x, packed_w = kernel.pack_activation(x.to("cuda")), kernel.pack_weight(w.to("cuda"))
    kernel.gemm(packed_x, packed_w, out, config=config)

    assert bool((out == x_code * w_code * k * 2.0**-14).all())


@pytest.mark.parametrize("config", [*PERSISTENT, *CLUSTERS], ids=str)
def test_nan_scale_affects_its_row_only(
    config: PersistentConfig | ClusterConfig,
) -> None:
    kernel = linear_kernel("flexq-imma-w6a6")
    m, n, k = 600, 300 * current_gpu().sms // 10, 1024
    x, w = random_operands("flexq-imma-w6a6", m, n, k)
    assert w.scales is not None
    w = replace(w, scales=w.scales.clone())
    assert w.scales is not None
    packed_x, sound = kernel.pack_activation(x), torch.empty(m, n, dtype=torch.float16).cuda()
    kernel.gemm(packed_x, kernel.pack_weight(w), sound, config=config)
    w.scales[5, 2] = torch.inf
    out = torch.empty_like(sound)

    kernel.gemm(packed_x, kernel.pack_weight(w), out, config=config)

    others = torch.arange(n, device="cuda") != 5
    assert not bool(out[:, 5].isfinite().any())
    assert torch.equal(out[:, others], sound[:, others])


class Launches:
    """The same launch again and again, into an output of each; x and w are drawn by the seed."""

    def __init__(self, config: PersistentConfig | ClusterConfig, seed: int, count: int) -> None:
        self.kernel, self.config = linear_kernel("flexq-imma-w6a6"), config
        # 64 blocks of 4 groups of k: two launches fit on the GPU side by side. Those of clusters
        # share their outputs with as many other clusters.
        m, n, k = config.tokens, 4 * config.rows, 8192
        generator = torch.Generator("cuda").manual_seed(seed)
        shapes = ((m, k, torch.float32), (n, k, torch.float16))
        x, w = (
            torch.randn(rows, k, generator=generator, device="cuda").to(dtype)
            for rows, k, dtype in shapes
        )
        self.x = self.kernel.pack_activation(self.kernel.quantize_activation(x.half()))
        self.w = self.kernel.pack_weight(self.kernel.quantize_weight(w))
        self.outs = torch.full((count, m, n), torch.nan, dtype=torch.float16, device="cuda")

    def enqueue(self) -> None:
        for out in self.outs:
            self.kernel.gemm(self.x, self.w, out, config=self.config)

    def captured_on(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        self.expected()  # loads the kernel, which can't be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
            self.enqueue()
        return graph

    def expected(self) -> torch.Tensor:
        """What one launch alone gives."""
        torch.cuda.synchronize()
        out = torch.empty_like(self.outs[0])
        self.kernel.gemm(self.x, self.w, out, config=self.config)
        torch.cuda.synchronize()
        return out

    def take_outputs(self) -> torch.Tensor:
        """All outputs so far; from now on they are no numbers again."""
        torch.cuda.synchronize()
        outs = self.outs.clone()
        self.outs.fill_(torch.nan)
        torch.cuda.synchronize()
        return outs


SPLIT = [*(c for c in PERSISTENT if c.split), *CLUSTERS]


@pytest.mark.parametrize("config", SPLIT, ids=str)
def test_launches_on_two_streams_at_once_share_no_sums(
    config: PersistentConfig | ClusterConfig,
) -> None:
    pair = [Launches(config, seed, count=30) for seed in (1, 2)]
    expected = [launches.expected() for launches in pair]
    streams = [torch.cuda.Stream() for _ in pair]
    torch.cuda.synchronize()

    for launches, stream in zip(pair, streams, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(30_000_000)  # until all are enqueued: the host is slower than these
            launches.enqueue()

    for launches, right in zip(pair, expected, strict=True):
        assert all(torch.equal(out, right) for out in launches.take_outputs())


@pytest.mark.parametrize("config", SPLIT, ids=str)
def test_graphs_of_one_stream_may_replay_at_once_on_two(
    config: PersistentConfig | ClusterConfig,
) -> None:
    """Each has memory of its own. The same graph on two streams is another matter: CUDA lets one
    replay follow the other, but they have the same output, and that is the caller's to see to."""
    pair = [Launches(config, seed, count=30) for seed in (3, 4)]
    expected = [launches.expected() for launches in pair]
    capturing = torch.cuda.Stream()
    graphs = [launches.captured_on(capturing) for launches in pair]
    streams = [torch.cuda.Stream() for _ in pair]

    for _ in range(3):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for launches, right in zip(pair, expected, strict=True):
            assert all(torch.equal(out, right) for out in launches.take_outputs())


@pytest.mark.parametrize("config", SPLIT, ids=str)
def test_graph_replay_waits_for_its_own_sums(
    config: PersistentConfig | ClusterConfig,
) -> None:
    launches, other = Launches(config, 5, count=4), Launches(config, 6, count=1)
    graph = launches.captured_on(torch.cuda.Stream())
    graph.replay()
    torch.cuda.synchronize()

    for name, buffer in launches.x.buffers.items():
        buffer.copy_(other.x.buffers[name])
    launches.take_outputs()
    graph.replay()

    outs = launches.take_outputs()
    right = launches.expected()
    assert all(torch.equal(out, right) for out in outs)
