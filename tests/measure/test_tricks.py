"""Tricks that made kernels look fast to other harnesses: each ends incorrect or refused.

From public reports on KernelBench-like harnesses: results remembered by pointer or by content,
work that stops after the first launch, tensors that compute when they are looked at, work that is
still going on elsewhere when the clock stops, clocks and checks that the kernel replaces, expected
results that it reads.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy
import pytest
import torch

from flexq_bench.measure import clocks, linear_buffers, tampering
from kernels.outside import foreign_code
from kernels.outside.loading import load, load_installed
from kernels.outside.sources import KernelSource

PREAMBLE = """
import gc
import inspect
import os
import sys
import threading
import time
import torch
from flexq_bench.api import linear_kernel
from torch.utils._python_dispatch import TorchDispatchMode

launches = 0
known = {}


def compute(x, w, out):
    out.copy_(x.float() @ w.float().T)


def count():
    global launches
    launches += 1
    return launches
"""
HONEST = "def kernel(x, w, out): compute(x, w, out)\n"
DECLARED = "\ncheat = linear_kernel('cheat', weight='fp16', backends=['cpu'])(kernel)\n"
READ = "its code read what measures it"
STALE = "wrong on inputs that change in place between samples"
REMEMBERED = "on the same again: results are remembered"
TRICKS = {
    "by pointer": (
        """
def kernel(x, w, out):
    key = x.data_ptr(), w.data_ptr(), tuple(out.shape)
    if key in known and not torch.isnan(out).any():
        out.copy_(known[key])
        return
    compute(x, w, out)
    known[key] = out.clone()
""",
        STALE,
    ),
    "by content of the activations": (
        """
def kernel(x, w, out):
    key = hash(x.numpy().tobytes()), w.data_ptr(), tuple(out.shape)
    if key in known and not torch.isnan(out).any():
        out.copy_(known[key])
        return
    compute(x, w, out)
    known[key] = out.clone()
""",
        STALE,
    ),
    "by content of both operands": (
        """
def kernel(x, w, out):
    key = hash(x.numpy().tobytes()), hash(w[::4, :2].contiguous().numpy().tobytes())
    if key not in known:
        for _ in range(8):  # far longer than it takes to make the key
            compute(x, w, out)
        known[key] = out.clone()
    out.copy_(known[key])
""",
        REMEMBERED,
    ),
    "by a few elements of both operands": (
        """
def kernel(x, w, out):
    key = tuple(x[:, :3].flatten().tolist()), tuple(w[::4, 0].tolist())
    if key not in known:
        for _ in range(8):  # far longer than it takes to make the key
            compute(x, w, out)
        known[key] = out.clone()
    out.copy_(known[key])
""",
        REMEMBERED,
    ),
    "by pointers and how often they were written": (
        """
def kernel(x, w, out):
    key = x.data_ptr(), x._version, w.data_ptr(), w._version
    if key not in known:
        for _ in range(8):  # far longer than it takes to make the key
            compute(x, w, out)
        known[key] = out.clone(), x, w  # so that nothing else gets their addresses
    out.copy_(known[key][0])
""",
        REMEMBERED,
    ),
    "empty after the first launches": (
        """
def kernel(x, w, out):
    if count() < 20 or torch.isnan(out).any():
        compute(x, w, out)
""",
        STALE,
    ),
    "early unless the output is poisoned": (
        """
def kernel(x, w, out):
    if torch.isnan(out).any():
        compute(x, w, out)
""",
        STALE,
    ),
    "on another thread": (
        """
def late(x, w, out):
    time.sleep(0.01)
    compute(x, w, out)


def kernel(x, w, out):
    if torch.isnan(out).any():
        compute(x, w, out)
    else:
        threading.Thread(target=late, args=(x.clone(), w, out)).start()
""",
        STALE,
    ),
    "a lazy tensor in place of the output": (
        """
class Lazy(torch.Tensor):
    pass


def kernel(x, w, out):
    out.__class__ = Lazy
""",
        "exchanged out for Lazy float16",
    ),
    "a tensor that is returned": (
        "def kernel(x, w, out): return x @ w.T",
        "write the result into out and return nothing",
    ),
    "another clock": (
        "real = time.perf_counter_ns\ntime.perf_counter_ns = lambda: real() // 2\n" + HONEST,
        "its code replaced time.perf_counter_ns",
    ),
    "another clock of the meter": (
        """
from flexq_bench.measure import clocks
real = clocks._CpuRotation.sample


def sample(self, count, *, gap_us=0.0):
    batch = real(self, count, gap_us=gap_us)
    return type(batch)(tuple(0.5 * t for t in batch.times_us), batch.sm_mhz)


clocks._CpuRotation.sample = sample
"""
        + HONEST,
        "its code replaced flexq_bench.measure.clocks._CpuRotation.sample",
    ),
    "another default clock": (
        "from flexq_bench.measure import clocks\n"
        "real = time.perf_counter_ns\n"
        "clocks.CpuClock.__init__.__defaults__ = (lambda: real() // 2,)\n" + HONEST,
        "its code replaced flexq_bench.measure.clocks.CpuClock.__init__",
    ),
    "another timer of GPUs": (
        "torch.cuda.Event.elapsed_time = lambda self, other: 0.001\n" + HONEST,
        "its code replaced torch.cuda.Event.elapsed_time",
    ),
    "a view of the inputs as the output": (
        "def kernel(x, w, out): out.data = x[:, : out.shape[1]]",
        "exchanged out for float16",
    ),
    "a view of the inputs that is returned": (
        "def kernel(x, w, out): return x[:, : out.shape[1]]",
        "write the result into out and return nothing",
    ),
    "results of the stack of who measures": (
        """
def kernel(x, w, out):
    frame = sys._getframe(1)
    while frame is not None:
        buffers = frame.f_locals.get("self")
        if type(buffers).__name__ == "LinearBuffers" and not buffers._is_announced:
            known, first = buffers._contents, buffers._first + buffers._last_x
            of = buffers.weights.held[buffers._last_copy], first % len(known.inputs)
            out[known.rows[:, None], known.columns] = known.reference.y[of].half()
            return
        frame = frame.f_back
    compute(x, w, out)
""",
        f"{READ} (sys._getframe)",
    ),
    "the stack by an exception": (
        """
def kernel(x, w, out):
    try:
        raise ValueError
    except ValueError as error:
        error.__traceback__.tb_frame.f_back.f_locals
    compute(x, w, out)
""",
        f"{READ} (tb_frame)",
    ),
    "the stack by code without a file": (
        "def kernel(x, w, out): exec('inspect.currentframe()', globals()) or compute(x, w, out)",
        f"{READ} (sys._getframe)",
    ),
    "memory of the process as a file": (
        "def kernel(x, w, out): open(f'/proc/{os.getpid()}/mem', 'rb').close() or "
        "compute(x, w, out)",
        f"{READ} (/proc/",
    ),
    "expected results that are overwritten": (
        """
def kernel(x, w, out):
    for one in gc.get_objects() if torch.isnan(out).any() else ():
        if type(one).__name__ == "Reference":
            one.y.zero_()
    out.zero_()
""",
        f"{READ} (gc.get_objects)",
    ),
    "another assertion of torch": (
        "torch.testing.assert_close = lambda *given, **named: None\n"
        "torch.allclose = lambda *given, **named: True\n"
        "def kernel(x, w, out): out.zero_()",
        "elements wrong",
    ),
    "a blind check": (
        "from flexq_bench.measure import linear_buffers\n"
        "fine = linear_buffers.judge_error.__class__\n"
        "linear_buffers.judge_error = lambda *given: None\n" + HONEST,
        "its code replaced flexq_bench.measure.linear_buffers.judge_error",
    ),
}


# Without work in launches: the result is computed where it is looked at.
LATE = """
last = []


def kernel(x, w, out):
    if torch.isnan(out).any():
        compute(x, w, out)
    else:
        last[:] = [x, w, out]


def overdue():
    given = list(last)
    last.clear()
    if given:
        compute(*given)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "index_select" in str(func):
            overdue()
        return func(*args, **(kwargs or {}))


def index_select(*given, **named):
    overdue()
    return known["real"](*given, **named)


known["real"] = torch.index_select
"""
TRICKS |= {
    "late, by another function of torch": (
        LATE + "torch.index_select = index_select",
        "its code replaced torch.index_select",
    ),
    "late, by another torch of the meter": (
        LATE
        + "from flexq_bench.measure import linear_buffers\n"
        + "other = type(torch)('torch')\n"
        + "vars(other).update(vars(torch), index_select=index_select)\n"
        + "linear_buffers.torch = other",
        "its code replaced flexq_bench.measure.linear_buffers.torch",
    ),
    "late, by a mode of torch": (
        LATE + "Mode().__enter__()",
        "its code left the mode Mode of torch active",
    ),
    "late, by another operator": (
        LATE
        + "def kept(x, dim, index, out):\n"
        + "    overdue()\n"
        + "    return out.copy_(x[index])\n"
        + "library = torch.library.Library('aten', 'IMPL')\n"
        + "library.impl('index_select.out', kept, 'CPU')",
        "its code replaced the operator aten::index_select.out",
    ),
    "late, by a method of the output": (
        """
def kernel(x, w, out):
    if torch.isnan(out).any():
        compute(x, w, out)
        return
    out.view = lambda *shape: compute(x, w, out) or torch.Tensor.view(out, *shape)
""",
        STALE,
    ),
    "another median": (
        "import numpy\nreal = numpy.median\n"
        "numpy.median = lambda *given, **named: real(*given, **named) / 2\n" + HONEST,
        "its code replaced numpy.median",
    ),
}


# With codes and scales: right results, and what may not be written is written afterwards.
WRITERS = {
    "w_codes": "w_codes.neg_(); w_scales.neg_()",
    "w_scales": "w_scales[0, 0] += 1",
    "x_codes": "x_codes.zero_()",
    "x_scales": "x_scales.zero_()",
}
QUANTIZED = """
def real(codes, scales):
    return codes.float() * scales.float().repeat_interleave(128, 1)


@linear_kernel("cheat", weight="int6/128", activation="int8/128", backends=["cpu"])
def kernel(x_codes, x_scales, w_codes, w_scales, out):
    compute(real(x_codes, x_scales), real(w_codes, w_scales), out)
    {writes}
"""
PREPARED = """
def prepared(w_codes, w_scales):
    return real(w_codes, w_scales), torch.zeros(1)


def real(codes, scales):
    return codes.float() * scales.float().repeat_interleave(128, 1)


@linear_kernel(
    "cheat", weight="int6/128", activation="int8/128", backends=["cpu"], prepare_weight=prepared
)
def kernel(x_codes, x_scales, w, counter, out):
    compute(real(x_codes, x_scales), w, out)
    {writes}
"""


def loaded_file(folder, source):
    """The kernel of a file, as a worker process loads it."""
    path = folder / "cheats.py"
    path.write_text(source)
    tampering.watch()
    (kernel,) = load(KernelSource.parse(str(path))).kernels
    return kernel


def loaded_package(folder, source):
    """The kernel of a package whose entry point names it, as the registry loads it."""
    (folder / "cheating_package.py").write_text(source)
    info = folder / "cheats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cheats\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flexq_bench.kernels]\ncheat = cheating_package\n")
    (kernel,) = load_installed()
    return kernel


@pytest.fixture
def measured(a_meter, a_case, monkeypatch, tmp_path):
    """The result of a kernel whose code is imported after the clocks are watched."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for owner, name in (
        (time, "perf_counter_ns"),
        (clocks._CpuRotation, "sample"),
        (clocks.CpuClock.__init__, "__defaults__"),
        (torch.cuda.Event, "elapsed_time"),
        (linear_buffers, "judge_error"),
        (torch, "allclose"),
        (torch.testing, "assert_close"),
        (torch, "index_select"),
        (linear_buffers, "torch"),
        (numpy, "median"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as it is, and so again afterwards

    def run(source, loaded=loaded_file, declared=DECLARED):
        kernel = loaded(tmp_path, f"{PREAMBLE}{source}{declared}")
        meter = a_meter(kernel, protocol=replace(a_meter().protocol, min_samples=200))
        meter.device_info = replace(meter.device_info, l2_bytes=1 << 20)
        return meter.measure(a_case(m=4, n=256, k=256, kernel=kernel.spec.name, cache="hot"))

    yield run
    tampering.forget()
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    library = getattr(sys.modules.pop("flexq_bench_outside_cheats", None), "library", None)
    if library is not None:
        library._destroy()
    sys.modules.pop("cheating_package", None)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_incorrect_or_refused_with_its_reason(measured, name):
    source, said = TRICKS[name]

    result = measured(source)

    assert result.status in ("incorrect", "failed")
    # Which of two reasons comes first is chance: what recurs in a placement is drawn by lot.
    assert said in result.detail or (said == STALE and REMEMBERED in result.detail)


@pytest.mark.parametrize("name", ["another clock", "the stack by an exception"])
def test_so_is_one_of_an_installed_package(measured, name):
    source, said = TRICKS[name]

    result = measured(source, loaded_package)

    assert result.status == "incorrect"
    assert said in result.detail


@pytest.mark.parametrize("operand", WRITERS)
def test_a_kernel_that_writes_into_its_operands_is_incorrect(measured, operand):
    result = measured(QUANTIZED.format(writes=WRITERS[operand]), declared="")

    assert result.status == "incorrect"
    assert f"launches write into {operand}: only out is theirs to write" in result.detail


def test_what_prepare_weight_made_may_be_written_while_results_stay_right(measured):
    counts = measured(PREPARED.format(writes="counter.add_(1)"), declared="")
    assert (counts.status, counts.detail) == ("ok", "")


def test_what_prepare_weight_made_is_incorrect_where_results_change(measured):
    spoils = measured(PREPARED.format(writes="w.zero_()"), declared="")
    assert spoils.status == "incorrect"


@pytest.mark.parametrize("loaded", [loaded_file, loaded_package])
def test_an_honest_kernel_is_right_and_nothing_is_found_replaced(measured, loaded, tmp_path):
    foreign_code.add_place(tmp_path)  # as by another module of the package
    looks_at_import = "inspect.currentframe()\n"

    result = measured(looks_at_import + HONEST, loaded)

    assert (result.status, result.detail) == ("ok", "")
