// decode/attention.cu: attention of one new token per sequence over its KV cache, split over blocks.
//   qkv        half [B, (HEADS + 2 KV_HEADS) * HEAD_DIM], before rotation
//   table      float [CONTEXT, HEAD_DIM / 2, 2], cosine and sine; with ROTARY 0 unused
//   positions  int [B], of the new token; its sequence has positions + 1 tokens
//   keys, values  cache [SLOTS, KV_HEADS, CAPACITY, HEAD_DIM] (decode/kv_cache.cuh), with scales
//              [SLOTS, KV_HEADS, CAPACITY] where KV_BITS < 16; the new token's are written
// PACKING, the form of a head's output:
//   HALVES, GROUP_CODES  the next layer's activations, as decode/operators.cu writes them, `packed` and `scales`:
//              splits are a thread block cluster, whose blocks exchange partial sums
//   SPLITS     sums float [B, HEADS, SPLITS, HEAD_DIM]: sum of exp2(score - largest) * value of each split;
//              weights float2 [B, HEADS, SPLITS]: largest score, in base 2, and the sum of
//              exp2(score - largest), (LOWEST, 0) for a split without tokens. decode/operators.cu reduces them
//
// SERIAL: a block computes all splits of a sequence, one after the other, and rounds as a block for each would.
//
// HEAD_NORMS: queries and the new key are RMS-normalized before rotation, query_norm, key_norm half [HEAD_DIM]
// (decode/head_norm.cu).
//
// Positions, and keys and values of earlier tokens, were written in an earlier step. No kernel of this step
// writes them, so they are loaded before the previous kernel has ended.
//
// A block computes one KV head with all GROUP_HEADS query heads that share it. Its warps take STEP positions
// round-robin (decode/attention_tile.cuh), each with its own online softmax. The results of warps, of the new token
// and of blocks are reduced at the end, in fixed order.
//
// Keys and values are prefetched to registers: with a cp.async ring buffer in shared memory an FP16 cache was
// slower from batch 4 on.
#if !defined(HEAD_DIM) || !defined(GROUP_HEADS) || !defined(KV_BITS) || !defined(ROTARY) || \
    !defined(PACKING) || !defined(A_BITS) || !defined(TILES) || !defined(WARPS)
#error "define HEAD_DIM, GROUP_HEADS, KV_BITS, ROTARY, PACKING, A_BITS, TILES and WARPS"
#endif
#ifndef HEAD_NORMS
#define HEAD_NORMS 0
#endif
#ifndef SERIAL
#define SERIAL 0
#endif
#include "decode/attention_tile.cuh"
#include "decode/kv_store.cuh"
#include "decode/pack.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

constexpr int SPLITS = 3;  // PACKING
constexpr int THREADS = WARPS * 32;
constexpr int STEP = TILES * TILE_POSITIONS;  // positions of a warp per iteration
// Blocks per SM that split_count (kernels/decoder/attention.py) expects, as far as registers suffice.
constexpr int LEAST_BLOCKS = GROUP_HEADS == 1 && HEAD_DIM <= 128 ? 3 : 2;
constexpr int PARTS = WARPS + 1;  // of a block: its warps and the new token
constexpr int MOST_SPLITS = 8;    // of a cluster
// Complex numbers of a head; pairs of them, of a lane; heads that a warp rotates.
constexpr int HALF = HEAD_DIM / 2, NUMBERS = (HALF / 2 + 31) / 32, HEADS_OF_WARP = (GROUP_HEADS + WARPS) / WARPS;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOWEST = -3.0e38f;  // finite lower bound of scores
static_assert(WARPS >= 4, "WARPS must be at least 4: two of them write the new token");

// A head's partial sums of one block, sent to the block that finishes its unit: rank unit % splits.
struct PartialHead {
  float4 sums[HEAD_DIM / WIDTH];
  float4 stats;  // largest score, sum of weights
};
// Adjacent heads that one warp finishes: those of a group of codes.
constexpr int UNIT = PACKING == GROUP_CODES && HEAD_DIM < GROUP ? GROUP / HEAD_DIM : 1;
static_assert(GROUP_HEADS % UNIT == 0, "the heads of a KV head must be whole groups");
// PartialHeads that a block receives.
constexpr int ARRIVED = PACKING == SPLITS ? 1 : SERIAL ? GROUP_HEADS * MOST_SPLITS : GROUP_HEADS + (MOST_SPLITS - 1) * UNIT;

struct Shared {
  float sums[WARPS][GROUP_HEADS * HEAD_DIM];
  PartialHead partial_heads[ARRIVED];
  float4 part_stats[GROUP_HEADS][PARTS];  // largest score, sum of weights, sum of weights times minimums
  uint32_t query[GROUP_HEADS][4][ROW];
  alignas(16) float new_token[2][HEAD_DIM];  // its key and value, as later steps read them from the cache
  half_bits key[HEAD_DIM];   // of the new token
  half_bits norms[HEAD_NORMS ? 2 : 1][HEAD_DIM];   // weights of queries and keys
  uint64_t mbarrier;         // of partial_heads
};

// The first of a lane's pair v of complex numbers.
__device__ inline int first_number(int v) { return (v * 32 + static_cast<int>(threadIdx.x) % 32) * 2; }

// Cosines and sines of two adjacent numbers.
__device__ inline float4 load_angles(const float2* two) {
  const uint4 bits = load_written(reinterpret_cast<const uint4*>(two));
  return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
}

// RMS norm of a head by a warp; `value` has both halves of a lane's numbers, zeros past the head.
__device__ inline void normalize(float (&value)[NUMBERS][2][2], const half_bits* weights, float eps) {
  float square = 0.0f;
#pragma unroll
  for (int v = 0; v < NUMBERS; ++v)
#pragma unroll
    for (int i = 0; i < 4; ++i) square += value[v][i / 2][i % 2] * value[v][i / 2][i % 2];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) square += __shfl_xor_sync(EVERY, square, offset);
  const float inverse = rsqrtf(square / HEAD_DIM + eps);
#pragma unroll
  for (int v = 0; v < NUMBERS; ++v)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = min(first_number(v), HALF - 2) + i % 2 + i / 2 * HALF;
      float& of = value[v][i / 2][i % 2];
      of = as_half(as_half(of * inverse) * half_to_float(weights[at]));
    }
}

// Compute the scores of the new token, by one warp.
__device__ inline void score_new_token(Shared& shared, float scale) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int head = 0; head < GROUP_HEADS; ++head) {
    const half_bits* query = reinterpret_cast<const half_bits*>(shared.query[head]);
    float dot = 0.0f;
    for (int i = lane; i < HEAD_DIM; i += 32)
      dot += half_to_float(query[key_index<ROW>(i)]) * (code_factor(i) * shared.new_token[0][i]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_xor_sync(EVERY, dot, offset);
    if (lane == 0) shared.part_stats[head][WARPS] = make_float4(dot * scale, 1.0f, 0.0f, 0.0f);
  }
}

// Reduce the splits of a unit of heads, of which `head` is the first, and write their output, by one warp.
__device__ inline void finish(const PartialHead* partial_heads, int head, int splits, int token, int stride,
                              void* packed, float* scales, int scale_stride, int in_mma_order) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int vector = 0; vector < (UNIT * HEAD_DIM / WIDTH + 31) / 32; ++vector) {
    const int index = vector * 32 + lane, last = UNIT * HEAD_DIM / WIDTH - 1;
    const int at = min(index, last) % (HEAD_DIM / WIDTH);
    const PartialHead* of_head = partial_heads + min(index, last) / (HEAD_DIM / WIDTH) * splits;
    float4 stats[MOST_SPLITS], sum[MOST_SPLITS];
#pragma unroll
    for (int s = 0; s < MOST_SPLITS; ++s) {
      stats[s] = make_float4(LOWEST, 0.0f, 0.0f, 0.0f);
      sum[s] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (s < splits) stats[s] = of_head[s].stats, sum[s] = of_head[s].sums[at];
    }
    float top = stats[0].x, total = 0.0f, value[WIDTH] = {};  // the first split has the new token, so top is finite
#pragma unroll
    for (int s = 1; s < MOST_SPLITS; ++s) top = fmaxf(top, stats[s].x);
#pragma unroll
    for (int s = 0; s < MOST_SPLITS; ++s) {
      const float factor = power_of_two(stats[s].x - top);
      total += factor * stats[s].y;
      value[0] += factor * sum[s].x, value[1] += factor * sum[s].y;
      value[2] += factor * sum[s].z, value[3] += factor * sum[s].w;
    }
    const float inverse = __fdividef(1.0f, total);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) value[j] = as_half(value[j] * inverse);
    const long long row = static_cast<long long>(token) * stride;
    if constexpr (PACKING == HALVES) {
      uint2* to = reinterpret_cast<uint2*>(static_cast<half_bits*>(packed) + row + head * HEAD_DIM);
      if (index < HEAD_DIM / WIDTH) to[index] = narrow(value);
    } else {
      const int step = head * HEAD_DIM / GROUP + vector;
      write_group(value, static_cast<int8_t*>(packed) + row,
                  scales + static_cast<long long>(step) * scale_stride + token, step, in_mma_order, true);
    }
  }
}

// grid: (splits, KV_HEADS, B), splits a power of two; with SERIAL (1, KV_HEADS, B), and `turns` splits.
// stride: of rows of `packed`, in values. scale_stride: M_PAD. share: positions from each of which on a sequence has one
// split more, so that its result does not depend on the others'; 0: all sequences have all splits.
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS)
decode_attention(const half_bits* qkv, const float2* table, const int* positions, unsigned char* keys,
                 unsigned char* values, uint32_t* key_scales, uint32_t* value_scales, void* packed,
                 float* scales, float* sums, float2* weights, float scale, int capacity, int stride,
                 int scale_stride, int in_mma_order, int share, [[maybe_unused]] const half_bits* query_norm,
                 [[maybe_unused]] const half_bits* key_norm, [[maybe_unused]] float eps, [[maybe_unused]] int turns) {
  __shared__ __align__(16) Shared shared;
  let_next_kernel_start();
  const unsigned blocks = gridDim.x, splits = SERIAL ? turns : blocks;
  const int split = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y;
  const int sequence = blockIdx.z, heads = kv_heads * GROUP_HEADS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int position = positions[sequence];
  const long long first_row = (static_cast<long long>(sequence) * kv_heads + kv_head) * capacity;
  const int last = position - 1;
  const unsigned char *head_keys = keys + first_row * CODE_BYTES, *head_values = values + first_row * CODE_BYTES;
  // Number of units that this block finishes: those with unit % blocks == split.
  [[maybe_unused]] const int finished = (GROUP_HEADS / UNIT - split + blocks - 1) >> __popc(blocks - 1);
#if __CUDA_ARCH__ >= 900
  if (PACKING != SPLITS && blocks > 1) {
    if (threadIdx.x == 0) mbarrier_init_for_cluster(shared_address(&shared.mbarrier));
    __syncwarp();
    cluster_arrive();
  }
#endif

  // The first split also has the new token, so its first positions come last.
  const int used = share == 0 ? splits : min(static_cast<int>(splits), position / share + 1);
  const int step_stride = used * WARPS * STEP;
  const auto first_of = [&](int of) { return of < used ? ((used - 1 - of) * WARPS + warp) * STEP : position; };
  // The next positions of this warp and their split.
  const auto skip_finished = [&](int& from, int& of) {
    if constexpr (SERIAL)
      while (from >= position && of + 1 < used) from = first_of(++of);
  };
  int turn = split, base = first_of(split);
  skip_finished(base, turn);
  Step step;
  const auto load_step_keys = [&](int from) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) load_keys(step.keys[i], head_keys, from + i * TILE_POSITIONS, last);
  };
  const auto load_step_values = [&](int from) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) load_values(step.values[i], head_values, from + i * TILE_POSITIONS, last);
  };
  const auto scales_at = [&](int from, int i) {
    return load_scales(key_scales + first_row, value_scales + first_row, from + i * TILE_POSITIONS, last);
  };
  if (base < position) {
    load_step_keys(base);
    if constexpr (KV_BITS < 16) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) step.scales[i] = scales_at(base, i);
    }
    load_step_values(base);
  }

  if (split != 0 && threadIdx.x < HEAD_DIM) {
#pragma unroll
    for (int i = 0; i < (HEAD_DIM + THREADS - 1) / THREADS; ++i)
      if (threadIdx.x + i * THREADS < HEAD_DIM) shared.new_token[1][threadIdx.x + i * THREADS] = 0.0f;
  }
  if constexpr (PADDED != HEAD_DIM) {
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP_HEADS * 4 * ROW; i += THREADS) (&shared.query[0][0][0])[i] = 0;
    __syncthreads();
  }
  const half_bits* row = qkv + static_cast<long long>(sequence) * (heads + 2 * kv_heads) * HEAD_DIM;
  const float2* angles = table + static_cast<long long>(position) * (HEAD_DIM / 2);
  const bool writes_keys = split == 0 && warp == WARPS - 2, writes_values = split == 0 && warp == WARPS - 1;
  float4 angle[NUMBERS] = {};
#pragma unroll
  for (int v = 0; v < NUMBERS; ++v)
    if (ROTARY && first_number(v) < HALF) angle[v] = load_angles(angles + first_number(v));
#if HEAD_NORMS
  for (int i = threadIdx.x; i < HEAD_DIM; i += THREADS)
    shared.norms[0][i] = load_early(query_norm + i), shared.norms[1][i] = load_early(key_norm + i);
  __syncthreads();
#endif
  wait_for_previous_kernel();

  uint4 new_token_value = {};
  if (writes_values && lane < WRITERS)
    new_token_value =
        load_written(reinterpret_cast<const uint4*>(row + (heads + kv_heads + kv_head) * HEAD_DIM) + lane);
  // Values i and i + HEAD_DIM / 2 of the queries, and of the new key in the first split, are one complex number. A warp
  // turns whole heads, one after the other: a launch finds its instructions outside the SM's caches, so they are few.
  const int turned = split == 0 ? GROUP_HEADS + 1 : GROUP_HEADS;
  uint32_t raw[HEADS_OF_WARP][NUMBERS][2];
#pragma unroll
  for (int n = 0; n < HEADS_OF_WARP; ++n) {
    const int head = n * WARPS + warp;
    const half_bits* from = row + (head < GROUP_HEADS ? kv_head * GROUP_HEADS + head : heads + kv_head) * HEAD_DIM;
#pragma unroll
    for (int v = 0; v < NUMBERS; ++v)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool is_needed = head < turned && first_number(v) < HALF;
        const half_bits* at = from + h * HALF + first_number(v);
        raw[n][v][h] = is_needed ? load_written(reinterpret_cast<const uint32_t*>(at)) : 0u;
      }
  }
#pragma unroll 1
  for (int n = 0; n < HEADS_OF_WARP; ++n) {
    const int head = n * WARPS + warp;
    if (head >= turned) break;
    float value[NUMBERS][2][2];
#pragma unroll
    for (int v = 0; v < NUMBERS; ++v)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t pair = raw[0][v][h];
#pragma unroll
        for (int other = 1; other < HEADS_OF_WARP; ++other)
          if (n == other) pair = raw[other][v][h];
        value[v][h][0] = half_to_float(static_cast<half_bits>(pair));
        value[v][h][1] = half_to_float(static_cast<half_bits>(pair >> 16));
      }
    if constexpr (HEAD_NORMS) normalize(value, shared.norms[head < GROUP_HEADS ? 0 : 1], eps);
#pragma unroll
    for (int v = 0; v < NUMBERS; ++v)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2, e = i % 2, at = first_number(v) + e + h * HALF;
        float turned_value = value[v][h][e];
        if constexpr (ROTARY) {
          const float cosine = e == 0 ? angle[v].x : angle[v].z, sine = e == 0 ? angle[v].y : angle[v].w;
          turned_value = as_half(turned_value * cosine + value[v][1 - h][e] * (h == 0 ? -sine : sine));
        }
        if (first_number(v) >= HALF) continue;
        if (head == GROUP_HEADS)
          shared.key[at] = float_to_half(turned_value);
        else
          reinterpret_cast<half_bits*>(shared.query[head])[key_index<ROW>(at)] =
              float_to_half(turned_value * (1.0f / code_factor(at)));
      }
  }
  __syncthreads();

  scale *= LOG2_E;
  const uint32_t query = shared_address(&shared.query[head_of(lane / 4)][lane % 4][0]);
  QuerySums query_sums = {};
  if constexpr (KV_BITS < 16) query_sums = sum_queries(query);
#if __CUDA_ARCH__ >= 900
  if (PACKING != SPLITS && blocks > 1 && threadIdx.x == 0)
    mbarrier_arrive_expect_tx(shared_address(&shared.mbarrier),
                              finished * UNIT * splits * static_cast<int>(sizeof(PartialHead)));
#endif
  if (writes_keys) {
    const uint4 halves = lane < WRITERS ? reinterpret_cast<const uint4*>(shared.key)[lane] : uint4{};
    store_token(keys, key_scales, first_row + position, shared.new_token[0], values_of(halves));
    __syncwarp();
    score_new_token(shared, scale);
  }
  if (writes_values)
    store_token(values, value_scales, first_row + position, shared.new_token[1], values_of(new_token_value));
  for (int current = split;;) {
    SoftmaxState state = {};
    state.largest = -infinite();
    while (base < position && (!SERIAL || turn == current)) {
      int next = base + step_stride, next_turn = turn;
      skip_finished(next, next_turn);
      float weight[TILES][4], largest = -infinite();
      uint32_t next_scales[TILES];
#pragma unroll
      for (int i = 0; i < TILES; ++i)
        score_tile(weight[i], step.keys[i], step.scales[i], query, query_sums, scale);
      if (next < position) {
        load_step_keys(next);
        if constexpr (KV_BITS < 16) {
#pragma unroll
          for (int i = 0; i < TILES; ++i) next_scales[i] = scales_at(next, i);
        }
      }
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (base + i * TILE_POSITIONS + lane % 4 * 4 + j >= position) weight[i][j] = -infinite();
          largest = fmaxf(largest, weight[i][j]);
        }
      }
      rescale(state, largest);
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) weight[i][j] = power_of_two(weight[i][j] - state.largest);
        uint32_t operand[2];
        make_weight_operand(operand, state, weight[i], step.scales[i]);
        add_tile(state, step.values[i], operand);
      }
      if (next < position) load_step_values(next);
      if constexpr (KV_BITS < 16) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) step.scales[i] = next_scales[i];
      }
      base = next, turn = next_turn;
    }
    store_sums(shared.sums[warp], state);
    if (lane % 4 == 0 && lane / 4 < GROUP_HEADS)
      shared.part_stats[lane / 4][warp] = make_float4(state.largest, state.total, state.minimum, 0.0f);
    if (split != 0 && threadIdx.x < GROUP_HEADS)
      shared.part_stats[threadIdx.x][WARPS] = make_float4(-infinite(), 0.0f, 0.0f, 0.0f);
    __syncthreads();
    constexpr int VECTORS = HEAD_DIM / WIDTH;
#if __CUDA_ARCH__ >= 900
    if (PACKING != SPLITS && blocks > 1) cluster_wait();  // all blocks have initialized their mbarriers
#endif
#pragma unroll
    for (int first = 0; first < GROUP_HEADS * VECTORS; first += THREADS) {
      const unsigned at = first + threadIdx.x, head = at / VECTORS, vector = at % VECTORS;
      if (at >= GROUP_HEADS * VECTORS) break;
      float top = LOWEST, all = 0.0f;
      float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        if (!SERIAL || p < WARPS || current == 0) top = fmaxf(top, shared.part_stats[head][p].x);
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        if (SERIAL && p == WARPS && current > 0) continue;
        const float4 part = shared.part_stats[head][p];
        const float factor = power_of_two(part.x - top);
        const float* part_sums = p < WARPS ? shared.sums[p] + head * HEAD_DIM : shared.new_token[1];
        const float4 sum = reinterpret_cast<const float4*>(part_sums)[vector];
        all += factor * part.y;
        out.x += factor * (sum.x + part.z), out.y += factor * (sum.y + part.z);
        out.z += factor * (sum.z + part.z), out.w += factor * (sum.w + part.z);
      }
      const float4 stats = make_float4(top, all, 0.0f, 0.0f);
      if constexpr (PACKING == SPLITS) {
        const long long to =
            (static_cast<long long>(sequence) * heads + kv_head * GROUP_HEADS + head) * splits + current;
        reinterpret_cast<float4*>(sums)[to * VECTORS + vector] = out;
        if (vector == 0) weights[to] = make_float2(top, all);
      } else {
        const unsigned unit = head / UNIT, rank = unit & (blocks - 1);
        const unsigned of_unit = (SERIAL ? unit * splits : unit - rank) * UNIT;
        PartialHead& to = shared.partial_heads[of_unit + head % UNIT * splits + current];
        if (blocks == 1) {
          to.sums[vector] = out;
          if (vector == 0) to.stats = stats;
        }
#if __CUDA_ARCH__ >= 900
        if (blocks > 1) {
          const uint32_t mbarrier = map_shared_rank(shared_address(&shared.mbarrier), rank);
          store_async(map_shared_rank(shared_address(&to.sums[vector]), rank), out, mbarrier);
          if (vector == 0) store_async(map_shared_rank(shared_address(&to.stats), rank), stats, mbarrier);
        }
#endif
      }
    }
    if (!SERIAL || ++current == static_cast<int>(splits)) break;
    __syncthreads();
  }
  if constexpr (PACKING != SPLITS) {
    if (blocks == 1) __syncthreads();
#pragma unroll 1
    for (int n = warp; n < finished; n += WARPS) {
#if __CUDA_ARCH__ >= 900
      if (blocks > 1) mbarrier_wait_first_phase(shared_address(&shared.mbarrier));
#endif
      const int head = kv_head * GROUP_HEADS + (n * blocks + split) * UNIT;
      finish(shared.partial_heads + n * splits * UNIT, head, splits, sequence, stride, packed, scales, scale_stride,
             in_mma_order);
    }
  }
}
