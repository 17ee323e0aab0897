"""W6A8 and W4A16 in CUDA C++, compiled with NVRTC by CuPy: a warp computes an output element."""

import torch
from torch.nn.functional import pad

from flexq_bench.api import compile_cuda, linear_kernel

GROUP = 128
PADDING_PERCENT = 0  # of the groups: zeros that follow them in the weights
SIGN = 1
WARPS = 8
SOURCE = r"""
typedef unsigned short half;  // so that it compiles without headers
__device__ float real(float value) { return value; }
__device__ float real(signed char value) { return value; }
__device__ float real(half value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}
__device__ half rounded(float value) {
  half narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
  return narrow;
}
// y[M,N] = x[M,K] . w[N,K]^T; xs [M,groups] and ws [N,groups], groups of 128 values of k. w has k_w
// columns: those behind k are zeros, which meet the first ones of x again.
template <typename X, bool SCALED>
__device__ void element(const X* x, const half* xs, const signed char* w, const half* ws, half* y,
                        int n, int k, int k_w, float sign) {
  int column = blockIdx.x * 8 + threadIdx.x / 32, row = blockIdx.y, lane = threadIdx.x % 32;
  if (column >= n) return;
  int groups = (k + 127) / 128, groups_w = (k_w + 127) / 128;
  float total = 0;
  for (int group = 0; group < groups_w; ++group) {
    float sum = 0;
    for (int i = group * 128 + lane; i < min(k_w, group * 128 + 128); i += 32)
      sum += real(x[row * k + (i < k ? i : i - k)]) * real(w[column * k_w + i]);
    float scale = real(ws[column * groups_w + group]);
    if (SCALED) scale *= real(xs[row * groups + group % groups]);
    total += sum * scale;
  }
  for (int i = 16; i > 0; i /= 2) total += __shfl_down_sync(0xffffffff, total, i);
  if (lane == 0) y[row * n + column] = rounded(sign * total);
}
extern "C" __global__ void w6a8(const signed char* x, const half* xs, const signed char* w,
                                const half* ws, half* y, int n, int k, int k_w, float sign) {
  element<signed char, true>(x, xs, w, ws, y, n, k, k_w, sign);
}
extern "C" __global__ void w4a16(const half* x, const half* xs, const signed char* w,
                                 const half* ws, half* y, int n, int k, int k_w, float sign) {
  element<half, false>(x, xs, w, ws, y, n, k, k_w, sign);
}
"""
module = None


def cubin(target):
    """Compile the machine code that `gate static` compares; needs no GPU."""
    return compile_cuda(SOURCE, target)


def padded(codes, scales):
    """Codes and scales of weights with groups of zeros behind them."""
    groups = codes.shape[1] // GROUP * PADDING_PERCENT // 100
    return pad(codes, (0, groups * GROUP)), pad(scales, (0, groups))


def launch(name, x, xs, w, ws, out):
    """Launch a warp for each element of out."""
    import cupy  # needs a driver

    global module
    module = module or cupy.RawModule(code=SOURCE, options=("-std=c++17",), backend="nvrtc")
    m, n = out.shape
    pointers = [tensor.data_ptr() for tensor in (x, xs, w, ws, out)]
    sizes = (cupy.int32(n), cupy.int32(x.shape[1]), cupy.int32(w.shape[1]))
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        function = module.get_function(name)
        grid = ((n + WARPS - 1) // WARPS, m)
        function(grid, (32 * WARPS,), (*pointers, *sizes, cupy.float32(SIGN)))


@linear_kernel(
    "nvrtc-w6a8",
    weight="int6/128",
    activation="int8/128",
    backends=["cuda"],
    prepare_weight=padded,
    machine_code=cubin,
)
def w6a8(x_codes, x_scales, w_codes, w_scales, out):
    """W6A8: FP32 sums of a group, scales after it."""
    launch("w6a8", x_codes, x_scales, w_codes, w_scales, out)


@linear_kernel(
    "nvrtc-w4a16",
    weight="int4/128",
    backends=["cuda"],
    prepare_weight=padded,
    machine_code=cubin,
)
def w4a16(x, w_codes, w_scales, out):
    """W4A16: FP32 sums of a group, scales after it."""
    launch("w4a16", x, w_scales, w_codes, w_scales, out)
