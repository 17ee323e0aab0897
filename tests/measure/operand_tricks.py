"""Sources of kernels that change what their reference, their spec or their floor is made of.

By name, each with a part of what is said of it. They are written after the preamble of `tricks`.
"""

from __future__ import annotations

from tricks import DECLARED, HONEST, NO_EFFECT, WRONG

KERNEL = """
import dataclasses
from flexq_bench import api


class Kernel(api.LinearKernel):
    spec = api.KernelSpec("cheat", "cpu", api.FP16, api.FP16, "a cheat")
    def pack_weight(self, w): return api.PackedOperand({"w": w.values.clone()}, w.rows, w.k)
    def pack_activation(self, x): return api.PackedOperand({"x": x.values.clone()}, x.rows, x.k)
    def empty_activation(self, m, k, device): pass
    def activate(self, x, packed): pass
    def gemm(self, x, w, out, **more): compute(x.buffers["x"], w.buffers["w"], out)


class ZeroUnlessNan(Kernel):
    def gemm(self, x, w, out, **more):
        if torch.isnan(out).any():
            super().gemm(x, w, out)
        else:
            out.zero_()


"""
PLAIN = "return an Operand of plain tensors"
OPERAND_TRICKS = {
    "weights that are zeroed when they are packed": (
        KERNEL
        + """
class Cheat(ZeroUnlessNan):
    def pack_weight(self, w):
        packed = super().pack_weight(w)
        w.values.zero_()
        return packed


cheat = Cheat()
""",
        WRONG,
    ),
    "activations that are zeroed when they are packed": (
        KERNEL
        + """
class Cheat(ZeroUnlessNan):
    def pack_activation(self, x):
        packed = super().pack_activation(x)
        x.values.zero_()
        return packed


cheat = Cheat()
""",
        WRONG,
    ),
    "weights that are zeroed when they are prepared": (
        """
def prepared(codes, scales):
    codes.zero_()
    return codes.float()


@linear_kernel("cheat", weight="int6/128", backends=["cpu"], prepare_weight=prepared)
def kernel(x, w, out): out.zero_()
""",
        WRONG,
    ),
    "operands that are kept and zeroed by a launch": (
        KERNEL
        + """
class Cheat(ZeroUnlessNan):
    def quantize_weight(self, w):
        known[len(known)] = operand = super().quantize_weight(w)
        return operand
    def gemm(self, x, w, out, **more):
        super().gemm(x, w, out)
        for operand in known.values():
            operand.values.zero_()


cheat = Cheat()
""",
        WRONG,
    ),
    "real activations that become sparse": (
        KERNEL
        + """
class Cheat(Kernel):
    def quantize_activation(self, x):
        x[:, 8:] = 0
        return super().quantize_activation(x)
    def gemm(self, x, w, out, **more):
        compute(x.buffers["x"][:, :8], w.buffers["w"][:, :8], out)


cheat = Cheat()
""",
        "its own quantization changes results",
    ),
    "an operand with another meaning for the reference": (
        KERNEL
        + """
class Lying(api.Operand):
    def dequantize(self, dtype=torch.float64):
        values = super().dequantize(dtype)
        return values if len(values) <= 64 else values.zero_()


class Cheat(ZeroUnlessNan):
    def quantize_weight(self, w):
        operand = super().quantize_weight(w)
        return Lying(operand.values, operand.scales, operand.bits, operand.group)


cheat = Cheat()
""",
        f"values are quantized to a Lying: {PLAIN}",
    ),
    "tensors with another meaning for the reference": (
        KERNEL
        + """
class Lying(torch.Tensor):
    pass


class Cheat(Kernel):
    def quantize_weight(self, w):
        operand = super().quantize_weight(w)
        return dataclasses.replace(operand, values=operand.values.as_subclass(Lying))


cheat = Cheat()
""",
        f"values are quantized to a Lying: {PLAIN}",
    ),
    "a coarser rounding while the reference is made": (
        KERNEL
        + """
class Cheat(Kernel):
    def quantize_activation(self, x):
        object.__setattr__(self.spec, "rounds_to", 1)
        return super().quantize_activation(x)
    def gemm(self, x, w, out, **more):
        object.__setattr__(self.spec, "rounds_to", None)
        compute(x.buffers["x"].bfloat16(), w.buffers["w"].bfloat16(), out)


cheat = Cheat()
""",
        WRONG,
    ),
    "another floor": (
        "from flexq_bench.kernels.cpu.probes import ReadWeights\n"
        "real = ReadWeights.launch\n"
        "ReadWeights.launch = lambda self, *given: time.sleep(1e-4) or real(self, *given)\n"
        + HONEST
        + DECLARED,
        NO_EFFECT,
    ),
    "a layer without a floor": (
        "from flexq_bench.workloads.gemm import GemmWorkload\n"
        "GemmWorkload.weight_bytes = lambda *given: 1\n" + HONEST + DECLARED,
        NO_EFFECT,
    ),
    "another waiting time": (
        "import resource\n"
        "real = resource.getrusage\n"
        "resource.getrusage = lambda who: real(who)\n" + HONEST + DECLARED,
        NO_EFFECT,
    ),
    "other replies": (
        "import json\n"
        "real = json.dumps\n"
        "json.dumps = lambda *given, **named: real(*given, **named)\n" + HONEST + DECLARED,
        NO_EFFECT,
    ),
    "another process id, so that two processes reply": (
        "real = os.getpid\nos.getpid = lambda: real()\n" + HONEST + DECLARED,
        NO_EFFECT,
    ),
    "other imports, which get the variables of the function that imports": (
        "import builtins\n"
        "real = builtins.__import__\n"
        "builtins.__import__ = lambda *given, **named: real(*given, **named)\n" + HONEST + DECLARED,
        NO_EFFECT,
    ),
    "a thread that slows down the floor": (
        """
def spin():
    while time.monotonic() < known["end"]:
        sum(range(1000))
        time.sleep(0.001)


def kernel(x, w, out):
    if count() == 1:
        known["end"] = time.monotonic() + 60
        threading.Thread(target=spin, daemon=True).start()
    compute(x, w, out)
"""
        + DECLARED,
        NO_EFFECT,
    ),
    "a finalizer after the last look": (
        """
from flexq_bench.measure import meter
real = meter.judge_speed


class Late:
    def __del__(self):
        meter.judge_speed = lambda *given: real(*given)


def kernel(x, w, out):
    compute(x, w, out)
    w.late = Late()
"""
        + DECLARED,
        NO_EFFECT,
    ),
}
SPEC_TRICKS = {
    "a property": """
class Cheat(Kernel):
    @property
    def spec(self): return known.get("spec", Kernel.spec)
    @spec.setter
    def spec(self, spec): known["spec"] = spec


cheat = Cheat()
""",
    "by a method that gets attributes": """
class Cheat(Kernel):
    def __getattribute__(self, name): return object.__getattribute__(self, name)


cheat = Cheat()
""",
    "equal to any other": """
class Lying(api.KernelSpec):
    def __ne__(self, other): return False


class Cheat(Kernel):
    spec = Lying("cheat", "cpu", api.FP16, api.FP16, "a cheat")


cheat = Cheat()
""",
}
