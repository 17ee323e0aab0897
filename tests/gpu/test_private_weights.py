"""On a GPU: private copies of the weights, chosen on the device by a few words, are as cold."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import KernelSpec, LinearKernel, PackedOperand
from flexq_bench.kernels.formats import FP16
from flexq_bench.measure import PROTOCOL_CUDA, Meter
from flexq_bench.measure.tuning import Tuning
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

pytestmark = pytest.mark.alone

SOURCE = r"""
// y[1,N] = x[1,K] . w[N,K]^T, FP16, a warp for each element. copies: private ones of all contents
// of the weights; the one is used whose first 16 bytes are those of w. count 0: w itself.
extern "C" __global__ void multiply(const unsigned short* x, const unsigned short* w,
                                    const unsigned long long* copies, int count, unsigned short* y,
                                    int n, int k) {
  int column = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint4 first = *(const uint4*)w;
  for (int i = 0; i < count; ++i) {
    const uint4 other = *(const uint4*)copies[i];
    if (other.x == first.x && other.y == first.y && other.z == first.z && other.w == first.w) {
      w = (const unsigned short*)copies[i];
      break;
    }
  }
  if (column >= n) return;
  float sum = 0;
  for (int i = lane; i < k / 8; i += 32) {
    const uint4 a = ((const uint4*)x)[i], b = ((const uint4*)(w + (size_t)column * k))[i];
    const unsigned int as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
    for (int j = 0; j < 8; ++j) {
      float left, right;
      asm("cvt.f32.f16 %0, %1;" : "=f"(left) : "h"((unsigned short)(as[j / 2] >> j % 2 * 16)));
      asm("cvt.f32.f16 %0, %1;" : "=f"(right) : "h"((unsigned short)(bs[j / 2] >> j % 2 * 16)));
      sum += left * right;
    }
  }
  for (int i = 16; i > 0; i /= 2) sum += __shfl_down_sync(0xffffffff, sum, i);
  if (lane == 0) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y[column]) : "f"(sum));
}
"""
GEMM = GemmWorkload(1, 2048, 4096)  # 16.8 MB: two copies stay in 50 MB, 48 don't


class Multiply(LinearKernel):
    """FP16 for one token, by the weights that are given."""

    is_private = False

    def __init__(self) -> None:
        self.spec = KernelSpec("cheat", "cuda", FP16, FP16, "multiplies", source_hash="outside")
        self._kept: list[torch.Tensor] = []
        self._addresses = torch.zeros(4096, dtype=torch.int64, device="cuda")
        self._function = None

    def pack_weight(self, weight):
        if self.is_private:
            self._addresses[len(self._kept)] = weight.values.data_ptr()
            self._kept.append(weight.values)
        return PackedOperand({"values": weight.values.clone()}, weight.rows, weight.k)

    def pack_activation(self, x):
        return PackedOperand({"values": x.values}, x.rows, x.k)

    def empty_activation(self, m, k, device):
        values = torch.empty(m, k, dtype=torch.float16, device=device)
        return PackedOperand({"values": values}, m, k)

    def activate(self, x, packed):
        packed.buffers["values"].copy_(x)

    def gemm(self, x, w, out, *, bias=None, config=None):
        cupy = pytest.importorskip("cupy")
        if self._function is None:
            options = ("-std=c++17",)
            module = cupy.RawModule(code=SOURCE, options=options, backend="nvrtc")
            self._function = module.get_function("multiply")
        x_at, w_at = (operand.buffers["values"].data_ptr() for operand in (x, w))
        count = cupy.int32(len(self._kept))
        sizes = cupy.int32(w.rows), cupy.int32(w.k)
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            self._function(
                (w.rows // 8,),
                (256,),
                (x_at, w_at, self._addresses.data_ptr(), count, out.data_ptr(), *sizes),
            )


class PrivateCopies(Multiply):
    """The same by private copies."""

    is_private = True


@pytest.fixture
def measured():
    def run(kernel):
        def resolve(label, backend):
            return kernel if label == "cheat" else registry.resolve(label, backend)

        meter = Meter("cuda:0", PROTOCOL_CUDA, resolve=resolve, tuning=Tuning.NONE)
        return meter.measure(Case("cheat", GEMM))

    return run


def test_private_copies_cost_no_time(measured):
    given, private = measured(Multiply()), measured(PrivateCopies())

    assert given.status in ("ok", "noisy"), given.detail
    assert private.status in ("ok", "noisy"), private.detail
    assert private.median_us > 0.95 * given.median_us
