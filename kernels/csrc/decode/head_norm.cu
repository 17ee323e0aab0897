// decode/head_norm.cu: RMS norm of every query and key head, in place, before the rotary embedding.
//   qkv         half [M, stride]: `heads` query heads, `kv_heads` key heads, then values
//   query_norm  half [HEAD_DIM], key_norm likewise
// grid: (M, ceil((heads + kv_heads) / WARPS)); one warp per head.
#include "decode/math.cuh"
#include "ptx/launch.cuh"

constexpr int WARPS = 4, OF_LANE = (HEAD_DIM + 31) / 32;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
decode_head_norm(half_bits* qkv, const half_bits* query_norm, const half_bits* key_norm, float eps, int heads,
                 int kv_heads, int stride) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, head = blockIdx.y * WARPS + threadIdx.x / 32;
  if (head >= heads + kv_heads) return;
  half_bits* values = qkv + static_cast<long long>(blockIdx.x) * stride + head * HEAD_DIM;
  const half_bits* weights = head < heads ? query_norm : key_norm;
  float lane_values[OF_LANE], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < OF_LANE; ++i) {
    const int at = i * 32 + lane;
    lane_values[i] = at < HEAD_DIM ? half_to_float(values[at]) : 0.0f;
    squares += lane_values[i] * lane_values[i];
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  const float inverse = 1.0f / sqrtf(squares / HEAD_DIM + eps);
#pragma unroll
  for (int i = 0; i < OF_LANE; ++i) {
    const int at = i * 32 + lane;
    if (at < HEAD_DIM) values[at] = float_to_half(as_half(lane_values[i] * inverse) * half_to_float(weights[at]));
  }
}
