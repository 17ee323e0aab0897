"""Statuses of a measurement, its floor, its memory and its configuration."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
import torch

from flexq_bench.api import Input, Output, operation
from flexq_bench.errors import DeviceError, InfrastructureError, MeasureError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.formats import FP16
from flexq_bench.measure import Measured, Meter
from flexq_bench.measure.clocks import CpuClock
from flexq_bench.measure.protocol import BRIEF_VERSIONS, WarmUp, protocol_of
from flexq_bench.workloads.case import Case

CHECK_LAUNCHES = 3  # realistic, full-range and small inputs


@pytest.mark.parametrize("stage", ["gemm", "linear"])
def test_right_kernel_is_exact_and_timed_over_five_placements(a_meter, a_case, fake_linear, stage):
    measured = a_meter(fake_linear()).measure(a_case(stage=stage))

    assert (measured.status, measured.detail, measured.exact) == ("ok", "", True)
    assert measured.max_rel_error <= 2**-11 * 1.01  # FP16 rounding of the output
    assert len(measured.placement_medians_us) == len(measured.samples_us) == 5
    assert measured.n_samples == sum(map(len, measured.samples_us)) >= 10
    assert 0 < measured.ci_low_us <= measured.median_us <= measured.ci_high_us
    assert (measured.weight_bits, measured.act_bits, measured.group) == (6, 6, 128)
    assert measured.input_distribution == "normal-outlier-v1"


def test_brief_times_have_a_version_of_their_own(a_meter, a_case, fake_linear):
    brief = protocol_of("cpu", brief=True)

    measured = a_meter(fake_linear(), protocol=brief).measure(a_case())

    assert measured.protocol_version == BRIEF_VERSIONS + protocol_of("cpu").version
    assert len(measured.placement_medians_us) >= brief.min_placements == 3
    assert protocol_of("cuda").version < BRIEF_VERSIONS < protocol_of("cuda", brief=True).version


def test_the_real_bit_plane_kernel_is_exact(a_meter, a_case):
    measured = a_meter().measure(a_case(kernel="flexq-w6a6", m=3, n=40, k=200, stage="linear"))

    assert (measured.status, measured.detail, measured.exact) == ("ok", "", True)


def one_bit_off(out, _launch):
    out.view(torch.int16)[0, 0] += 1


def last_column_unwritten(out, _launch):
    out[:, -1] = torch.nan


def one_element_ten_percent_off(out, _launch):
    out[-1, 3] *= 1.1


@pytest.mark.parametrize("after", [one_bit_off, last_column_unwritten, one_element_ten_percent_off])
@pytest.mark.parametrize("stage", ["gemm", "linear"])
def test_wrong_kernel_is_incorrect_and_not_comparable(a_meter, a_case, fake_linear, after, stage):
    measured = a_meter(fake_linear(after)).measure(a_case(stage=stage))

    assert measured.status == "incorrect"
    assert measured.exact is False
    assert "expected" in measured.detail
    assert measured.median_us > 0
    assert not measured.is_comparable


def test_unwritten_zero_is_incorrect(a_meter, a_case, fake_linear):
    class SkipsZeros(fake_linear):
        def gemm(self, x, w, out, *, bias=None, config=None):
            y = (x.buffers["real"] @ w.buffers["real"].T).half()
            out.copy_(torch.where(y == 0, out, y))

    measured = a_meter(SkipsZeros()).measure(a_case(n=512))

    assert (measured.status, measured.exact) == ("incorrect", False)
    assert "= nan, expected 0" in measured.detail


def test_nan_output_is_an_infinite_error(a_meter, a_case, fake_linear):
    measured = a_meter(fake_linear(last_column_unwritten)).measure(a_case())

    assert measured.max_rel_error == float("inf")


def test_dense_kernel_is_judged_by_its_error(a_meter, a_case, fake_linear):
    dense = {"weight": FP16, "activation": FP16}

    right = a_meter(fake_linear(**dense)).measure(a_case())
    wrong = a_meter(fake_linear(one_element_ten_percent_off, **dense)).measure(a_case())

    assert (right.status, right.exact) == ("ok", None)
    assert (wrong.status, wrong.exact) == ("incorrect", None)
    assert wrong.max_rel_error == pytest.approx(0.1, rel=0.05)


def test_kernel_wrong_after_timing_is_incorrect(countable, fake_linear):
    total = countable(fake_linear()).launches
    kernel = fake_linear(lambda out, n: out.fill_(1) if n > total - CHECK_LAUNCHES else None)

    measured = countable(kernel).measured

    assert measured.status == "incorrect"
    assert measured.median_us > 0


def test_kernel_wrong_in_timed_launches_only_is_incorrect(countable, fake_linear):
    total = countable(fake_linear()).launches
    kernel = fake_linear(
        lambda out, n: out.mul_(1.5) if CHECK_LAUNCHES < n <= total - CHECK_LAUNCHES else None
    )

    measured = countable(kernel).measured

    assert measured.status == "incorrect"
    assert measured.exact is True  # the checks before and after passed


def test_raising_kernel_is_failed_without_a_time(a_meter, a_case, fake_linear):
    def explode(_out, _launch):
        raise RuntimeError("illegal memory access\nand a long story")

    measured = a_meter(fake_linear(explode)).measure(a_case())

    assert measured.status == "failed"
    assert measured.detail == "RuntimeError: illegal memory access"
    assert measured.median_us is None
    assert measured.weight_bits == 6


def test_ctrl_c_passes_through(a_meter, a_case, fake_linear):
    def interrupt(_out, launch):
        if launch > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        a_meter(fake_linear(interrupt)).measure(a_case())


def test_missing_stage_is_unsupported(a_meter, a_case, fake_linear):
    kernel = fake_linear(stages=("gemm",))

    measured = a_meter(kernel).measure(a_case(stage="linear"))

    assert measured.status == "unsupported"
    assert "no stage 'linear'" in measured.detail
    assert kernel.launches == 0


def test_refusal_of_a_kernel_is_unsupported(a_meter, a_case, fake_linear):
    def refuse(_out, _launch):
        raise UnsupportedError("needs CuPy: pip install it")

    measured = a_meter(fake_linear(refuse)).measure(a_case())

    assert (measured.status, measured.detail) == ("unsupported", "needs CuPy: pip install it")


def test_unknown_kernel_is_wrong_usage(a_meter, a_case):
    with pytest.raises(MeasureError, match="no kernel 'other'") as caught:
        a_meter().measure(a_case(kernel="other"))

    assert caught.value.exit_code == ExitCode.USAGE


def test_weights_larger_than_the_cache_are_not_hot(a_meter, a_case, fake_linear):
    meter = a_meter(fake_linear())
    if meter.device_info.l2_bytes is None:
        pytest.skip("this CPU does not tell its L2")
    n = 2 * meter.device_info.l2_bytes // (8 * 256)

    measured = meter.measure(a_case(n=n, cache="hot"))

    assert measured.status == "unsupported"
    assert "never hot" in measured.detail


def test_huge_shapes_are_refused_before_allocation(a_meter, a_case, fake_linear):
    kernel = fake_linear()
    case = a_case(m=1 << 20, n=1 << 20, k=1 << 20)

    with pytest.raises(MeasureError, match=r"would take [\d,.]+ GiB .* GiB free"):
        a_meter(kernel).measure(case)

    assert kernel.launches == 0
    assert a_meter(kernel).memory_needed(case) > 2**40


def test_unknown_device_is_refused_with_the_present_devices():
    with pytest.raises(DeviceError, match=r"no device 'cpuu': this machine has .*cpu"):
        Meter("cpuu")


def test_a_broken_device_is_an_infrastructure_error(a_meter, a_case, fake_linear):
    class BrokenClock(CpuClock):
        def synchronize(self):
            raise RuntimeError("CUDA error: unspecified launch failure")

    with pytest.raises(InfrastructureError, match="new process") as caught:
        a_meter(fake_linear(), clock=BrokenClock()).measure(a_case())

    assert caught.value.exit_code == ExitCode.INFRASTRUCTURE


def test_floor_is_measured_once_per_shape(a_meter, a_case, fake_linear, fake_probe):
    floor, empty = fake_probe("read-6", True), fake_probe("empty", False)
    meter = a_meter(fake_linear(), probes=(floor, empty))

    first = meter.measure(a_case(m=1))
    once = floor.checks, empty.checks
    second = meter.measure(a_case(m=4))
    same_shape = floor.checks, empty.checks
    meter.measure(a_case(n=128))

    assert first.floor_us == second.floor_us > 0
    assert first.launch_us == second.launch_us > 0
    assert same_shape == once
    assert floor.checks == 2 * once[0]
    assert empty.checks == once[1]


def test_floor_measured_as_a_case_is_reused(a_meter, a_case, fake_linear, fake_probe):
    floor = fake_probe("read-6", True)
    meter = a_meter(fake_linear(), probes=(floor,))

    alone = meter.measure(a_case(kernel="read-6"))
    checks = floor.checks
    beside = meter.measure(a_case())

    assert alone.floor_us == alone.median_us == beside.floor_us
    assert floor.checks == checks


def test_a_kernel_without_a_floor_probe_has_no_floor(a_meter, a_case, fake_linear):
    measured = a_meter(fake_linear()).measure(a_case())

    assert measured.status == "ok"
    assert measured.floor_us is None
    assert measured.launch_us is None


@pytest.mark.parametrize(
    ("key", "cache", "size", "is_least"),
    [
        ("norm_quantize:tokens=64,hidden=256,norm=rms,residual=none", "cold", 32_768, False),
        ("attention_decode:batch=2,context=256,heads=4,kv_heads=4", "cold", 1 << 20, True),
        ("scale_rows:rows=64,columns=256", "hot", 65_536, False),
    ],
)
def test_floor_of_an_operation_reads_its_cold_bytes(monkeypatch, key, cache, size, is_least):
    if "scale_rows" in key:  # most of its bytes are warm
        matrix, row = ("rows", "columns"), ("columns",)
        inputs = [Input("x", matrix, "dtype", "activation"), Input("w", row, "dtype", "weight")]
        options = {"outputs": [Output("y", matrix, "dtype")], "parameters": ["rows", "columns"]}
        operation("scale_rows", inputs=inputs, bytes="dtype_bytes(2 * rows, columns)", **options)(
            torch.mul
        )
    meter = Meter("cpu")
    monkeypatch.setattr(meter, "_probe", lambda label, case, measured: case)
    case = Case.from_key(f"kernel op cold {key}")
    spec = replace(registry.resolve("decoder-norm", "cpu").spec, operation=case.operation)

    read, judged = meter._floor(spec, case, None)

    assert (read.cache, 2 * read.gemm.n * read.gemm.k, judged) == (cache, size, is_least)


@dataclass(frozen=True, slots=True)
class Tile(Config):
    slow_us: int
    broken: bool = False


def test_fastest_candidate_is_recorded_and_reused(a_meter, a_case, fake_linear):
    class Tunable(fake_linear):
        def candidates(self, gemm):
            return (Tile(400), Tile(0), Tile(200), Tile(0, broken=True))

        def gemm(self, x, w, out, *, bias=None, config=None):
            if config.broken:
                raise RuntimeError("too much shared memory")
            time.sleep(config.slow_us / 1e5)  # 2 and 4 ms: far beyond what a busy machine adds
            super().gemm(x, w, out, config=config)

    kernel = Tunable()
    meter = a_meter(kernel)

    measured = meter.measure(a_case())
    kernel.configs_seen.clear()
    again = meter.measure(a_case())

    assert measured.status == "ok"
    assert measured.config == again.config == {"slow_us": 0, "broken": False}
    assert set(kernel.configs_seen) == {Tile(0)}


def test_inputs_depend_on_the_seed(a_meter, a_case, fake_linear):
    def first_output(seed):
        outputs = []
        kernel = fake_linear(lambda out, _: outputs.append(out.clone()))
        a_meter(kernel, seed=seed).measure(a_case())
        return outputs[0]

    assert torch.equal(first_output(1), first_output(1))
    assert not torch.equal(first_output(1), first_output(2))


class SteadyClock(CpuClock):
    """Report 500 us for every sample, so that each has a single launch."""

    def __init__(self):
        self.now_ns = 0
        super().__init__(self.tick)

    def tick(self):
        self.now_ns += 500_000
        return self.now_ns


@dataclass(frozen=True)
class Counted:
    measured: Measured
    launches: int


@pytest.fixture
def countable(a_meter, a_case):
    """Measures a kernel with the same number of launches every time: one placement, gives up."""

    def measure(kernel):
        # Equal batches end it, on a busy machine as well.
        patient = WarmUp(0.0, 60.0, agreement=1.0)
        protocol = replace(a_meter().protocol, budget_s=0.0, warm_up=patient, rewarm=patient)
        # Of one secret, which decides how many samples have outputs that are kept.
        meter = a_meter(kernel, protocol=protocol, clock=SteadyClock(), secret=1)
        return Counted(meter.measure(a_case()), kernel.launches)

    return measure
