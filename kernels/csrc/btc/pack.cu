// btc/pack.cu: operands of the FlexQ binary kernel, packed on the GPU with warp ballots.
//
//   pack_weights      codes int8 [N, K]             -> planes uint32 [K/128, N/16, BITS, 16, 4]
//   pack_activations  codes int8 [M, K], half [M, K/128] -> planes uint32 [K/128, COLS, 4], scales
//   quantize_pack     x half [M, K]                 -> the same, with quantization
//
// K/128 and N/16 are rounded up; padding is zero. A word holds 32 values of k, lowest
// k in the lowest bit. COLS = M·BITS rounded up to 8: column m·BITS + t is bit plane t of token m.
// Activation scales are float [K/128, M], each exactly the FP16 scale of its group.
#include "common/quantize.cuh"
#include "ptx/launch.cuh"
#include "ptx/types.cuh"

#ifndef BITS
#error "define BITS, the width of a code"
#endif
constexpr int GROUP = 128;       // values of k that share one scale; also k of one MMA
constexpr int CHUNK = 16;        // rows of W in one MMA
constexpr int WORDS = GROUP / 32;

__device__ inline void load_codes(int (&code)[WORDS], const int8_t* codes, int row, int rows,
                                  int step, int k, int lane) {
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    const int at = step * GROUP + w * 32 + lane;
    code[w] = row < rows && at < k ? codes[static_cast<long long>(row) * k + at] : 0;
  }
}

// grid: (K/128, N/16); 16 warps, one per row.
extern "C" __global__ void pack_weights(const int8_t* codes, uint4* planes, int n, int k) {
  const int lane = threadIdx.x % 32, row_in_chunk = threadIdx.x / 32;
  const int step = blockIdx.x, chunk = blockIdx.y;
  int code[WORDS];
  load_codes(code, codes, chunk * CHUNK + row_in_chunk, n, step, k, lane);
  const uint4 words = ballot_planes<BITS>(code, lane);
  const long long tile = static_cast<long long>(step) * gridDim.y + chunk;
  if (lane < BITS) planes[(tile * BITS + lane) * CHUNK + row_in_chunk] = words;
}

// grid: (K/128, M rounded up so that M·BITS fills 8 columns); one warp.
extern "C" __global__ void pack_activations(const int8_t* codes, const half_bits* scales,
                                            uint4* planes, float* scale_out, int m, int k,
                                            int columns) {
  const int lane = threadIdx.x, step = blockIdx.x, token = blockIdx.y, steps = gridDim.x;
  int code[WORDS];
  load_codes(code, codes, token, m, step, k, lane);
  const uint4 words = ballot_planes<BITS>(code, lane);
  const int column = token * BITS + lane;
  if (lane < BITS && column < columns) planes[static_cast<long long>(step) * columns + column] = words;
  if (lane == 0 && token < m) scale_out[step * m + token] = half_to_float(scales[token * steps + step]);
}

// Codes of quantize.cuh with one scale per group.
extern "C" __global__ void quantize_pack(const half_bits* x, uint4* planes, float* scale_out, int m,
                                         int k, int columns) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = threadIdx.x, step = blockIdx.x, token = blockIdx.y;
  float value[WORDS];
  float largest = 0.0f;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    const int at = step * GROUP + w * 32 + lane;
    value[w] = token < m && at < k ? half_to_float(x[static_cast<long long>(token) * k + at]) : 0.0f;
    largest = fmaxf(largest, fabsf(value[w]));
  }
  largest = warp_maximum(largest);
  const float scale = scale_of<BITS>(largest);
  const Divisor divisor = divisor_of(scale);
  int code[WORDS];
#pragma unroll
  for (int w = 0; w < WORDS; ++w) code[w] = code_of<BITS>(value[w], divisor);
  const uint4 words = ballot_planes<BITS>(code, lane);
  const int column = token * BITS + lane;
  if (lane < BITS && column < columns) planes[static_cast<long long>(step) * columns + column] = words;
  if (lane == 0 && token < m) scale_out[step * m + token] = scale;
}
