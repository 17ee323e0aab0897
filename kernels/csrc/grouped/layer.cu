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
#include "common/quantize.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, MOST_TOP_K = 16, MOST_CODES = 8;  // words of codes of a thread
constexpr int FEATURES = 8;                // of a thread of combine
constexpr int MOST_EXPERTS = 512, LANE_EXPERTS = MOST_EXPERTS / 32;  // of a choice, and of a lane
constexpr int FEW_TOKENS = 32;             // for which every block of route_tokens chooses the experts of all

// Keys in the order of logits, then of experts backwards. 0: no expert.
__device__ inline uint32_t key_of(half_bits logit, int expert) {
  const uint32_t ordered = logit ^ (logit & 0x8000u ? 0xFFFFu : 0x8000u);
  return ordered << 16 | static_cast<uint32_t>(0xFFFF - expert);
}
__device__ inline float logit_of(uint32_t key) {
  const uint32_t ordered = key >> 16;
  return half_to_float(static_cast<half_bits>(ordered ^ (ordered & 0x8000u ? 0x8000u : 0xFFFFu)));
}

struct Choice {
  int expert;
  float share;
};

// Choose the experts of a token, by one warp: lane j < top_k gets the expert with the j-th largest logit.
__device__ inline Choice choose(const half_bits* logits, int experts, int top_k, int normalizes, int lane) {
  uint32_t keys[LANE_EXPERTS], own = 0;
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; ++i) {
    const int expert = i * 32 + lane;
    keys[i] = expert < experts ? key_of(load_written(logits + expert), expert) : 0;
  }
  float top = 0.0f, total = 0.0f;
  for (int j = 0; j < top_k; ++j) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i) largest = max(largest, keys[i]);
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    if (j == 0) {
      top = logit_of(largest);
      if (!normalizes) {
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; ++i) total += keys[i] == 0 ? 0.0f : __expf(logit_of(keys[i]) - top);
      }
    }
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i)
      if (keys[i] == largest) keys[i] = 0;
    if (lane == j) own = largest;
  }
  const float weight = lane < top_k ? __expf(logit_of(own) - top) : 0.0f;
  if (normalizes) total = weight;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, offset);
  return {0xFFFF - static_cast<int>(own & 0xFFFFu), weight / total};
}

// grid: TOKENS / WARPS rounded up: a warp for each token.
extern "C" __global__ void __launch_bounds__(THREADS)
choose_experts(const half_bits* logits, int* chosen, float* share, int tokens, int experts, int top_k, int normalizes) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int token = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= tokens) return;
  const Choice choice = choose(logits + static_cast<long long>(token) * experts, experts, top_k, normalizes, lane);
  if (lane < top_k) chosen[token * top_k + lane] = choice.expert, share[token * top_k + lane] = choice.share;
}

// Write the rows of a token, and with the first one the sizes, then let the next kernel start: it reads the sizes before
// this one has ended, and only then are they likely those of this launch.
__device__ inline void publish(int* sizes, int* row_of, const int* counts, const int* before, int token, int experts,
                               int top_k) {
  if (token == 0)
    for (int e = threadIdx.x; e < experts; e += THREADS) sizes[e] = counts[e];
  if (threadIdx.x < top_k) row_of[token * top_k + threadIdx.x] = before[threadIdx.x];
  __threadfence();
  __syncthreads();
  let_next_kernel_start();
}

// grid: TOKENS, at most FEW_TOKENS with logits, which replace `chosen`. Shared memory: EXPERTS ints.
extern "C" __global__ void __launch_bounds__(THREADS)
route_tokens(const half_bits* logits, const int* chosen, float* share, const half_bits* x, int* sizes, int* row_of,
             uint32_t* codes, float* scales, int experts, int top_k, int normalizes, int k, int k_padded) {
  extern __shared__ int counts[];
  __shared__ int choices[FEW_TOKENS * MOST_TOP_K];
  __shared__ int before[MOST_TOP_K];
  __shared__ float largest_of[WARPS];
  const int token = blockIdx.x, routed = gridDim.x * top_k;
  wait_for_previous_kernel();
  // Four adjacent k of each word; past K zeros.
  uint2 values[MOST_CODES];
  const uint2* row = reinterpret_cast<const uint2*>(x + static_cast<long long>(token) * k);
#pragma unroll
  for (int i = 0; i < MOST_CODES; ++i) {
    const int word = i * THREADS + threadIdx.x;
    values[i] = word * 4 < k ? load_written(row + word) : make_uint2(0u, 0u);
  }
  if (threadIdx.x < MOST_TOP_K) before[threadIdx.x] = 0;
  if (token == 0)
    for (int e = threadIdx.x; e < experts; e += THREADS) counts[e] = 0;
  if (logits != nullptr) {
    chosen = choices;
    for (int other = threadIdx.x / 32; other < gridDim.x; other += WARPS) {
      const int lane = threadIdx.x % 32;
      const Choice choice = choose(logits + static_cast<long long>(other) * experts, experts, top_k, normalizes, lane);
      if (lane < top_k) choices[other * top_k + lane] = choice.expert;
      if (lane < top_k && other == token) share[token * top_k + lane] = choice.share;
    }
  }
  __syncthreads();
  int earlier[MOST_TOP_K] = {};  // rows before those of this token
  for (int i = threadIdx.x; i < routed; i += THREADS) {
    const int expert = chosen[i];
    if (token == 0) atomicAdd(counts + expert, 1);
#pragma unroll
    for (int j = 0; j < MOST_TOP_K; ++j)
      if (j < top_k) {
        const int own = chosen[token * top_k + j];
        earlier[j] += expert < own || (expert == own && i < token * top_k + j);
      }
  }
#pragma unroll
  for (int j = 0; j < MOST_TOP_K; ++j)
    if (j < top_k) {
      const int sum = __reduce_add_sync(0xFFFFFFFFu, earlier[j]);
      if (threadIdx.x % 32 == 0) atomicAdd(before + j, sum);
    }
  if (scales == nullptr) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST_CODES; ++i) {
      const int word = i * THREADS + threadIdx.x;
      if (word * 4 >= k) break;
      for (int j = 0; j < top_k; ++j)
        reinterpret_cast<uint2*>(codes)[static_cast<long long>(before[j]) * (k / 4) + word] = values[i];
    }
    publish(sizes, row_of, counts, before, token, experts, top_k);
    return;
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < MOST_CODES; ++i) {
    const uint32_t pair[2] = {values[i].x & 0x7FFF7FFFu, values[i].y & 0x7FFF7FFFu};
#pragma unroll
    for (int h = 0; h < 4; ++h) largest = fmaxf(largest, half_to_float(static_cast<half_bits>(pair[h / 2] >> (h % 2 * 16))));
  }
  largest = warp_maximum(largest);
  if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, largest_of[warp]);
  const float scale = scale_of<8>(largest);
  const Divisor divisor = divisor_of(scale);
#pragma unroll
  for (int i = 0; i < MOST_CODES; ++i) {
    const int at = i * THREADS + threadIdx.x;
    if (at * 4 >= k_padded) break;
    const uint32_t pair[2] = {values[i].x, values[i].y};
    uint32_t word = 0;
#pragma unroll
    for (int h = 0; h < 4; ++h)
      word |= (static_cast<uint32_t>(code_of<8>(half_to_float(static_cast<half_bits>(pair[h / 2] >> (h % 2 * 16))), divisor)) & 255u) << (8 * h);
    for (int j = 0; j < top_k; ++j) codes[static_cast<long long>(before[j]) * (k_padded / 4) + at] = word;
  }
  if (threadIdx.x < top_k) scales[before[threadIdx.x]] = scale;
  publish(sizes, row_of, counts, before, token, experts, top_k);
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
