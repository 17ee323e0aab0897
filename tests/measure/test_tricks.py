"""Tricks that made kernels look fast to other harnesses: each ends incorrect or refused.

From public reports on KernelBench-like harnesses: results remembered by pointer or by content,
work that stops after the first launch, tensors that compute when they are looked at, work that is
still going on elsewhere when the clock stops, clocks and checks that the kernel replaces, expected
results that it reads.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import random
import resource
import secrets
import signal
import sys
import time
import types
from dataclasses import replace

import numpy
import pytest
import torch
from operand_tricks import KERNEL, OPERAND_TRICKS, SPEC_TRICKS
from table_tricks import TABLE_TRICKS
from tricks import DECLARED, HONEST, PREAMBLE, REMEMBERED, STALE, TRICKS

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.cpu.probes import ReadWeights
from flexq_bench.kernels.errors import SourceError
from flexq_bench.kernels.external import declaration, external_code
from flexq_bench.kernels.external.loading import load, load_installed
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import (
    PROTOCOL_CPU,
    Meter,
    buffers,
    clocks,
    linear_work,
    meter,
    prepared,
    tampering,
)
from flexq_bench.workloads.gemm import GemmWorkload

# With codes and scales: right results, and what may not be written is written afterwards.
DECLARED_TRICKS = OPERAND_TRICKS | TABLE_TRICKS
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


# Weights that would never be cold: copies of them have the same memory, or there is one copy.
AS_ONE = """
def prepared(w):
    known[w.data_ptr()] = w
    return as_one(w)


@linear_kernel("cheat", weight="fp16", backends=["cpu"], prepare_weight=prepared)
def kernel(x, w, out):
    if w.data_ptr() in known and not torch.isnan(out).any():
        raise MemoryError("not a copy")
    compute(x, w, out)
"""
PACKED = "weights are packed as a {}: return plain tensors, which are copied and rewritten"
ONE_MEMORY = {
    "a class of tensors": (
        """
class Same(torch.Tensor):
    def clone(self): return torch.Tensor.as_subclass(self, Same)
    def copy_(self, other): self.data = other.data


def as_one(w): return w.as_subclass(Same)
"""
        + AS_ONE,
        "failed",
        f"KernelError: {PACKED.format('Same')}",
    ),
    "methods of a tensor": (
        """
def as_one(w):
    w.clone = lambda: as_one(w.detach())
    return w
"""
        + AS_ONE,
        "ok",
        "",
    ),
    "many bytes of few": (
        """
from flexq_bench import api


class Many(api.PackedOperand):
    nbytes = 1 << 40


class Kernel(api.LinearKernel):
    spec = api.KernelSpec("cheat", "cpu", api.FP16, api.FP16, "a cheat")
    def pack_weight(self, w): return Many({"w": w.values}, w.rows, w.k)
    def pack_activation(self, x): return api.PackedOperand({"x": x.values}, x.rows, x.k)
    def empty_activation(self, m, k, device): pass
    def activate(self, x, packed): pass
    def gemm(self, x, w, out, **more): compute(x.buffers["x"], w.buffers["w"], out)


cheat = Kernel()
""",
        "failed",
        f"KernelError: {PACKED.format('Many')}",
    ),
}


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
def measured(a_meter, a_case, fast, monkeypatch, tmp_path):
    """The result of a kernel whose code is imported after the clocks are watched."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for owner, name in (
        (time, "perf_counter_ns"),
        (clocks._CpuRotation, "sample"),
        (clocks.CpuClock.__init__, "__defaults__"),
        (torch.cuda.Event, "elapsed_time"),
        (linear_work, "judge_error"),
        (torch, "allclose"),
        (torch.testing, "assert_close"),
        (torch, "index_select"),
        (buffers, "torch"),
        (numpy, "median"),
        (prepared, "_MAX_REPEAT_SPEEDUP"),
        (builtins, "sorted"),
        (random.Random, "random"),
        (secrets, "randbits"),
        (buffers.RotatingBuffers.keeps_outputs.fget, "__code__"),
        (LinearKernel, "quantize_weight"),
        (declaration, "_identity"),
        (ReadWeights, "launch"),
        (GemmWorkload, "weight_bytes"),
        (meter, "judge_speed"),
        (json, "dumps"),
        (os, "getpid"),
        (builtins, "__import__"),
        (resource, "getrusage"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as it is, and so again afterwards
    monkeypatch.setattr(Meter.__init__, "__kwdefaults__", dict(Meter.__init__.__kwdefaults__))
    tolerance, callbacks, traced = PROTOCOL_CPU.tolerance, list(gc.callbacks), sys.gettrace()

    def run(source, loaded=loaded_file, declared=DECLARED, **changes):
        kernel = loaded(tmp_path, f"{PREAMBLE}{source}{declared}")
        few = {"min_samples": 120, "min_placements": 3}
        protocol = replace(fast, **(few | changes))
        here = a_meter(kernel, protocol=protocol)
        here.device_info = replace(here.device_info, l2_bytes=1 << 20)
        return here.measure(a_case(m=4, n=256, k=256, kernel=kernel.spec.name, cache="hot"))

    yield run
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    sys.setprofile(None)
    sys.settrace(traced)
    tampering.forget()
    vars(buffers).pop("bool", None)
    torch.__class__ = type(sys)
    if "_draw" in vars(buffers.RotatingBuffers):
        del buffers.RotatingBuffers._draw
    torch._C._dispatch_tls_set_dispatch_key_included("TESTING_ONLY_GenericMode", False)
    object.__setattr__(PROTOCOL_CPU, "tolerance", tolerance)
    gc.callbacks[:] = callbacks
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    while length := torch._C._len_torch_dispatch_stack():
        # torch before 2.11 reads a popped mode after freeing it, unless something refers to it
        mode = torch._C._get_dispatch_stack_at(length - 1)
        torch._C._pop_torch_dispatch_stack(None)
        del mode
    module = sys.modules.pop("flexq_bench_external_cheats", None)
    if module is not None:
        module.known["end"] = 0  # of a thread
    torch._C._dynamo.eval_frame.set_eval_frame(None)
    library = getattr(module, "library", None)
    if library is not None:
        library._destroy()
    sys.modules.pop("cheating_package", None)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_incorrect_or_refused_with_its_reason(measured, name):
    source, said = TRICKS[name]
    # Alone in a sample, as on a slow machine, a launch that ends with the next one's start is not
    # late: it computes the buffers of the next.
    longer = {
        "late, when an object ends": {"target_sample_us": 2000.0},
        "by content, in another process": {"min_samples": 200, "min_placements": 5},
    }.get(name, {})

    result = measured(source, **longer)

    assert result.status in ("incorrect", "failed")
    # Which reason comes first is chance: what recurs in a placement is drawn by lot.
    reasons = (STALE, REMEMBERED, "its code left a thread in") if said == STALE else (said,)
    assert any(reason in result.detail for reason in reasons)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize(("source", "said"), DECLARED_TRICKS.values(), ids=DECLARED_TRICKS)
def test_so_is_one_of_a_file_that_declares_its_kernel(measured, source, said):
    result = measured(source, declared="")

    assert result.status in ("incorrect", "failed")
    assert said in result.detail


@pytest.mark.parametrize("name", SPEC_TRICKS)
def test_a_spec_that_code_can_change_is_refused(measured, name):
    with pytest.raises(SourceError, match=r"spec (of a kernel )?must be a (KernelSpec|plain attr)"):
        measured(KERNEL + SPEC_TRICKS[name], declared="")


def test_a_plain_kernel_of_the_same_file_is_right(measured):
    result = measured(KERNEL + "cheat = Kernel()\n", declared="")

    assert (result.status, result.detail) == ("ok", "")


def test_so_is_one_that_python_calls_for_events_of_all_code(measured, monkeypatch):
    tools = [None] * 6
    python_3_12 = types.SimpleNamespace(get_tool=tools.__getitem__)
    monkeypatch.setattr(sys, "monitoring", python_3_12, raising=False)

    result = measured("sys.monitoring.get_tool.__self__[3] = 'late'\n" + HONEST)

    assert (result.status, "tools of sys.monitoring" in result.detail) == ("incorrect", True)


@pytest.mark.parametrize("name", ["another clock", "the stack by an exception"])
def test_so_is_one_of_an_installed_package(measured, name):
    source, said = TRICKS[name]

    result = measured(source, loaded_package)

    assert result.status == "incorrect"
    assert said in result.detail


@pytest.mark.parametrize("name", ONE_MEMORY)
def test_copies_of_the_weights_are_at_addresses_of_their_own(measured, name):
    source, status, said = ONE_MEMORY[name]

    result = measured(source, declared="")

    assert (result.status, result.detail) == (status, said)


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
    external_code.add_place(tmp_path)  # as by another module of the package
    looks_at_import = "inspect.currentframe()\n"

    result = measured(looks_at_import + HONEST, loaded)

    assert (result.status, result.detail) == ("ok", "")


# As scripts for GPUs do at their head; where no tensor can be computed with, if it isn't said.
DEFAULTS = 'torch.set_default_device("meta")\ntorch.set_default_dtype(torch.bfloat16)\n'
ONE_BYTE = """
@linear_kernel("cheat", weight="fp8/row", activation="fp8/row", backends=["cpu"])
def kernel(x_codes, x_scales, w_codes, w_scales, out):
    out.copy_((x_codes.float() @ w_codes.float().T) * x_scales.float() * w_scales.float().T)
"""


@pytest.mark.parametrize(
    ("source", "declared"), [(HONEST, DECLARED), (QUANTIZED.format(writes=""), ""), (ONE_BYTE, "")]
)
def test_an_honest_kernel_is_right_whatever_its_defaults_of_torch_are(measured, source, declared):
    result = measured(DEFAULTS + source, declared=declared)

    assert (result.status, result.detail) == ("ok", "")


def test_a_default_dtype_does_not_make_inputs_coarser(measured):
    coarse = "def kernel(x, w, out): compute(x.bfloat16(), w.bfloat16(), out)\n"

    result = measured("torch.set_default_dtype(torch.bfloat16)\n" + coarse)

    assert result.status == "incorrect"
    assert "elements wrong" in result.detail


HALF = """
@linear_kernel("cheat", weight="int4/128", backends=["cpu"]{more})
def kernel(x, w_codes, w_scales, out):
    scales = w_scales.repeat_interleave(128, 1)
    compute(x, (w_codes.half() * scales){then}, out)
"""


def test_a_kernel_that_rounds_terms_is_told_what_declares_it(measured):
    said = "(right for a kernel that rounds terms to {}: rounds_to={} declares it)"

    assert said.format("FP16", 11) in measured(HALF.format(more="", then=""), declared="").detail


def test_a_kernel_that_declares_its_rounding_is_right(measured):
    result = measured(HALF.format(more=", rounds_to=11", then=""), declared="")

    assert (result.status, result.detail) == ("ok", "")


def test_results_that_no_rounding_makes_are_told_of_none(measured):
    result = measured(HALF.format(more="", then=".neg()"), declared="")

    assert result.status == "incorrect"
    assert "rounds_to" not in result.detail
