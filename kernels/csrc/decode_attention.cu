// decode_attention.cu: attention of one new token a sequence over its KV cache, split over positions.
//   qkv        half [B, (HEADS + 2 KV_HEADS) * HEAD_DIM], before rotation
//   table      float [CONTEXT, HEAD_DIM / 2, 2], cosine and sine; with ROTARY 0 unused
//   positions  int [B], of the new token; its sequence has positions + 1 tokens
//   keys, values  cache [SLOTS, KV_HEADS, CAPACITY, HEAD_DIM]; the new token's are written first
//   sums       float [B, HEADS, SPLITS, HEAD_DIM]: of a split, sum of exp2(score - largest) * value
//   weights    float2 [B, HEADS, SPLITS]: largest score, in base 2, and the sum of exp2(score - largest)
// Splits past a sequence's end have weight (-infinity, 0); decode_nodes.cu adds all of them up.
//
// Positions, and keys and values of earlier tokens, are those of an earlier step: nobody writes them while
// the kernels of this step run, so they are loaded before the previous one has ended.
//
// KV_BITS 16: halves. 8 and 4: codes without sign and a half2 (step, least) a token and head, asymmetric,
// x = code * step + least, as Atom has it (arXiv 2310.19102, section 4.4).
//
// A block has one KV head, all GROUP_HEADS query heads that share it, and CHUNK positions. LANES
// neighbouring lanes have one position, 8 neighbouring values each, so 16 lanes of FP16 are 256 bytes;
// every such set of lanes keeps its own running softmax, and they meet once at the end, in fixed order.
#include "decode.cuh"

#if !defined(HEAD_DIM) || !defined(GROUP_HEADS) || !defined(KV_BITS) || !defined(ROTARY)
#error "HEAD_DIM, GROUP_HEADS, KV_BITS and ROTARY choose the kernel"
#endif
__host__ __device__ constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int at_least_one(int n) { return n < 1 ? 1 : n; }
constexpr int THREADS = 128, WIDTH = 8;
constexpr int ACTIVE = HEAD_DIM / WIDTH, LANES = power_of_two(ACTIVE);
constexpr int SETS = THREADS / LANES;             // positions at a time
// Positions of a set whose loads are in flight; 64 positions of a block, where registers allow it.
constexpr int AHEAD = at_least_one(smaller(GROUP_HEADS <= 2 ? 8 : 4, 64 / SETS));
constexpr int STEP = SETS * AHEAD;
constexpr int CODE_BYTES = HEAD_DIM * KV_BITS / 8;  // of a token and head
static_assert(HEAD_DIM % WIDTH == 0 && LANES <= 32, "a position is at most a warp");
static_assert(KV_BITS == 16 || KV_BITS == 8 || KV_BITS == 4, "halves or codes");
constexpr float LOG2_E = 1.4426950408889634f;

struct Eight {
  float v[WIDTH];
};

__device__ inline Eight widen(const uint4& halves) {
  const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
  Eight e;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    e.v[2 * i] = half_to_float(static_cast<half_bits>(words[i]));
    e.v[2 * i + 1] = half_to_float(static_cast<half_bits>(words[i] >> 16));
  }
  return e;
}

// What a lane loads of a token's keys or values.
struct Raw {
  uint4 codes;
  uint32_t scale;  // step and least
};

__device__ inline Raw load_raw(const unsigned char* codes, const uint32_t* scales, long long row, int part) {
  Raw raw = {};
  const unsigned char* at = codes + row * CODE_BYTES + part * (WIDTH * KV_BITS / 8);
  if constexpr (KV_BITS == 16) {
    raw.codes = load_written(reinterpret_cast<const uint4*>(at));
  } else if constexpr (KV_BITS == 8) {
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(raw.codes.x), "=r"(raw.codes.y) : "l"(at));
    raw.scale = load_written(scales + row);
  } else {
    raw.codes.x = load_written(reinterpret_cast<const uint32_t*>(at));
    raw.scale = load_written(scales + row);
  }
  return raw;
}

__device__ inline Eight decode(const Raw& raw) {
  if constexpr (KV_BITS == 16) {
    return widen(raw.codes);
  } else {
    const float step = half_to_float(static_cast<half_bits>(raw.scale));
    const float least = half_to_float(static_cast<half_bits>(raw.scale >> 16));
    Eight e;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const uint32_t code = KV_BITS == 8 ? ((i < 4 ? raw.codes.x : raw.codes.y) >> (i % 4 * 8)) & 255u
                                         : (raw.codes.x >> (i * 4)) & 15u;
      e.v[i] = static_cast<float>(code) * step + least;
    }
    return e;
  }
}

// Value i of a head at a position, rotated: halves i and i + HEAD_DIM / 2 are one complex number.
__device__ inline float rotated(const half_bits* head, const float2* angles, int i) {
  const float own = half_to_float(head[i]);
  if constexpr (!ROTARY) return own;
  constexpr int HALF = HEAD_DIM / 2;
  const float other = half_to_float(head[i < HALF ? i + HALF : i - HALF]);
  const float2 angle = angles[i % HALF];
  return i < HALF ? own * angle.x - other * angle.y : own * angle.x + other * angle.y;
}

// One warp writes a token's keys or values of a head, and to `kept` what they are when they are read.
__device__ inline void store_token(unsigned char* codes, uint32_t* scales, long long row, float* kept,
                                   const half_bits* head, const float2* angles, bool rotate, int lane) {
  float value[WIDTH] = {};
  if (lane < ACTIVE) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float exact =
          rotate ? rotated(head, angles, lane * WIDTH + i) : half_to_float(head[lane * WIDTH + i]);
      value[i] = as_half(exact);
    }
  }
  unsigned char* at = codes + row * CODE_BYTES + lane * (WIDTH * KV_BITS / 8);
  if constexpr (KV_BITS == 16) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = static_cast<uint32_t>(float_to_half(value[2 * i])) |
                 static_cast<uint32_t>(float_to_half(value[2 * i + 1])) << 16;
    if (lane < ACTIVE) {
      *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) kept[lane * WIDTH + i] = value[i];
    }
  } else {
    constexpr float TOP = (1 << KV_BITS) - 1;
    float least = lane < ACTIVE ? value[0] : infinite(), most = lane < ACTIVE ? value[0] : -infinite();
    if (lane < ACTIVE) {
#pragma unroll
      for (int i = 1; i < WIDTH; ++i) least = fminf(least, value[i]), most = fmaxf(most, value[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      least = fminf(least, __shfl_xor_sync(0xffffffffu, least, offset));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    }
    const half_bits step_bits = float_to_half(__fdiv_rn(most - least, TOP)), least_bits = float_to_half(least);
    const float step = half_to_float(step_bits);
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const int rounded = step == 0.0f ? 0 : __float2int_rn(__fdiv_rn(value[i] - least, step));
      const uint32_t code = static_cast<uint32_t>(min(max(rounded, 0), static_cast<int>(TOP)));
      words[KV_BITS == 8 ? i / 4 : 0] |= code << (KV_BITS == 8 ? i % 4 * 8 : i * 4);
      if (lane < ACTIVE)
        kept[lane * WIDTH + i] = static_cast<float>(code) * step + half_to_float(least_bits);
    }
    if (lane < ACTIVE) {
      if constexpr (KV_BITS == 8) *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
      else *reinterpret_cast<uint32_t*>(at) = words[0];
    }
    if (lane == 0) scales[row] = static_cast<uint32_t>(step_bits) | static_cast<uint32_t>(least_bits) << 16;
  }
}

struct Ahead {
  Raw key[AHEAD], value[AHEAD];
};

// grid: (KV_HEADS, SPLITS, B).
extern "C" __global__ void __launch_bounds__(THREADS)
decode_attention(const half_bits* qkv, const float2* table, const int* positions, unsigned char* keys,
                 unsigned char* values, uint32_t* key_scales, uint32_t* value_scales, float* sums,
                 float2* weights, float scale, int capacity, int chunk) {
  __shared__ float query[GROUP_HEADS][HEAD_DIM];
  __shared__ float fresh[2][HEAD_DIM];  // keys and values of the new token
  __shared__ float2 met[GROUP_HEADS][SETS];
  __shared__ __align__(16) float parts[GROUP_HEADS][SETS][HEAD_DIM];
  let_next_kernel_start();
  const int kv_head = blockIdx.x, kv_heads = gridDim.x, split = blockIdx.y, splits = gridDim.y;
  const int sequence = blockIdx.z, heads = kv_heads * GROUP_HEADS;
  const int position = positions[sequence], start = split * chunk;
  const long long first_out =
      (static_cast<long long>(sequence) * heads + kv_head * GROUP_HEADS) * splits + split;
  if (start > position) {
    wait_for_previous_kernel();  // until which the weights are read by whom they were written for
    if (threadIdx.x < GROUP_HEADS)
      weights[first_out + threadIdx.x * splits] = make_float2(-infinite(), 0.0f);
    return;
  }
  const int end = min(start + chunk, position + 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int set = threadIdx.x / LANES, part = threadIdx.x % LANES;
  const bool active = part < ACTIVE;
  const long long first_row = (static_cast<long long>(sequence) * kv_heads + kv_head) * capacity;
  const half_bits* row = qkv + static_cast<long long>(sequence) * (heads + 2 * kv_heads) * HEAD_DIM;
  const float2* angles = table + static_cast<long long>(position) * (HEAD_DIM / 2);

  const auto load = [&](Ahead& ahead, int base) {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int at = base + a * SETS + set;
      const bool inside = at < end && at < position && active;
      ahead.key[a] = inside ? load_raw(keys, key_scales, first_row + at, part) : Raw{};
      ahead.value[a] = inside ? load_raw(values, value_scales, first_row + at, part) : Raw{};
    }
  };
  Ahead ahead;
  load(ahead, start);
  wait_for_previous_kernel();

  for (int at = threadIdx.x; at < GROUP_HEADS * HEAD_DIM; at += THREADS) {
    const int g = at / HEAD_DIM, i = at % HEAD_DIM;
    const half_bits* head = row + (kv_head * GROUP_HEADS + g) * HEAD_DIM;
    query[g][i] = as_half(rotated(head, angles, i)) * (scale * LOG2_E);
  }
  if (end == position + 1) {
    if (warp == 2)
      store_token(keys, key_scales, first_row + position, fresh[0], row + (heads + kv_head) * HEAD_DIM,
                  angles, ROTARY, lane);
    if (warp == 3)
      store_token(values, value_scales, first_row + position, fresh[1],
                  row + (heads + kv_heads + kv_head) * HEAD_DIM, angles, false, lane);
  }
  __syncthreads();

  float q[GROUP_HEADS][WIDTH], sum[GROUP_HEADS][WIDTH] = {};
  float largest[GROUP_HEADS], total[GROUP_HEADS] = {};
#pragma unroll
  for (int g = 0; g < GROUP_HEADS; ++g) {
    largest[g] = -infinite();
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) q[g][i] = active ? query[g][part * WIDTH + i] : 0.0f;
  }
  const auto new_token = [&](int which) {
    Eight e;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) e.v[i] = active ? fresh[which][part * WIDTH + i] : 0.0f;
    return e;
  };
  for (int base = start; base < end; base += STEP) {
    if (base != start) load(ahead, base);
    float score[AHEAD][GROUP_HEADS];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int at = base + a * SETS + set;
      const Eight k = at == position ? new_token(0) : decode(ahead.key[a]);
#pragma unroll
      for (int g = 0; g < GROUP_HEADS; ++g) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) dot += q[g][i] * k.v[i];
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
          dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        score[a][g] = at < end ? dot : -infinite();
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP_HEADS; ++g) {
      float top = largest[g];
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) top = fmaxf(top, score[a][g]);
      // A set that has met no position yet has nothing to rescale.
      const float factor = largest[g] == -infinite() ? 0.0f : exp2f(largest[g] - top);
      total[g] *= factor;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) sum[g][i] *= factor;
      largest[g] = top;
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int at = base + a * SETS + set;
      const Eight v = at == position ? new_token(1) : decode(ahead.value[a]);
#pragma unroll
      for (int g = 0; g < GROUP_HEADS; ++g) {
        const float weight = at < end ? exp2f(score[a][g] - largest[g]) : 0.0f;
        total[g] += weight;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[g][i] += weight * v.v[i];
      }
    }
  }

#pragma unroll
  for (int g = 0; g < GROUP_HEADS; ++g) {
    if (part == 0) met[g][set] = make_float2(largest[g], total[g]);
    if (active) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) parts[g][set][part * WIDTH + i] = sum[g][i];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < GROUP_HEADS * HEAD_DIM; at += THREADS) {
    const int g = at / HEAD_DIM, i = at % HEAD_DIM;
    float top = -infinite(), all = 0.0f, out = 0.0f;
#pragma unroll 16
    for (int s = 0; s < SETS; ++s) top = fmaxf(top, met[g][s].x);
#pragma unroll 16
    for (int s = 0; s < SETS; ++s) {
      const float factor = exp2f(met[g][s].x - top);  // 0 for a set that met no position
      all += factor * met[g][s].y;
      out += factor * parts[g][s][i];
    }
    const long long to = first_out + g * splits;
    sums[to * HEAD_DIM + i] = out;
    if (i == 0) weights[to] = make_float2(top, all);
  }
}
