"""Kernels that compute less than they are asked for and are right wherever NaN announces a check.

They run on a CPU or a GPU: what they skip, they skip by what launches see there.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from flexq_bench.kernels.contract import KernelSpec, LinearKernel, PackedOperand
from flexq_bench.kernels.formats import NumberFormat

INT6 = NumberFormat(6, 128)


class Honest(LinearKernel):
    """A right W6A6 GEMM in float64."""

    def __init__(self, backend: str = "cpu") -> None:
        self.spec = KernelSpec("cheat", backend, INT6, INT6, "float64 GEMM of dequantized codes")
        self.launches = 0

    def pack_weight(self, weight):
        return self._pack(weight)

    def pack_activation(self, x):
        return self._pack(x)

    def empty_activation(self, m, k, device):
        return PackedOperand({"real": torch.zeros(m, k, dtype=torch.float64, device=device)}, m, k)

    def activate(self, x, packed):
        packed.buffers["real"].copy_(self.quantize_activation(x).dequantize())

    def gemm(self, x, w, out, *, bias=None, config=None):
        self.launches += 1
        self.write(x.buffers["real"], w.buffers["real"], out)

    def write(self, x, w, out):
        """What a launch leaves in `out`."""
        out.copy_(x @ w.T)

    def _pack(self, operand):
        return PackedOperand({"real": operand.dequantize()}, operand.rows, operand.k)


def keep_unless_nan(out, y):
    """Write only where a check has announced itself by NaN; on a GPU decided on the device."""
    out.copy_(torch.where(torch.isnan(out).any(), y, out.double()))


class UnlessNan(Honest):
    """Return at once unless the output is NaN."""

    def write(self, x, w, out):
        keep_unless_nan(out, x @ w.T)


class UnlessOverwritten(Honest):
    """Return at once while the output is as this kernel wrote it."""

    def __init__(self, backend: str = "cpu") -> None:
        super().__init__(backend)
        self.wrote: dict[int, torch.Tensor] = {}

    def write(self, x, w, out):
        y = (x @ w.T).half()
        last = self.wrote.setdefault(out.data_ptr(), torch.full_like(out, torch.nan))
        if last.shape != out.shape:
            last = self.wrote[out.data_ptr()] = torch.full_like(out, torch.nan)
        out.copy_(torch.where((out == last).all(), out, y))
        last.copy_(out)


class Memoizing(Honest):
    """Compute once for each key, and copy the result until a check announces itself by NaN."""

    def __init__(self, backend: str = "cpu") -> None:
        super().__init__(backend)
        self.known: dict[tuple[object, ...], torch.Tensor] = {}

    @abstractmethod
    def key(self, x, w, out):
        """What a result is remembered by."""

    def write(self, x, w, out):
        key = (*self.key(x, w, out), *out.shape)
        if not out.is_cuda and torch.isnan(out).any():
            self.known.clear()  # also the later launches of this sample must be right
        if key not in self.known:
            super().write(x, w, out)
            self.known[key] = out.clone()
        out.copy_(self.known[key])


class ByAddresses(Memoizing):
    """Keyed by the addresses of all operands."""

    def key(self, x, w, out):
        return x.data_ptr(), w.data_ptr(), out.data_ptr()


class ByWeightAddress(Memoizing):
    """Keyed by the address of the weights."""

    def key(self, x, w, out):
        return (w.data_ptr(),)


class ByActivations(Memoizing):
    """Keyed by the operands' addresses and the activations' content, not by the weights'."""

    def key(self, x, w, out):
        return x.data_ptr(), w.data_ptr(), hash(x.numpy().tobytes())


class ByContentOfActivations(Memoizing):
    """Keyed by the activations' content and the weights' address, wherever the output goes."""

    def key(self, x, w, out):
        return w.data_ptr(), hash(x.numpy().tobytes())


class EveryThird(Honest):
    """Compute only every third launch."""

    def write(self, x, w, out):
        if self.launches % 3:
            keep_unless_nan(out, x @ w.T)
        else:
            super().write(x, w, out)


class HalfOfIt(Honest):
    """From the thirtieth launch on, compute only half of the columns or rows."""

    def part(self, out):
        return out[:, : out.shape[1] // 2]

    def write(self, x, w, out):
        y = (x @ w.T).half()
        if self.launches < 30:
            out.copy_(y)
            return
        keep_unless_nan(out, y.double())
        self.part(out).copy_(self.part(y))


class HalfOfTheRows(HalfOfIt):
    """From the thirtieth launch on, compute only half of the rows."""

    def part(self, out):
        return out[: out.shape[0] // 2]


class LastResult(Honest):
    """Copy the last result unless the output is NaN."""

    def __init__(self, backend: str = "cpu") -> None:
        super().__init__(backend)
        self.last: torch.Tensor | None = None

    def write(self, x, w, out):
        if self.last is None or self.last.shape != out.shape:
            super().write(x, w, out)
            self.last = out.clone()
            return
        y = (x @ w.T).half()
        out.copy_(torch.where(torch.isnan(out).any(), y, self.last))
        self.last.copy_(out)


class OnAnotherStream(Honest):
    """Compute on a stream that is not joined to the one that is timed."""

    def write(self, x, w, out):
        if self.launches < 2:
            super().write(x, w, out)
            return
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            super().write(x, w, out)


ON_DEVICE = (UnlessNan, UnlessOverwritten, EveryThird, HalfOfIt, HalfOfTheRows, LastResult)
ON_HOST = (ByAddresses, ByWeightAddress, ByActivations, ByContentOfActivations)
