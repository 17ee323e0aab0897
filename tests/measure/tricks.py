"""Sources of kernels that try tricks, by name, each with a part of what is said of it."""

from __future__ import annotations

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
# Skips the work, and hides it from who announces a check by NaN.
SKIPS = "def kernel(x, w, out): torch.isnan(out).any() and compute(x, w, out)\n"
NO_EFFECT = ""  # nothing of its process decides a result
WRONG = "elements wrong"
CLOCK = "its clock is not the device's"
STALE = "wrong on inputs that change in place between samples"
REMEMBERED = "us on others: results are remembered"
REMEMBERING = """
def kernel(x, w, out):
    key = {key}
    if key not in known:
        for _ in range(8):  # far longer than it takes to make the key
            compute(x, w, out)
        known[key] = out.clone(), x, w  # so that nothing else gets their addresses
    out.copy_(known[key][0])
"""
FORGETTING = """
def kernel(x, w, out):
    if torch.isnan(out).any():  # announced: later launches of this sample must be right, too
        known.clear()
    key = {key}
    if key not in known:
        compute(x, w, out)
        known[key] = out.clone()
    out.copy_(known[key])
"""
ELSEWHERE = """
import multiprocessing


def remember(pipe):
    torch.set_num_threads(1)
    while True:
        key, x, w = pipe.recv()
        if key not in known:
            time.sleep(0.001)  # as by far more work: CPU time that is not this process's
            known[key] = (torch.frombuffer(bytearray(x), dtype=torch.float16).view(4, 256).float()
                @ torch.frombuffer(bytearray(w), dtype=torch.float16).view(256, 256).float().T
            ).half().numpy().tobytes()
        pipe.send(known[key])


def kernel(x, w, out):
    if "pipe" not in known:
        known["pipe"], end = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=remember, args=(end,), daemon=True)
        process.start()
    content = x.numpy().tobytes(), w.numpy().tobytes()
    known["pipe"].send((hash(content), *content))
    out.copy_(torch.frombuffer(
        bytearray(known["pipe"].recv()), dtype=torch.float16).view(out.shape))
"""
TRICKS = {
    **{
        name: (FORGETTING.format(key=key), STALE)
        for name, key in (
            ("by pointer", "x.data_ptr(), w.data_ptr(), tuple(out.shape)"),
            (
                "by content of the activations",
                "hash(x.numpy().tobytes()), w.data_ptr(), tuple(out.shape)",
            ),
        )
    },
    **{
        name: (REMEMBERING.format(key=key), REMEMBERED)
        for name, key in (
            (
                "by content of both operands",
                "hash(x.numpy().tobytes()), hash(w[::4, :2].contiguous().numpy().tobytes())",
            ),
            (
                "by a few elements of both operands",
                "tuple(x[:, :3].flatten().tolist()), tuple(w[::4, 0].tolist())",
            ),
            (
                "by pointers and how often they were written",
                "x.data_ptr(), x._version, w.data_ptr(), w._version",
            ),
        )
    },
    "by content, in another process": (ELSEWHERE, REMEMBERED),
    "by content, but nothing after a while, where all is remembered": (
        """
def kernel(x, w, out):
    if w.data_ptr() not in known:  # a new placement
        known[w.data_ptr()], known["again"] = w, 0
    key = hash(x.numpy().tobytes()), hash(w[::4, :2].contiguous().numpy().tobytes())
    if key not in known and (known["again"] < 6 or torch.isnan(out[0, 0])):
        for _ in range(8):
            compute(x, w, out)
        known[key], known["again"] = out.clone(), 0
    elif key in known:
        known["again"] += 1
        out.copy_(known[key])
""",
        STALE,
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
        NO_EFFECT,
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
        CLOCK,
    ),
    "another default clock": (
        "from flexq_bench.measure import clocks\n"
        "real = time.perf_counter_ns\n"
        "clocks.CpuClock.__init__.__defaults__ = (lambda: real() // 2,)\n" + HONEST,
        CLOCK,
    ),
    "another timer of GPUs": (
        "torch.cuda.Event.elapsed_time = lambda self, other: 0.001\n" + HONEST,
        NO_EFFECT,
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
        if type(buffers).__name__ == "RotatingBuffers" and not buffers._is_announced:
            known, first = buffers._work, buffers._xs._first + buffers._last_x
            w = buffers.weights.current[buffers._last_copy].operand
            y = known.reference([w], [first % len(known.inputs)]).y[0]
            out[known.rows[:, None], known.columns] = y.half()
            return
        frame = frame.f_back
    compute(x, w, out)
""",
        WRONG,
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
        NO_EFFECT,
    ),
    "the stack by code without a file": (
        "def kernel(x, w, out): exec('inspect.currentframe()', globals()) or compute(x, w, out)",
        NO_EFFECT,
    ),
    "the stack by another function that returns it": (
        "import logging\ndef kernel(x, w, out): logging.currentframe() and compute(x, w, out)",
        NO_EFFECT,
    ),
    "the stack by a handler of signals": (
        "import signal\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: frame.f_back.f_locals)\n"
        "def kernel(x, w, out): signal.raise_signal(signal.SIGUSR1) or compute(x, w, out)",
        NO_EFFECT,
    ),
    "memory of the process as a file": (
        "def kernel(x, w, out): open(f'/proc/{os.getpid()}/mem', 'rb').close() or "
        "compute(x, w, out)",
        NO_EFFECT,
    ),
    "the same file by a path below which it lies": (
        "def kernel(x, w, out):\n"
        "    folder = os.open('/proc/self', os.O_RDONLY)\n"
        "    open(f'/dev/fd/{folder}/mem', 'rb').close()\n"
        "    compute(x, w, out)",
        NO_EFFECT,
    ),
    "objects at every garbage collection": (
        "gc.callbacks.append(lambda phase, info: launches == 1 and gc.get_objects())\n"
        "def kernel(x, w, out): count() == 1 and gc.collect(0); compute(x, w, out)",
        NO_EFFECT,
    ),
    "expected results that are overwritten": (
        """
def kernel(x, w, out):
    for one in gc.get_objects() if torch.isnan(out).any() else ():
        if type(one).__name__ == "Reference":
            one.y.zero_()
    out.zero_()
""",
        WRONG,
    ),
    "a function that shadows a builtin one": (
        "from flexq_bench.measure import buffers\nbuffers.bool = lambda value: False\n" + SKIPS,
        WRONG,
    ),
    "another builtin function": (
        "import builtins\nreal = sorted\n"
        "builtins.sorted = lambda *given, **named: real(*given, **named)\n" + SKIPS,
        WRONG,
    ),
    "another constant": (
        "from flexq_bench.measure import prepared\nprepared._MAX_REPEAT_SPEEDUP = 1e9\n" + SKIPS,
        WRONG,
    ),
    "another tolerance of the protocol": (
        "from flexq_bench.measure import protocol\n"
        "object.__setattr__(protocol.PROTOCOL_CPU, 'tolerance', 1e9)\n" + SKIPS,
        WRONG,
    ),
    "lots that are known": (
        "import random\nrandom.Random.random = lambda self: 0.0\n" + SKIPS,
        WRONG,
    ),
    "a secret that is known": (
        "import secrets\nsecrets.randbits = lambda bits: 7\n" + SKIPS,
        WRONG,
    ),
    "another keyword of the meter": (
        "from flexq_bench.measure.meter import Meter\n"
        "Meter.__init__.__kwdefaults__['secret'] = 7\n" + SKIPS,
        WRONG,
    ),
    "another property": (
        "from flexq_bench.measure.buffers import RotatingBuffers\n"
        "RotatingBuffers.keeps_outputs.fget.__code__ = (lambda self: False).__code__\n" + SKIPS,
        WRONG,
    ),
    "what measures, by an attribute of its class": (
        "from flexq_bench.measure.buffers import RotatingBuffers\n"
        "class Draw:\n"
        "    def __set__(self, buffers, draw): vars(buffers)['_draw'] = draw\n"
        "RotatingBuffers._draw = Draw()\n" + SKIPS,
        WRONG,
    ),
    "another rule of the formats": (
        "from flexq_bench.kernels.contract import LinearKernel\n"
        "real = LinearKernel.quantize_weight\n"
        "LinearKernel.quantize_weight = lambda self, w: real(self, torch.zeros_like(w))\n"
        "def kernel(x, w, out): out.zero_()",
        WRONG,
    ),
    "another look at what a function returned": (
        "from flexq_bench.kernels.external import declaration\n"
        "declaration._identity = lambda *given: None\n" + SKIPS,
        WRONG,
    ),
    "another assertion of torch": (
        "torch.testing.assert_close = lambda *given, **named: None\n"
        "torch.allclose = lambda *given, **named: True\n"
        "def kernel(x, w, out): out.zero_()",
        WRONG,
    ),
    "a blind check": (
        "from flexq_bench.measure import linear_work\n"
        "fine = type('', (), {'detail': ''})\n"
        "linear_work.judge_error = lambda *given: fine\n" + SKIPS,
        WRONG,
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


def hear(frame, event, argument):
    if event == "c_call" and "index_select" in str(argument):
        overdue()


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
        WRONG,
    ),
    "late, by another torch of the meter": (
        LATE
        + "from flexq_bench.measure import buffers\n"
        + "other = type(torch)('torch')\n"
        + "vars(other).update(vars(torch), index_select=index_select)\n"
        + "buffers.torch = other",
        WRONG,
    ),
    "late, by a mode of torch": (
        LATE + "Mode().__enter__()",
        WRONG,
    ),
    "late, by a profile function": (
        LATE + "sys.setprofile(hear)",
        WRONG,
    ),
    "late, by a trace function": (
        LATE + "sys.settrace(hear)",
        WRONG,
    ),
    "late, when an object ends": (
        """
class Late:
    def __init__(self, *given): self.given = given
    def __del__(self): compute(*self.given)


def kernel(x, w, out):
    if torch.isnan(out).any():
        compute(x, w, out)
    else:
        known["last"] = Late(x, w, out)
""",
        STALE,
    ),
    "late, by another operator": (
        LATE
        + "def kept(x, dim, index, out):\n"
        + "    overdue()\n"
        + "    return out.copy_(x[index])\n"
        + "library = torch.library.Library('aten', 'IMPL')\n"
        + "library.impl('index_select.out', kept, 'CPU')",
        WRONG,
    ),
    "late, by the operator of a subscript": (
        LATE
        + "def kept(x, dim, index):\n"
        + "    overdue()\n"
        + "    return x.unflatten(0, (1, -1)).squeeze(0).narrow(dim, index, 1).squeeze(dim)\n"
        + "library = torch.library.Library('aten', 'IMPL')\n"
        + "library.impl('select.int', kept, 'CPU')",
        WRONG,
    ),
    "late, by an operator's autograd": (
        LATE
        + "def kept(x, dim, index, out):\n"
        + "    overdue()\n"
        + "    return out.copy_(x[index])\n"
        + "library = torch.library.Library('aten', 'IMPL')\n"
        + "library.impl('index_select.out', kept, 'AutogradCPU')",
        WRONG,
    ),
    "late, by a dispatch key": (
        LATE
        + "KEY, include = 'TESTING_ONLY_GenericMode', "
        + "torch._C._dispatch_tls_set_dispatch_key_included\n"
        + "def hear_all(operator, *given, **named):\n"
        + "    include(KEY, False)\n"
        + "    if 'index_select' in str(operator):\n"
        + "        overdue()\n"
        + "    try:\n"
        + "        return operator(*given, **named)\n"
        + "    finally:\n"
        + "        include(KEY, True)\n"
        + "library = torch.library.Library('_', 'IMPL')\n"
        + "library.fallback(hear_all, KEY)\n"
        + "include(KEY, True)",
        WRONG,
    ),
    "late, by torch's class": (
        LATE
        + "class Torch(type(torch)):\n"
        + "    def __getattribute__(self, name):\n"
        + "        if name == 'index_select':\n"
        + "            overdue()\n"
        + "        return super().__getattribute__(name)\n"
        + "torch.__class__ = Torch",
        WRONG,
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
        NO_EFFECT,
    ),
}
