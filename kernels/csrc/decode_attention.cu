// decode_attention.cu: attention of one new token a sequence over its KV cache, split over blocks.
//   qkv        half [B, (HEADS + 2 KV_HEADS) * HEAD_DIM], before rotation
//   table      float [CONTEXT, HEAD_DIM / 2, 2], cosine and sine; with ROTARY 0 unused
//   positions  int [B], of the new token; its sequence has positions + 1 tokens
//   keys, values  cache [SLOTS, KV_HEADS, CAPACITY, HEAD_DIM] (kv_cache.cuh), with scales
//              [SLOTS, KV_HEADS, CAPACITY] where KV_BITS < 16; the new token's are written
// What becomes of a head's output depends on PACKING:
//   HALVES, GROUP_CODES  the next layer's activations, as decode_nodes.cu writes them, `packed` and `scales`:
//              splits are a thread block cluster, whose blocks read each other's sums
//   SPLITS     sums float [B, HEADS, SPLITS, HEAD_DIM], of a split: sum of exp2(score - largest) * value;
//              weights float2 [B, HEADS, SPLITS]: largest score, in base 2, and the sum of
//              exp2(score - largest), (-infinity, 0) of a split that met no token. decode_nodes.cu adds up
//
// Positions, and keys and values of earlier tokens, are those of an earlier step: nobody writes them while
// the kernels of this step run, so they are loaded before the previous one has ended.
//
// A block has one KV head and all GROUP_HEADS query heads that share it. Its warps take tiles of positions
// in turn and multiply on tensor cores: keys by the heads' queries, which are the columns, and values by the
// weights of their positions. Up to 4 heads leave columns free: n and n + 4 then have one head, and its
// weights, 22 bits of them, are two halves. Of keys and values of 8 and 4 bits tensor cores multiply codes as
// kv_cache.cuh widens them: (1024 + code) * step sums up to what it should and 1024 times what the codes are
// multiplied by, which is taken off again. The least values are multiplied by the same sums. FP32 has 13 bits
// more than 1024: they are far finer than half a step of a code.
// Each warp keeps its own running softmax; warps, the new token and blocks meet at the end, in fixed order.
#if !defined(HEAD_DIM) || !defined(GROUP_HEADS) || !defined(KV_BITS) || !defined(ROTARY) || \
    !defined(PACKING) || !defined(A_BITS) || !defined(TILES) || !defined(WARPS)
#error "HEAD_DIM, GROUP_HEADS, KV_BITS, ROTARY, PACKING, A_BITS, TILES and WARPS choose the kernel"
#endif
#include "decode_pack.cuh"
#include "kv_store.cuh"

constexpr int SPLITS = 3;  // PACKING
constexpr int THREADS = WARPS * 32;
constexpr int STEP = TILES * TILE_POSITIONS;  // positions that a warp has in flight
constexpr int COLUMNS = 8, ROW = KEY_PAIRS + 2;  // of query pairs, padded so that banks differ
constexpr bool TWO_HALVES = GROUP_HEADS <= 4;
constexpr int PARTS = WARPS + 1;  // of a block: its warps and the new token
constexpr int MOST_SPLITS = 8;    // of a cluster
constexpr int MMAS = PADDED / MMA_K;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr uint32_t EVERY = 0xffffffffu;
static_assert(GROUP_HEADS <= COLUMNS, "a column for each head");
static_assert(WARPS >= 4, "two warps write the new token");

struct Step {
  KeyTile keys[TILES];
  ValueTile values[TILES];
  uint32_t scales[TILES];  // of a tile: lane l < 16 has that of the keys of position l, l + 16 of values
};

// Sums of one warp. acc: of values, as an MMA leaves them; the others of head column l / 4, alike in its
// four lanes, but for total and least, of which each lane has its positions'.
struct Running {
  float acc[MMAS][4];
  float largest, total, least;
  float operands;  // sum of what codes were multiplied by
};

// Of the queries of an MMA's columns 2t and 2t + 1: their sums, and what the bias of codes adds to a score.
struct QuerySums {
  float plain[2], bias[2];
};

// The head of an MMA's column.
__device__ inline int head_of(int column) { return min(TWO_HALVES ? column % 4 : column, GROUP_HEADS - 1); }

__device__ inline float step_of(uint32_t scale) { return half_to_float(static_cast<half_bits>(scale)); }
__device__ inline float least_of(uint32_t scale) {
  return half_to_float(static_cast<half_bits>(scale >> 16));
}

__device__ inline uint32_t load_scales(const uint32_t* keys, const uint32_t* values, int base, int last) {
  const int lane = threadIdx.x % 32, at = min(base + lane % 16, last);
  return load_written((lane < 16 ? keys : values) + at);
}

__device__ inline QuerySums sum_queries(uint32_t query) {
  constexpr uint32_t ONES = 0x3C003C00u, ENLARGED = KV_BITS == 4 ? 0x4C004C00u : ONES;  // 16
  float c[4] = {};
#pragma unroll
  for (int mma = 0; mma < MMAS; ++mma) {
    const uint2 q = load_shared_words(query + mma * 8);
    mma_f16_m16n8k16(c, {ONES, BIAS_PAIR, ENLARGED, BIAS_PAIR}, {q.x, q.y});
  }
  return {{c[0], c[1]}, {c[2], c[3]}};
}

// Scores of a tile in base 2, of column l / 4 and positions 4t to 4t + 3. query: of this lane, in shared
// memory.
__device__ inline void score_tile(float (&score)[4], const KeyTile& keys, uint32_t scales, uint32_t query,
                                  const QuerySums& sums, float scale) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float c[2][4] = {};
#pragma unroll
  for (int chunk = 0; chunk < KEY_CHUNKS; ++chunk) {
    uint32_t pairs[2][KEY_WIDTH / 2];
    key_pairs(pairs[0], keys.words[0][chunk]);
    key_pairs(pairs[1], keys.words[1][chunk]);
#pragma unroll
    for (int s = 0; s < KEY_WIDTH / 4; ++s) {
      const int mma = chunk * (KEY_WIDTH / 4) + s;
      const uint2 q = load_shared_words(query + mma * 8);
      mma_f16_m16n8k16(c[mma % 2], {pairs[0][2 * s], pairs[1][2 * s], pairs[0][2 * s + 1], pairs[1][2 * s + 1]},
                       {q.x, q.y});
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    c[0][j] += c[1][j];
    if constexpr (KV_BITS == 16) c[0][j] *= scale;
  }
  if constexpr (KV_BITS < 16) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t of_row = __shfl_sync(EVERY, scales, position_of(g + 8 * r));
      const float step = step_of(of_row) * scale, least = least_of(of_row) * scale;
#pragma unroll
      for (int j = 0; j < 2; ++j)
        c[0][2 * r + j] = (c[0][2 * r + j] - sums.bias[j]) * step + least * sums.plain[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int from = (2 * t + i % 2) * 4 + g / 2;
    score[i] = __shfl_sync(EVERY, c[0][i / 2 * 2], from);
    if constexpr (GROUP_HEADS > 1) {
      const float odd = __shfl_sync(EVERY, c[0][i / 2 * 2 + 1], from);
      if (g % 2 != 0) score[i] = odd;
    }
  }
}

// Of how much each of a tile's positions weighs: operand of its values, and the sum of their least values.
__device__ inline void weigh_tile(uint32_t (&operand)[2], Running& run, const float (&weight)[4],
                                  uint32_t scales) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  uint32_t halves[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float scaled = weight[i];
    run.total += scaled;
    if constexpr (KV_BITS < 16) {
      const uint32_t of_value = __shfl_sync(EVERY, scales, 16 + 4 * t + i);
      run.least += scaled * least_of(of_value);
      scaled *= step_of(of_value);
    }
    const half_bits upper = float_to_half(scaled);
    halves[i] = TWO_HALVES && lane >= 16 ? float_to_half(scaled - half_to_float(upper)) : upper;
    if constexpr (KV_BITS < 16) run.operands += half_to_float(halves[i]);
  }
  operand[0] = halves[0] | halves[1] << 16;
  operand[1] = halves[2] | halves[3] << 16;
}

__device__ inline void add_tile(Running& run, const ValueTile& values, const uint32_t (&operand)[2]) {
#pragma unroll
  for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk) {
    uint32_t lower[VALUE_WIDTH], upper[VALUE_WIDTH];
    value_pairs(lower, values.words[0][chunk], values.words[1][chunk]);
    value_pairs(upper, values.words[2][chunk], values.words[3][chunk]);
#pragma unroll
    for (int m = 0; m < VALUE_WIDTH / 2; ++m)
      mma_f16_m16n8k16(run.acc[chunk * (VALUE_WIDTH / 2) + m],
                       {lower[2 * m], lower[2 * m + 1], upper[2 * m], upper[2 * m + 1]}, operand);
  }
}

// One more row of scores: what was summed is weighed anew where a larger one came.
__device__ inline void weigh_anew(Running& run, float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(EVERY, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(EVERY, largest, 2));
  largest = fmaxf(largest, run.largest);
  const bool changes = largest != run.largest && run.largest != -infinite();
  const float factor = changes ? power_of_two(run.largest - largest) : 1.0f;
  run.largest = largest;
  if (!__any_sync(EVERY, changes)) return;
  run.total *= factor;
  run.least *= factor;
  run.operands *= factor;
  const int t = threadIdx.x % 4;
  const float even = __shfl_sync(EVERY, factor, 8 * t), odd = __shfl_sync(EVERY, factor, 8 * t + 4);
#pragma unroll
  for (int m = 0; m < MMAS; ++m) {
    run.acc[m][0] *= even, run.acc[m][2] *= even;
    run.acc[m][1] *= odd, run.acc[m][3] *= odd;
  }
}

struct Shared {
  float4 met[GROUP_HEADS];  // of the block: largest score, sum of weights
  float out[GROUP_HEADS][HEAD_DIM];
  float parts[GROUP_HEADS][WARPS][HEAD_DIM];
  float4 of_part[GROUP_HEADS][PARTS];  // largest score, sum of weights, of least values times weights
  float2 angles[HEAD_DIM / 2];
  uint32_t query[GROUP_HEADS][4][ROW];
  float fresh[2][HEAD_DIM];  // keys and values of the new token
};

// A warp's sums to shared memory.
__device__ inline void leave(Shared& shared, Running& run, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    run.total += __shfl_xor_sync(EVERY, run.total, offset);
    run.least += __shfl_xor_sync(EVERY, run.least, offset);
    run.operands += __shfl_xor_sync(EVERY, run.operands, offset);
  }
  float bias[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) bias[j] = BIAS * __shfl_sync(EVERY, run.operands, 8 * t + 4 * j);
  if (t == 0 && g < GROUP_HEADS)
    shared.of_part[g][warp] = make_float4(run.largest, run.total, run.least, 0.0f);
#pragma unroll
  for (int e = 0; e < VALUE_SHARE; ++e) {
    const int i = (e / VALUE_WIDTH * 8 + g) * VALUE_WIDTH + e % VALUE_WIDTH;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = run.acc[e / 2][e % 2 * 2 + j];
      if constexpr (KV_BITS < 16) sum = (sum - bias[j]) * (1.0f / enlarged(e));
      if constexpr (TWO_HALVES) {
        if (j < GROUP_HEADS) sum += __shfl_xor_sync(EVERY, sum, 2);
      }
      const int head = 2 * t + j;
      if (head < GROUP_HEADS && (PADDED == HEAD_DIM || i < HEAD_DIM)) shared.parts[head][warp][i] = sum;
    }
  }
}

// The scores of the new token, by one warp.
__device__ inline void score_fresh(Shared& shared, float scale) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int head = 0; head < GROUP_HEADS; ++head) {
    const half_bits* query = reinterpret_cast<const half_bits*>(shared.query[head]);
    float dot = 0.0f;
    for (int i = lane; i < HEAD_DIM; i += 32)
      dot += half_to_float(query[key_place<ROW>(i)]) * (enlarged(i) * shared.fresh[0][i]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_xor_sync(EVERY, dot, offset);
    if (lane == 0) shared.of_part[head][WARPS] = make_float4(dot * scale, 1.0f, 0.0f, 0.0f);
  }
}

// One warp: a head's output from the sums of all blocks of its cluster.
__device__ inline void finish(const Shared& shared, int head, int splits, int out_head, int token, int stride,
                              void* packed, float* scales, int scale_stride, int in_mma_order) {
  const int lane = threadIdx.x % 32;
  const auto share = [&](const float4& mine, int rank) {
#if __CUDA_ARCH__ >= 900
    if (splits > 1) return load_cluster(shared_address(&mine), rank);
#endif
    return mine;
  };
#pragma unroll
  for (int vector = 0; vector < (HEAD_DIM / WIDTH + 31) / 32; ++vector) {
    const int own = (vector * 32 + lane) * WIDTH, at = min(own, HEAD_DIM - WIDTH);
    float4 met[MOST_SPLITS], sum[MOST_SPLITS];
#pragma unroll
    for (int s = 0; s < MOST_SPLITS; ++s) {
      met[s] = make_float4(-infinite(), 0.0f, 0.0f, 0.0f);
      sum[s] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (s >= splits) continue;
      met[s] = share(shared.met[head], s);
      sum[s] = share(*reinterpret_cast<const float4*>(&shared.out[head][at]), s);
    }
    float top = met[0].x, total = 0.0f, value[WIDTH] = {};  // the first has the new token
#pragma unroll
    for (int s = 1; s < MOST_SPLITS; ++s) top = fmaxf(top, met[s].x);
#pragma unroll
    for (int s = 0; s < MOST_SPLITS; ++s) {
      const float factor = power_of_two(met[s].x - top);
      total += factor * met[s].y;
      value[0] += factor * sum[s].x, value[1] += factor * sum[s].y;
      value[2] += factor * sum[s].z, value[3] += factor * sum[s].w;
    }
    const float inverse = __fdividef(1.0f, total);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) value[j] = as_half(value[j] * inverse);
    const long long row = static_cast<long long>(token) * stride;
    const int k = out_head * HEAD_DIM + own;
    if constexpr (PACKING == HALVES) {
      if (own < HEAD_DIM) *reinterpret_cast<uint2*>(static_cast<half_bits*>(packed) + row + k) = narrow(value);
    } else {
      const int step = out_head * (HEAD_DIM / GROUP) + vector;
      write_group(value, static_cast<int8_t*>(packed) + row,
                  scales + static_cast<long long>(step) * scale_stride + token, step, in_mma_order, true);
    }
  }
}

// grid: (splits, KV_HEADS, B). stride: of rows of `packed`, in values; scale_stride: M_PAD.
extern "C" __global__ void __launch_bounds__(THREADS)
decode_attention(const half_bits* qkv, const float2* table, const int* positions, unsigned char* keys,
                 unsigned char* values, uint32_t* key_scales, uint32_t* value_scales, void* packed,
                 float* scales, float* sums, float2* weights, float scale, int capacity, int stride,
                 int scale_stride, int in_mma_order) {
  __shared__ __align__(16) Shared shared;
  let_next_kernel_start();
  const int split = blockIdx.x, splits = gridDim.x, kv_head = blockIdx.y, kv_heads = gridDim.y;
  const int sequence = blockIdx.z, heads = kv_heads * GROUP_HEADS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int position = positions[sequence], last = position - 1;
  const long long first_row = (static_cast<long long>(sequence) * kv_heads + kv_head) * capacity;
  const unsigned char *own_keys = keys + first_row * CODE_BYTES, *own_values = values + first_row * CODE_BYTES;

  // The first split has the new token, so it begins last.
  int base = ((splits - 1 - split) * WARPS + warp) * STEP;
  const int turn = splits * WARPS * STEP;
  Step step;
  const auto load_step_keys = [&](int from) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) load_keys(step.keys[i], own_keys, from + i * TILE_POSITIONS, last);
  };
  const auto load_step_values = [&](int from) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) load_values(step.values[i], own_values, from + i * TILE_POSITIONS, last);
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
  if constexpr (ROTARY) {
#pragma unroll 1
    for (int i = threadIdx.x; i < HEAD_DIM / 2; i += THREADS)
      shared.angles[i] = table[static_cast<long long>(position) * (HEAD_DIM / 2) + i];
  }
  if constexpr (PADDED != HEAD_DIM) {
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP_HEADS * 4 * ROW; i += THREADS) (&shared.query[0][0][0])[i] = 0;
  }
  __syncthreads();
  wait_for_previous_kernel();

  const half_bits* row = qkv + static_cast<long long>(sequence) * (heads + 2 * kv_heads) * HEAD_DIM;
  const bool stores = split == 0 && warp >= WARPS - 2, stores_keys = warp == WARPS - 2;
  Share share = {};
  if (stores) {
    const int head = heads + (stores_keys ? kv_head : kv_heads + kv_head);
    share = share_of_token(row + head * HEAD_DIM, shared.angles, ROTARY && stores_keys);
  }
#pragma unroll
  for (int first = 0; first < GROUP_HEADS * HEAD_DIM / 4; first += THREADS) {
    const int at = first + threadIdx.x;
    if (at >= GROUP_HEADS * HEAD_DIM / 4) break;
    const int head = at / (HEAD_DIM / 4), block = at % (HEAD_DIM / 4);
    float value[4];
    turned(value, row + (kv_head * GROUP_HEADS + head) * HEAD_DIM, shared.angles, block, true);
    half_bits* query = reinterpret_cast<half_bits*>(shared.query[head]);
#pragma unroll
    for (int j = 0; j < 4; ++j) query[key_place<ROW>(block * 4 + j)] = float_to_half(value[j] / enlarged(j));
  }
  __syncthreads();

  scale *= LOG2_E;
  const uint32_t query = shared_address(&shared.query[head_of(lane / 4)][lane % 4][0]);
  QuerySums query_sums = {};
  if constexpr (KV_BITS < 16) query_sums = sum_queries(query);
  if (stores) {
    const long long at = first_row + position;
    if (stores_keys) {
      store_token(keys, key_scales, at, shared.fresh[0], share);
      __syncwarp();
      score_fresh(shared, scale);
    } else {
      store_token(values, value_scales, at, shared.fresh[1], share);
    }
  }
  Running run = {};
  run.largest = -infinite();
  for (; base < position; base += turn) {
    const int next = base + turn;
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
    weigh_anew(run, largest);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) weight[i][j] = power_of_two(weight[i][j] - run.largest);
      uint32_t operand[2];
      weigh_tile(operand, run, weight[i], step.scales[i]);
      add_tile(run, step.values[i], operand);
    }
    if (next < position) load_step_values(next);
    if constexpr (KV_BITS < 16) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) step.scales[i] = next_scales[i];
    }
  }

  leave(shared, run, warp);
  if (split != 0 && threadIdx.x < GROUP_HEADS)
    shared.of_part[threadIdx.x][WARPS] = make_float4(-infinite(), 0.0f, 0.0f, 0.0f);
  __syncthreads();
#pragma unroll 1
  for (int at = threadIdx.x; at < GROUP_HEADS * HEAD_DIM; at += THREADS) {
    const int head = at / HEAD_DIM, i = at % HEAD_DIM;
    float top = -infinite(), all = 0.0f, out = 0.0f;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) top = fmaxf(top, shared.of_part[head][p].x);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const float4 part = shared.of_part[head][p];
      const float factor = part.x == -infinite() ? 0.0f : power_of_two(part.x - top);
      all += factor * part.y;
      if (p < WARPS) out += factor * (shared.parts[head][p][i] + part.z);
      else if (split == 0) out += factor * shared.fresh[1][i];
    }
    if constexpr (PACKING == SPLITS) {
      const long long to =
          (static_cast<long long>(sequence) * heads + kv_head * GROUP_HEADS + head) * splits + split;
      sums[to * HEAD_DIM + i] = out;
      if (i == 0) weights[to] = make_float2(top, all);
    } else {
      shared.out[head][i] = out;
      if (i == 0) shared.met[head] = make_float4(top, all, 0.0f, 0.0f);
    }
  }
  if constexpr (PACKING != SPLITS) {
    const auto meet = [&] {
#if __CUDA_ARCH__ >= 900
      if (splits > 1) return cluster_sync();
#endif
      __syncthreads();
    };
    meet();
#pragma unroll 1
    for (int head = split + splits * warp; head < GROUP_HEADS; head += splits * WARPS)
      finish(shared, head, splits, kv_head * GROUP_HEADS + head, sequence, stride, packed, scales,
             scale_stride, in_mma_order);
    meet();  // until when the others may be reading here
  }
}
