// decode_nodes.cu: what stands between the linear layers of a decoder block, each in one kernel that
// leaves its result as the next layer's activations: quantized and packed, or FP16.
//   PRODUCER 1  RMS norm      r = x + d; v = rms(r) * w                 x, d, r half [M, K], w half [K]
//            2  layer norm    r = x + d; v = (r - mean) / deviation * w + b         b half [K]
//            3  SiLU * mul    v = silu(g) * u                           x half [M, 2 K], g then u
//            4  ReLU          v = max(x, 0)                             x half [M, K]
//            5  attention     v = the splits of decode_attention.cu, weighed and added
//                             sums float [M, HEADS, SPLITS, HEAD_DIM], weights float2 [M, HEADS, SPLITS]
//   PACKING    what becomes of v: decode_pack.cuh
// K is a multiple of 4. v is rounded to FP16 before it is quantized. d null: r is x, and is not written.
//
// A thread has VECTORS times four neighbouring k, a warp 128: a group. SHARED: a norm needs the whole row,
// so all VECTORS blocks of a token add up all of its squares, and each normalizes and packs one of its
// threads' vectors: reading a row again takes less time than one block would take to quantize it.
#if !defined(PRODUCER) || !defined(PACKING) || !defined(A_BITS) || !defined(VECTORS) || !defined(SHARED)
#error "PRODUCER, PACKING, A_BITS, VECTORS and SHARED choose the kernel"
#endif
#include "decode_pack.cuh"

constexpr int RMS_NORM = 1, LAYER_NORM = 2, SILU_MUL = 3, RELU = 4, ATTENTION = 5;
constexpr int MAX_WARPS = 32, FEW_THREADS = 128, SHARED_THREADS = 256;  // of a block
constexpr bool IS_NORM = PRODUCER == RMS_NORM || PRODUCER == LAYER_NORM;
constexpr bool WHOLE_ROW = IS_NORM || PACKING == ROW_CODES;
static_assert(IS_NORM || !SHARED, "others need no more of a row than they write, or have it in one block");
// More registers for threads that hold many values, or several splits of attention.
constexpr int MOST_THREADS = !WHOLE_ROW              ? FEW_THREADS
                             : SHARED                ? SHARED_THREADS
                             : PRODUCER == ATTENTION ? 512
                                                     : MAX_WARPS * 32;
// Results that a thread has: of all its vectors, or of that which is its block's. A row's one scale is
// that of all results, whoever writes them.
constexpr bool HAS_ALL = WHOLE_ROW && !(SHARED && PACKING != ROW_CODES);
constexpr int RESULTS = HAS_ALL ? VECTORS : 1;
static_assert(WHOLE_ROW || VECTORS == 1, "a block has part of a row");
// A profile tells kernels apart by their names.
#if PRODUCER == 1 || PRODUCER == 2
#define DECODE_NODE decode_norm
#elif PRODUCER == 3
#define DECODE_NODE decode_silu_mul
#elif PRODUCER == 4
#define DECODE_NODE decode_relu
#else
#define DECODE_NODE decode_attention_sum
#endif

struct Inputs {
  const half_bits* x;
  const half_bits* delta;   // of a norm; null: none
  half_bits* residual;      // of a norm: the sum
  const half_bits* weight;  // of a norm
  const half_bits* bias;    // of a layer norm
  const float* sums;        // of attention
  const float2* weights;    // of attention
  float eps;
  int k, head_dim, splits;
};

__device__ inline uint2 load_pair(const half_bits* at) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
  return v;
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// What warps leave for each other, once for each time that a block meets.
struct Meeting {
  float partial[MAX_WARPS];
};

// The same in all threads; every thread of the block takes part. Sums in a fixed order.
__device__ inline float block_sum(float value, Meeting& meeting) {
  float* partial = meeting.partial;
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_sum(lane < static_cast<int>(blockDim.x) / 32 ? partial[lane] : 0.0f);
}

__device__ inline float block_maximum(float value, Meeting& meeting) {
  float* partial = meeting.partial;
  value = warp_maximum(value);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_maximum(lane < static_cast<int>(blockDim.x) / 32 ? partial[lane] : 0.0f);
}

// Four neighbouring k of one token's attention output. A split that met no position weighs nothing.
__device__ inline void attention_output(float (&value)[QUAD], const Inputs& in, int token, int first) {
  constexpr int AT_ONCE = PACKING == ROW_CODES ? 8 : 16;  // splits whose loads are in flight
  const int head = first / in.head_dim, heads = in.k / in.head_dim;
  const long long row = (static_cast<long long>(token) * heads + head) * in.splits;
  float largest = -infinite(), total = 0.0f;
#pragma unroll
  for (int j = 0; j < QUAD; ++j) value[j] = 0.0f;
  for (int base = 0; base < in.splits; base += AT_ONCE) {
    float2 of_split[AT_ONCE];
    float4 sum[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bool inside = base + i < in.splits;
      const long long at = row + base + i;
      of_split[i] = inside ? in.weights[at] : make_float2(-infinite(), 0.0f);
      sum[i] = inside ? *reinterpret_cast<const float4*>(in.sums + at * in.head_dim + first % in.head_dim)
                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float top = largest;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) top = fmaxf(top, of_split[i].x);
    const float kept = exp2f(largest - top);  // the first split has met a position, so top is finite
    total *= kept;
#pragma unroll
    for (int j = 0; j < QUAD; ++j) value[j] *= kept;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float factor = exp2f(of_split[i].x - top);
      total += factor * of_split[i].y;
      value[0] += factor * sum[i].x, value[1] += factor * sum[i].y;
      value[2] += factor * sum[i].z, value[3] += factor * sum[i].w;
    }
    largest = top;
  }
#pragma unroll
  for (int j = 0; j < QUAD; ++j) value[j] = as_half(value[j] / total);
}

// The first of the vectors whose results a thread has; the others follow at distances of blockDim.x.
__device__ inline int first_vector() {
  return threadIdx.x + (HAS_ALL ? 0 : blockIdx.x * blockDim.x);
}

// Whether this block writes result i of its threads.
__device__ inline bool is_mine(int i) { return !SHARED || !HAS_ALL || i == static_cast<int>(blockIdx.x); }

__device__ inline float summand(const float (&value)[QUAD]) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < QUAD; ++j) sum += PRODUCER == RMS_NORM ? value[j] * value[j] : value[j];
  return sum;
}

// A norm's results, each an FP16 number; zero past K.
__device__ inline void norm(float (&result)[RESULTS][QUAD], const Inputs& in, int token, Meeting* meetings) {
  const int stride = blockDim.x;
  uint2 weight[RESULTS] = {}, bias[RESULTS] = {};
#pragma unroll
  for (int i = 0; i < RESULTS; ++i) {  // constant, so before the previous kernel has ended
    const int at = (first_vector() + i * stride) * QUAD;
    if (at < in.k) weight[i] = load_pair(in.weight + at);
    if (PRODUCER == LAYER_NORM && at < in.k) bias[i] = load_pair(in.bias + at);
  }
  wait_for_previous_kernel();
  uint2 delta[VECTORS] = {}, before[VECTORS] = {};
  const long long row = static_cast<long long>(token) * in.k;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = (threadIdx.x + i * stride) * QUAD;
    if (at < in.k) before[i] = load_pair(in.x + row + at);
    if (at < in.k && in.delta != nullptr) delta[i] = load_pair(in.delta + row + at);
  }
  float value[VECTORS][QUAD];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    float added[QUAD];
    widen(added, delta[i]);
    widen(value[i], before[i]);
#pragma unroll
    for (int j = 0; j < QUAD; ++j) value[i][j] = as_half(value[i][j] + added[j]);
    sum += summand(value[i]);
    // Selected here, and not by an index below, which would put the values in local memory.
    if (HAS_ALL || i == static_cast<int>(blockIdx.x)) {
#pragma unroll
      for (int j = 0; j < QUAD; ++j) result[HAS_ALL ? i : 0][j] = value[i][j];
    }
  }
  const float mean = block_sum(sum, meetings[0]) / static_cast<float>(in.k);
  float square = mean;
  if constexpr (PRODUCER == LAYER_NORM) {
    float deviations = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if ((static_cast<int>(threadIdx.x) + i * stride) * QUAD < in.k) {
#pragma unroll
        for (int j = 0; j < QUAD; ++j) deviations += (value[i][j] - mean) * (value[i][j] - mean);
      }
    square = block_sum(deviations, meetings[1]) / static_cast<float>(in.k);
  }
  const float inverse = rsqrtf(square + in.eps);
#pragma unroll
  for (int i = 0; i < RESULTS; ++i) {
    const int at = (first_vector() + i * stride) * QUAD;
    const bool inside = at < in.k;
    if (inside && in.delta != nullptr && is_mine(i))
      *reinterpret_cast<uint2*>(in.residual + row + at) = narrow(result[i]);
    float w[QUAD], b[QUAD];
    widen(w, weight[i]);
    widen(b, bias[i]);
#pragma unroll
    for (int j = 0; j < QUAD; ++j) {
      const float normed = PRODUCER == RMS_NORM ? as_half(result[i][j] * inverse) * w[j]
                                                : (result[i][j] - mean) * inverse * w[j] + b[j];
      result[i][j] = inside ? as_half(normed) : 0.0f;
    }
  }
}

// The same of the other producers: four neighbouring values, inside the row.
__device__ inline void produce(float (&value)[QUAD], const Inputs& in, int token, int at) {
  if constexpr (PRODUCER == SILU_MUL) {
    const half_bits* row = in.x + static_cast<long long>(token) * 2 * in.k;
    const uint2 gates = load_pair(row + at), ups = load_pair(row + in.k + at);
    float up[QUAD];
    widen(value, gates);
    widen(up, ups);
#pragma unroll
    for (int j = 0; j < QUAD; ++j)
      value[j] = as_half(as_half(value[j] / (1.0f + __expf(-value[j]))) * up[j]);
  } else if constexpr (PRODUCER == RELU) {
    widen(value, load_pair(in.x + static_cast<long long>(token) * in.k + at));
#pragma unroll
    for (int j = 0; j < QUAD; ++j) value[j] = fmaxf(value[j], 0.0f);
  } else {
    attention_output(value, in, token, at);
  }
}

// grid: (blocks of a row, M).
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
DECODE_NODE(const half_bits* x, const half_bits* delta, half_bits* residual, const half_bits* weight,
            const half_bits* bias, const float* sums, const float2* weights, void* packed, float* scales,
            float eps, int k, int head_dim, int splits, int stride, int scale_stride, int in_mma_order) {
  __shared__ Meeting meetings[3];
  let_next_kernel_start();
  const Inputs in{x, delta, residual, weight, bias, sums, weights, eps, k, head_dim, splits};
  const Packed to{packed, scales, k, stride, scale_stride, in_mma_order};
  const int token = blockIdx.y;
  float value[RESULTS][QUAD] = {};
  if constexpr (IS_NORM) {
    norm(value, in, token, meetings);
  } else {
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) {
      const int at = (first_vector() + i * blockDim.x) * QUAD;
      if (at < k) produce(value[i], in, token, at);
    }
  }

  [[maybe_unused]] Divisor row_divisor = {};
  if constexpr (PACKING == ROW_CODES) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) largest = fmaxf(largest, largest_of(value[i]));
    const float scale = scale_of<A_BITS>(block_maximum(largest, meetings[2]));
    row_divisor = divisor_of(scale);
    if (threadIdx.x == 0 && blockIdx.x == 0) scales[token] = scale;
  }
#pragma unroll
  for (int i = 0; i < RESULTS; ++i) {
    if (!is_mine(i)) continue;
    const int vector = first_vector() + i * blockDim.x;
    if constexpr (PACKING == HALVES) {
      pack_halves(value[i], to, token, vector);
    } else if constexpr (PACKING == ROW_CODES) {
      if (vector * QUAD < stride)
        *reinterpret_cast<uint32_t*>(static_cast<int8_t*>(packed) + static_cast<long long>(token) * stride +
                                     vector * QUAD) = code_word(value[i], row_divisor);
    } else {
      pack_group(value[i], to, token, vector);
    }
  }
}
