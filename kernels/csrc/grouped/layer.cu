// grouped/layer.cu: what a layer of experts needs besides its linear layers.
//   choose_experts logits half [TOKENS, EXPERTS] -> chosen int [TOKENS * TOP_K], the experts with the largest logits,
//                  the first of equal ones; share float [TOKENS * TOP_K]: softmax over all, or over the chosen
//   route_tokens   chosen int [TOKENS * TOP_K], experts of each token, x half [TOKENS, K]
//                  -> sizes int [EXPERTS]; row_of int [TOKENS * TOP_K], rows sorted by expert, then by token;
//                  codes int8 [TOKENS * TOP_K, K_PAD] and scales float [TOKENS * TOP_K], of these rows; without
//                  scales, codes are x itself, half [TOKENS * TOP_K, K]. For few tokens it chooses the experts, too
//   combine        y half [TOKENS * TOP_K, N], row_of, share float [TOKENS * TOP_K]
//                  -> out half [TOKENS, N], the sum over a token's experts in the order of `chosen`
// A block of route_tokens quantizes one token, finds its rows by counting, and writes its codes once for each expert.
#include "grouped/route.cuh"

constexpr int FEATURES = 8;                // of a thread of combine
constexpr int FEW_TOKENS = 32;             // for which every block of route_tokens chooses the experts of all

__device__ inline auto logits_of(const half_bits* logits, int token, int experts) {
  const half_bits* row = logits + static_cast<long long>(token) * experts;
  return [=](int expert) { return static_cast<half_bits>(load_written(row + expert)); };
}

// grid: TOKENS / WARPS rounded up: a warp for each token.
extern "C" __global__ void __launch_bounds__(THREADS)
choose_experts(const half_bits* logits, int* chosen, float* share, int tokens, int experts, int top_k, int normalizes) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int token = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= tokens) return;
  const Choice choice = choose(logits_of(logits, token, experts), experts, top_k, normalizes, lane);
  if (lane < top_k) chosen[token * top_k + lane] = choice.expert, share[token * top_k + lane] = choice.share;
}

// grid: TOKENS, at most FEW_TOKENS with logits, which replace `chosen`. Shared memory: EXPERTS ints.
extern "C" __global__ void __launch_bounds__(THREADS)
route_tokens(const half_bits* logits, const int* chosen, float* share, const half_bits* x, int* sizes, int* row_of,
             uint32_t* codes, float* scales, int* published, int number, int experts, int top_k, int normalizes, int k,
             int k_padded) {
  extern __shared__ int counts[];
  __shared__ int choices[FEW_TOKENS * MOST_TOP_K];
  __shared__ RouteShared shared;
  const int token = blockIdx.x;
  wait_for_previous_kernel();
  let_next_kernel_start();  // not before: the kernels before wrote with the same buffers
  // Four adjacent k of each word; past K zeros.
  uint2 values[MOST_CODES];
  const uint2* row = reinterpret_cast<const uint2*>(x + static_cast<long long>(token) * k);
#pragma unroll
  for (int i = 0; i < MOST_CODES; ++i) {
    const int word = i * THREADS + threadIdx.x;
    values[i] = word * 4 < k ? load_written(row + word) : make_uint2(0u, 0u);
  }
  if (token == 0)
    for (int e = threadIdx.x; e < experts; e += THREADS) counts[e] = 0;
  if (logits != nullptr) {
    chosen = choices;
    for (int other = threadIdx.x / 32; other < gridDim.x; other += WARPS) {
      const int lane = threadIdx.x % 32;
      const Choice choice = choose(logits_of(logits, other, experts), experts, top_k, normalizes, lane);
      if (lane < top_k) choices[other * top_k + lane] = choice.expert;
      if (lane < top_k && other == token) share[token * top_k + lane] = choice.share;
    }
  }
  write_rows(values, {sizes, row_of, codes, scales, published, number}, shared, counts, chosen, token, gridDim.x, experts, top_k, k, k_padded);
}

// grid: (N / (THREADS * FEATURES) rounded up, TOKENS). N is a multiple of FEATURES.
extern "C" __global__ void __launch_bounds__(THREADS)
combine(const half_bits* y, const int* row_of, const float* share, half_bits* out, int n, int top_k) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int token = blockIdx.y, feature = (blockIdx.x * THREADS + threadIdx.x) * FEATURES;
  if (feature >= n) return;
  float sum[FEATURES] = {};
#pragma unroll 8
  for (int j = 0; j < top_k; ++j) {
    const int row = row_of[token * top_k + j];
    const float weight = load_written(share + token * top_k + j);
    const uint4 v = load_written(reinterpret_cast<const uint4*>(y + static_cast<long long>(row) * n + feature));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < FEATURES; ++i)
      sum[i] = fmaf(weight, half_to_float(static_cast<half_bits>(words[i / 2] >> (i % 2 * 16))), sum[i]);
  }
  uint32_t halves[FEATURES / 2];
#pragma unroll
  for (int i = 0; i < FEATURES / 2; ++i)
    halves[i] = float_to_half(sum[2 * i]) | static_cast<uint32_t>(float_to_half(sum[2 * i + 1])) << 16;
  *reinterpret_cast<uint4*>(out + static_cast<long long>(token) * n + feature) =
      make_uint4(halves[0], halves[1], halves[2], halves[3]);
}
