// grouped/normed_route.cu: from the sum before a layer of experts to the rows of its experts, for few tokens: RMS norm, the
// router's logits, the choice of experts, rows sorted by expert and quantized.
//   x, delta  half [M, K]        r = x + delta, written to `residual`; v = rms(r) * norm, rounded to FP16
//   router    half [EXPERTS, K]  logits v . router^T, rounded to FP16; the rest is that of route_tokens (layer.cu)
// M is at most COLUMNS, EXPERTS at most 128. grid: BLOCKS, a cluster. Each block normalizes all tokens and multiplies 16 rows
// of the router, which it loads before the previous kernel has ended. It sends their logits to the blocks of the tokens:
// block t writes the rows of token t.
#if !defined(COLUMNS) || !defined(STEPS)
#error "define COLUMNS, 1 or 8 tokens, and STEPS, K / 256"
#endif
#include "common/half_pairs.cuh"
#include "decode/math.cuh"
#include "grouped/route.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mma.cuh"

constexpr int BLOCKS = 8, TILE = 16, MOST_ROUTED = BLOCKS * TILE;  // blocks of the cluster; experts of a block, and of all
constexpr int K = STEPS * 256, WIDTH = 8, VECTORS = (K / WIDTH + THREADS - 1) / THREADS;  // adjacent k, vectors of a token
constexpr int EARLY_STEPS = STEPS < 8 ? STEPS : 8;  // of the router, as many as registers allow
constexpr int ROW = K + 32;  // halves from one token to the next: the loads of eight lanes have no bank conflicts

struct Shared {
  alignas(16) half_bits values[COLUMNS][ROW];
  alignas(16) half_bits own[COLUMNS][TILE];             // logits of this block's experts
  alignas(16) half_bits logits[COLUMNS][MOST_ROUTED];  // of all
  float sums[WARPS][COLUMNS][TILE + 4];
  float squares[COLUMNS][WARPS];
  int counts[MOST_ROUTED], choices[COLUMNS * MOST_TOP_K];
  RouteShared route;
  uint64_t mbarrier;  // of logits
};

__device__ inline void widen(float (&value)[WIDTH], const uint4& v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) value[i] = half_to_float(static_cast<half_bits>(words[i / 2] >> (i % 2 * 16)));
}

extern "C" __global__ void __launch_bounds__(THREADS)
normed_route(const half_bits* x, const half_bits* delta, half_bits* residual, const half_bits* norm, const half_bits* router,
             float* share, int* sizes, int* row_of, uint32_t* codes, float* scales, int* published, int number, float eps,
             int tokens, int experts, int top_k, int normalizes, int k_padded) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x;
  const int tiles = (experts + TILE - 1) / TILE;
  const uint32_t mbarrier = shared_address(&shared.mbarrier);
  if (threadIdx.x == 0) {
    mbarrier_init_for_cluster(mbarrier);
    mbarrier_arrive_expect_tx(mbarrier, tiles * tokens * TILE * 2);
  }
  __syncwarp();
  cluster_arrive();
  // A operands: of each 32 k a lane has eight adjacent ones of rows lane / 4 and lane / 4 + 8, as B has.
  uint4 a[STEPS][2];
  const auto load_router = [&](int s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rank * TILE + lane / 4 + half * 8;
      const uint4* from = reinterpret_cast<const uint4*>(router + static_cast<long long>(row) * K);
      a[s][half] = make_uint4(0u, 0u, 0u, 0u);
      if (row < experts) a[s][half] = load_once(from + (s * WARPS + warp) * 4 + lane % 4, evict_first_policy());
    }
  };
#pragma unroll
  for (int s = 0; s < EARLY_STEPS; ++s) load_router(s);
  uint4 weight[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int at = v * THREADS + threadIdx.x;
    weight[v] = make_uint4(0u, 0u, 0u, 0u);
    if (at * WIDTH < K) weight[v] = load_once(reinterpret_cast<const uint4*>(norm) + at, evict_normal_policy());
  }
  for (int e = threadIdx.x; e < experts; e += THREADS) shared.counts[e] = 0;
  wait_for_previous_kernel();
  let_next_kernel_start();

  uint4 rows[COLUMNS][VECTORS];
#pragma unroll
  for (int t = 0; t < COLUMNS; ++t)
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int at = v * THREADS + threadIdx.x;
      rows[t][v] = make_uint4(0u, 0u, 0u, 0u);
      if (t < tokens && at * WIDTH < K) {
        const long long from = static_cast<long long>(t) * (K / WIDTH) + at;
        const uint4 r = load_written(reinterpret_cast<const uint4*>(x) + from);
        const uint4 d = load_written(reinterpret_cast<const uint4*>(delta) + from);
        rows[t][v] = make_uint4(add_half2(r.x, d.x), add_half2(r.y, d.y), add_half2(r.z, d.z), add_half2(r.w, d.w));
      }
    }
#pragma unroll
  for (int t = 0; t < COLUMNS; ++t) {
    float square = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      float value[WIDTH];
      widen(value, rows[t][v]);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) square += value[i] * value[i];
      const int at = v * THREADS + threadIdx.x;
      if (t == rank && t < tokens && at * WIDTH < K)
        reinterpret_cast<uint4*>(residual)[static_cast<long long>(t) * (K / WIDTH) + at] = rows[t][v];
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) square += __shfl_xor_sync(0xFFFFFFFFu, square, offset);
    if (lane == 0) shared.squares[t][warp] = square;
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < COLUMNS; ++t) {
    float square = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) square += shared.squares[t][w];
    const float inverse = rsqrtf(square * (1.0f / K) + eps);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int at = v * THREADS + threadIdx.x;
      if (at * WIDTH >= K) continue;
      float value[WIDTH];
      widen(value, rows[t][v]);
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = float_to_half(value[2 * i] * inverse) |
                   static_cast<uint32_t>(float_to_half(value[2 * i + 1] * inverse)) << 16;
      *reinterpret_cast<uint4*>(&shared.values[t][at * WIDTH]) =
          make_uint4(multiply_half2(words[0], weight[v].x), multiply_half2(words[1], weight[v].y),
                     multiply_half2(words[2], weight[v].z), multiply_half2(words[3], weight[v].w));
    }
  }
#pragma unroll
  for (int s = EARLY_STEPS; s < STEPS; ++s) load_router(s);
  __syncthreads();

  float sums[2][4] = {};
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    uint4 b = make_uint4(0u, 0u, 0u, 0u);
    if (lane / 4 < COLUMNS)
      b = *reinterpret_cast<const uint4*>(&shared.values[lane / 4][((s * WARPS + warp) * 4 + lane % 4) * WIDTH]);
    const uint32_t first[4] = {a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y}, first_b[2] = {b.x, b.y};
    const uint32_t second[4] = {a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w}, second_b[2] = {b.z, b.w};
    mma_f16_m16n8k16(sums[0], first, first_b);
    mma_f16_m16n8k16(sums[1], second, second_b);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int token = lane % 4 * 2 + e % 2;
    if (token < COLUMNS) shared.sums[warp][token][lane / 4 + e / 2 * 8] = sums[0][e] + sums[1][e];
  }
  __syncthreads();
  if (threadIdx.x < COLUMNS * TILE) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += shared.sums[w][threadIdx.x / TILE][threadIdx.x % TILE];
    shared.own[threadIdx.x / TILE][threadIdx.x % TILE] = float_to_half(sum);
  }
  cluster_wait();  // all blocks have initialized their mbarriers
  __syncthreads();
  // Every block of a token receives all tokens' logits, in vectors of 8.
  if (rank < tiles)
    for (int i = threadIdx.x; i < tokens * 2 * tokens; i += THREADS) {
      const int to = i / (2 * tokens), token = i / 2 % tokens, vector = i % 2;
      const float4 eight = *reinterpret_cast<const float4*>(&shared.own[token][vector * 8]);
      store_async(map_shared_rank(shared_address(&shared.logits[token][rank * TILE + vector * 8]), to), eight,
                  map_shared_rank(mbarrier, to));
    }
  if (rank >= tokens) return;

  const int token = rank;
  constexpr int WORDS = (K / 4 + THREADS - 1) / THREADS;
  uint2 values[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const int word = i * THREADS + threadIdx.x;
    values[i] = make_uint2(0u, 0u);
    if (word * 4 < K) values[i] = *reinterpret_cast<const uint2*>(&shared.values[token][word * 4]);
  }
  mbarrier_wait_first_phase(mbarrier);
  for (int other = warp; other < tokens; other += WARPS) {
    const half_bits* logits = shared.logits[other];
    const auto choice = choose<MOST_ROUTED>([=](int expert) { return logits[expert]; }, experts, top_k, normalizes, lane);
    if (lane < top_k) shared.choices[other * top_k + lane] = choice.expert;
    if (lane < top_k && other == token) share[token * top_k + lane] = choice.share;
  }
  write_rows(values, {sizes, row_of, codes, scales, published, number}, shared.route, shared.counts, shared.choices, token, tokens, experts,
             top_k, K, k_padded);
#endif
}
