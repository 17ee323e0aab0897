// grouped/route.cuh: chooses the experts of tokens, sorts tokens by expert, and quantizes them.
#pragma once
#include "common/quantize.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, MOST_TOP_K = 16, MOST_CODES = 8;  // words of codes of a thread
constexpr int MOST_EXPERTS = 512;

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
// logit_at(expert): its logit. MOST: experts.
template <int MOST = MOST_EXPERTS, typename Logits>
__device__ inline Choice choose(const Logits& logit_at, int experts, int top_k, int normalizes, int lane) {
  constexpr int LANE_EXPERTS = MOST / 32;
  uint32_t keys[LANE_EXPERTS], own = 0;
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; ++i) {
    const int expert = i * 32 + lane;
    keys[i] = expert < experts ? key_of(logit_at(expert), expert) : 0;
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

// What the rows of a token's experts are written to, as route_tokens says. The next kernel may start before: once sizes are
// written, `published` is set to `number`.
struct Rows {
  int *sizes, *row_of;
  uint32_t* codes;
  float* scales;
  int *published, number;
};

struct RouteShared {
  int before[MOST_TOP_K];
  float largest_of[WARPS];
};

// Write the rows of a token by a block, whose threads have four adjacent k of each word; past K zeros. chosen: experts of
// all tokens. counts: zeros for the first token. Begins with a barrier.
template <int WORDS>
__device__ inline void write_rows(const uint2 (&values)[WORDS], const Rows& to, RouteShared& shared, int* counts,
                                  const int* chosen, int token, int tokens, int experts, int top_k, int k, int k_padded) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, routed = tokens * top_k;
  __syncthreads();
  if (token == 0) {
    for (int i = threadIdx.x; i < routed; i += THREADS) atomicAdd(counts + chosen[i], 1);
    __syncthreads();
    if (warp == 0) {
      for (int e = lane; e < experts; e += 32) to.sizes[e] = counts[e];
      __syncwarp();
      if (lane == 0) store_release(to.published, to.number);
    }
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const uint32_t pair[2] = {values[i].x & 0x7FFF7FFFu, values[i].y & 0x7FFF7FFFu};
#pragma unroll
    for (int h = 0; h < 4; ++h) largest = fmaxf(largest, half_to_float(static_cast<half_bits>(pair[h / 2] >> (h % 2 * 16))));
  }
  largest = warp_maximum(largest);
  if (lane == 0) shared.largest_of[warp] = largest;
#pragma unroll 1
  for (int j = warp; j < top_k; j += WARPS) {  // a row's number: how many are before it
    const int at = token * top_k + j, own = chosen[at];
    int before = 0;
#pragma unroll 1
    for (int i = lane; i < routed; i += 32) before += chosen[i] < own || (chosen[i] == own && i < at);
    before = __reduce_add_sync(0xFFFFFFFFu, before);
    if (lane == 0) shared.before[j] = before, to.row_of[at] = before;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, shared.largest_of[w]);
  const float scale = scale_of<8>(largest);
  const Divisor divisor = divisor_of(scale);
  if (to.scales != nullptr && threadIdx.x < top_k) to.scales[shared.before[threadIdx.x]] = scale;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const int at = i * THREADS + threadIdx.x;
    if (to.scales == nullptr) {
      if (at * 4 >= k) break;
      for (int j = 0; j < top_k; ++j)
        reinterpret_cast<uint2*>(to.codes)[static_cast<long long>(shared.before[j]) * (k / 4) + at] = values[i];
      continue;
    }
    if (at * 4 >= k_padded) break;
    const uint32_t pair[2] = {values[i].x, values[i].y};
    uint32_t word = 0;
#pragma unroll
    for (int h = 0; h < 4; ++h)
      word |= (static_cast<uint32_t>(code_of<8>(half_to_float(static_cast<half_bits>(pair[h / 2] >> (h % 2 * 16))), divisor)) & 255u) << (8 * h);
    for (int j = 0; j < top_k; ++j) to.codes[static_cast<long long>(shared.before[j]) * (k_padded / 4) + at] = word;
  }
}
