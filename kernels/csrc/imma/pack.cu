// imma/pack.cu: operands of the int8 tensor-core kernels.
//   pack_weights    W_BITS 6: codes int8 [N, K], scales half [N, K/128]
//                   -> tiles [N/16, K/128], scales half [N/16, K/128, 8, 2] (imma/layout.cuh)
//   quantize_rows   x half [M, K] -> codes int8 [M, K_PAD], scales float [K/128, M_PAD]; codes of a
//                   group in natural order or in that of imma/mma_order.cuh. INT8_TAIL: k is channel
//                   order[k] of x, int [K], the last group has 8-bit codes, and the others' codes span
//                   0.9 of their range
// K/128 and N/16 are rounded up, K_PAD = 128 * steps, M_PAD is M rounded up to 8; padding is zero.
#include "common/quantize.cuh"
#include "imma/layout.cuh"
#include "ptx/launch.cuh"
#include "ptx/types.cuh"

#if W_BITS == 6
// grid: (K/128, N/16); one warp.
extern "C" __global__ void pack_weights(const int8_t* codes, const half_bits* scales,
                                        unsigned char* tiles, half_bits* tile_scales, int n,
                                        int k) {
  const int lane = threadIdx.x, step = blockIdx.x, steps = gridDim.x;
  const long long tile = static_cast<long long>(blockIdx.y) * steps + step;
  uint32_t words[LANE_WORDS] = {};
#pragma unroll
  for (int o = 0; o < OPERAND_WORDS; ++o) {
    const int row = blockIdx.y * MMA_ROWS + lane / 4 + 8 * (o % 2);
    const int first = step * GROUP + LANE_K * (lane % 4) + 8 * (o / 4) + 4 * (o % 4 / 2);
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const bool inside = row < n && first + byte < k;
      const uint32_t code =
          inside ? static_cast<uint32_t>(codes[static_cast<long long>(row) * k + first + byte]) : 0u;
      uint32_t* mma_words = words + o / 4 * 3;
      if (o % 4 < 3) {
        mma_words[o % 4] |= (code & 63u) << (8 * byte + 2);
      } else {
#pragma unroll
        for (int i = 0; i < 3; ++i) mma_words[i] |= (code >> (4 - 2 * i) & 3u) << (8 * byte);
      }
    }
  }
  uint4* out = reinterpret_cast<uint4*>(tiles + tile * TILE_BYTES);
#pragma unroll
  for (int i = 0; i < LANE_WORDS; i += 4)
    out[i * 8 + lane] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  if (lane < MMA_ROWS) {
    const int row = blockIdx.y * MMA_ROWS + lane / 2 + 8 * (lane % 2);
    tile_scales[tile * MMA_ROWS + lane] =
        row < n ? scales[static_cast<long long>(row) * steps + step] : half_bits(0);
  }
}
#endif

#ifdef A_BITS
constexpr int QUANTIZE_WARPS = 8;  // of a block, one group each
// Fraction of a group's range that Atom's 4-bit codes span (arXiv 2310.19102, section 4.4).
constexpr float HEAD_SHARE = INT8_TAIL ? 0.9f : 1.0f;

// Codes of quantize.cuh with one scale per group.
// grid: (K/128 over QUANTIZE_WARPS, M_PAD); a lane has four adjacent k.
extern "C" __global__ void quantize_rows(const half_bits* x, uint32_t* codes, float* scales, int m,
                                         int k, int in_mma_order,
                                         [[maybe_unused]] const int* order) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, step = blockIdx.x * QUANTIZE_WARPS + threadIdx.x / 32;
  const int token = blockIdx.y, steps = (k + GROUP - 1) / GROUP;
  if (step >= steps) return;
  const int first = step * GROUP + 4 * lane;
  const half_bits* row = x + static_cast<long long>(token) * k;
  const half_bits* at = row + first;
  float value[4] = {};
  const bool aligned = k % 4 == 0 && reinterpret_cast<uint64_t>(x) % 8 == 0;  // of all rows
  if constexpr (INT8_TAIL) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (token < m && first + i < k) value[i] = half_to_float(row[order[first + i]]);
  } else if (aligned && token < m && first < k) {
    const uint2 halves = *reinterpret_cast<const uint2*>(at);
    value[0] = half_to_float(static_cast<half_bits>(halves.x));
    value[1] = half_to_float(static_cast<half_bits>(halves.x >> 16));
    value[2] = half_to_float(static_cast<half_bits>(halves.y));
    value[3] = half_to_float(static_cast<half_bits>(halves.y >> 16));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (token < m && first + i < k) value[i] = half_to_float(at[i]);
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(value[i]));
  largest = warp_maximum(largest);
  const bool is_tail = INT8_TAIL && step == steps - 1;
  const float scale = is_tail ? scale_of<8>(largest) : scale_of<A_BITS>(largest * HEAD_SHARE);
  const Divisor divisor = divisor_of(scale);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int code = is_tail ? code_of<8>(value[i], divisor) : code_of<A_BITS>(value[i], divisor);
    word |= (static_cast<uint32_t>(code) & 255u) << (8 * i);
  }
  const int at_word = in_mma_order ? mma_word(lane) : lane;
  if (token < m) codes[(static_cast<long long>(token) * steps + step) * 32 + at_word] = word;
  if (lane == 0) scales[step * gridDim.y + token] = scale;
}
#endif
