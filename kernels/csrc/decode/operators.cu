// decode/operators.cu: the non-GEMM operators of a decoder block, each one kernel that writes its result as the next
// linear layer's activations: quantized and packed, or FP16.
//   PRODUCER 1  RMS norm      r = x + d; v = rms(r) * w                 x, d, r half [M, K], w half [K]
//            2  layer norm    r = x + d; v = (r - mean) / deviation * w + b         b half [K]
//            3  SiLU * mul    v = silu(g) * u                           x half [M, 2 K], g then u
//            4  ReLU          v = max(x, 0)                             x half [M, K]
//            5  attention     v = the splits of decode/attention.cu, reduced
//                             sums float [M, HEADS, SPLITS, HEAD_DIM], weights float2 [M, HEADS, SPLITS]
//            6  copy          v = x                                     x half [M, K]
//   PACKING  0  FP16          half [>= M, STRIDE]
//            1  group codes   int8 [M, 128 * STEPS], scales float [STEPS, M_PAD]: csrc/imma/pack.cu
//            2  row codes     int8 [>= M, STRIDE], scales float [M]: csrc/cublas/rows.cu; STRIDE is a multiple of 128
//                             in the order of imma/mma_order.cuh
// STEPS is K/128 rounded up. K is a multiple of 4. v is rounded to FP16 before it is quantized, so that
// codes are those of the unfused kernels. If d is null, r is x and is not written. MIXTURE: d of a token is the sum of its
// experts' results, rows row_of int [M, TOP_K] of `delta`, times share float [M, TOP_K], rounded to FP16.
//
// A block has THREADS threads; a thread has VECTORS vectors of four adjacent k; a warp has 128 k, a group, per vector.
// SPLIT_ROW: every block of a token computes the norm of all of its row and writes one vector of every thread: reading a
// row repeatedly is faster than quantizing it in one block. Other rows of codes are shared by a cluster, whose blocks
// exchange their maxima.
#include "common/half_pairs.cuh"
#include "decode/pack.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

#if !defined(PRODUCER) || !defined(PACKING) || !defined(A_BITS) || !defined(VECTORS) || !defined(THREADS)
#error "define PRODUCER, PACKING, A_BITS, VECTORS and THREADS"
#endif
#ifndef SPLIT_ROW
#define SPLIT_ROW 0
#endif
#ifndef MIXTURE
#define MIXTURE 0
#endif
constexpr int RMS_NORM = 1, LAYER_NORM = 2, SILU_MUL = 3, RELU = 4, ATTENTION = 5, COPY = 6;
constexpr bool IS_NORM = PRODUCER == RMS_NORM || PRODUCER == LAYER_NORM;
constexpr bool WHOLE_ROW = IS_NORM || PACKING == ROW_CODES;
constexpr bool ONE_VECTOR = SPLIT_ROW && PACKING != ROW_CODES;  // others are only added up
constexpr int STRIDE = THREADS * WIDTH;                         // from one vector of a thread to the next
constexpr int MOST_BLOCKS = 8;                                  // of a cluster
constexpr int WARPS = (THREADS / 32 + 3) / 4 * 4;               // rounded up: a reduction reads four at once
// Kernel names, which profiles show.
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
  const uint32_t* row_of;  // MIXTURE
  const float* share;      // MIXTURE
  int top_k;
};

__device__ inline uint2 load_pair(const half_bits* at) {
  return load_written(reinterpret_cast<const uint2*>(at));
}

__device__ inline void widen(float (&value)[WIDTH], const uint2& v) {
  value[0] = half_to_float(static_cast<half_bits>(v.x));
  value[1] = half_to_float(static_cast<half_bits>(v.x >> 16));
  value[2] = half_to_float(static_cast<half_bits>(v.y));
  value[3] = half_to_float(static_cast<half_bits>(v.y >> 16));
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Sums or maxima of the warps of a block. Zeros past its warps, and one array for each reduction of a kernel.
struct Partial {
  float sums[WARPS], deviations[WARPS], maxima[WARPS];
};

// Block-wide reduction of the warps' values, in a fixed order; all threads call it and get the result.
template <typename Combine>
__device__ inline float block_reduce(float value, float (&partial)[WARPS], const Combine& combine) {
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float all = 0.0f;
#pragma unroll 2
  for (int warp = 0; warp < WARPS; warp += 4) {
    const float4 four = *reinterpret_cast<const float4*>(partial + warp);
    all = combine(all, combine(combine(four.x, four.y), combine(four.z, four.w)));
  }
  return all;
}

__device__ inline float block_sum(float value, float (&partial)[WARPS]) {
  return block_reduce(warp_sum(value), partial, [](float a, float b) { return a + b; });
}

__device__ inline float block_maximum(float value, float (&partial)[WARPS]) {
  return block_reduce(warp_maximum(value), partial, [](float a, float b) { return fmaxf(a, b); });
}

// Four adjacent k of one token's attention output. A split without positions has weight zero.
__device__ inline void attention_output(float (&value)[WIDTH], const Inputs& in, int token, int first) {
  constexpr int AT_ONCE = PACKING == ROW_CODES ? 8 : 16;  // splits whose loads are in flight
  const int head = first / in.head_dim, heads = in.k / in.head_dim;
  const long long row = (static_cast<long long>(token) * heads + head) * in.splits;
  float largest = -infinite(), total = 0.0f;
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) value[j] = 0.0f;
  for (int base = 0; base < in.splits; base += AT_ONCE) {
    float2 split_weights[AT_ONCE];
    float4 sum[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bool inside = base + i < in.splits;
      const long long at = row + base + i;
      split_weights[i] = inside ? in.weights[at] : make_float2(-infinite(), 0.0f);
      sum[i] = inside ? *reinterpret_cast<const float4*>(in.sums + at * in.head_dim + first % in.head_dim)
                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float top = largest;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) top = fmaxf(top, split_weights[i].x);
    const float old_factor = exp2f(largest - top);  // the first split has a position, so top is finite
    total *= old_factor;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) value[j] *= old_factor;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float factor = exp2f(split_weights[i].x - top);
      total += factor * split_weights[i].y;
      value[0] += factor * sum[i].x, value[1] += factor * sum[i].y;
      value[2] += factor * sum[i].z, value[3] += factor * sum[i].w;
    }
    largest = top;
  }
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) value[j] = as_half(value[j] / total);
}

// What a norm adds to a token: the sum of its experts' rows, of this thread's vectors.
__device__ __forceinline__ void sum_rows(uint2 (&delta)[VECTORS], const Inputs& in, int token, int first) {
  constexpr int AT_ONCE = 8;  // experts whose rows are loaded together, after the numbers and shares of all
  const int lane = threadIdx.x % 32, own = token * in.top_k + lane;
  const uint32_t own_row = lane < in.top_k ? load_written(in.row_of + own) : 0u;
  const float own_share = lane < in.top_k ? load_written(in.share + own) : 0.0f;
  float sum[VECTORS][WIDTH] = {};
  for (int done = 0; done < in.top_k; done += AT_ONCE) {
    uint2 rows[AT_ONCE][VECTORS];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const long long row = __shfl_sync(0xFFFFFFFFu, own_row, done + j);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const int at = first + i * STRIDE;
        const bool is_inside = done + j < in.top_k && at < in.k;
        rows[j][i] = is_inside ? load_pair(in.delta + row * in.k + at) : make_uint2(0u, 0u);
      }
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const float weight = __shfl_sync(0xFFFFFFFFu, own_share, done + j);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        float value[WIDTH];
        widen(value, rows[j][i]);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) sum[i][e] = fmaf(weight, value[e], sum[i][e]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) delta[i] = narrow(sum[i]);
}

// Compute the values of one token, rounded to FP16: of this thread's vectors from `first` on, or if ONE_VECTOR of the
// one that this block writes, number blockIdx.x.
__device__ inline void produce(float (&value)[VECTORS][WIDTH], const Inputs& in, int token, int first,
                               Partial& partial) {
  if constexpr (IS_NORM) {
    const int written = first + (SPLIT_ROW ? static_cast<int>(blockIdx.x) * STRIDE : 0);
    const int scaled = ONE_VECTOR ? written : first;  // first k that are multiplied by weights
    uint2 weight[VECTORS] = {}, bias[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < (ONE_VECTOR ? 1 : VECTORS); ++i) {  // constant, so loaded before the previous kernel has ended
      const int at = scaled + i * STRIDE;
      if (at < in.k) weight[i] = load_pair(in.weight + at);
      if (PRODUCER == LAYER_NORM && at < in.k) bias[i] = load_pair(in.bias + at);
    }
    const long long row_start = static_cast<long long>(token) * in.k;
    const half_bits *x = in.x + row_start + first, *added = in.delta + row_start + first;
    half_bits* residual = in.residual + row_start + written;
    wait_for_previous_kernel();
    uint2 delta[VECTORS] = {}, row[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (first + i * STRIDE < in.k) row[i] = load_pair(x + i * STRIDE);
    if (in.delta != nullptr && !MIXTURE) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i)
        if (first + i * STRIDE < in.k) delta[i] = load_pair(added + i * STRIDE);
    }
    if constexpr (MIXTURE) sum_rows(delta, in, token, first);
    float sum = 0.0f;
    uint2 output_halves = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      row[i] = make_uint2(add_half2(row[i].x, delta[i].x), add_half2(row[i].y, delta[i].y));
      widen(value[i], row[i]);
      if (i == 0 || i == static_cast<int>(blockIdx.x)) output_halves = row[i];
#pragma unroll
      for (int j = 0; j < WIDTH; ++j)
        sum += PRODUCER == RMS_NORM ? value[i][j] * value[i][j] : value[i][j];
    }
    const float per_value = __fdividef(1.0f, static_cast<float>(in.k));
    const float mean = block_sum(sum, partial.sums) * per_value;
    if (in.delta != nullptr) {
#pragma unroll
      for (int i = 0; i < (SPLIT_ROW ? 1 : VECTORS); ++i)
        if (written + i * STRIDE < in.k)
          *reinterpret_cast<uint2*>(residual + i * STRIDE) = SPLIT_ROW ? output_halves : row[i];
    }
    float square = mean;
    if constexpr (PRODUCER == LAYER_NORM) {
      float deviations = 0.0f;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i)
        if (first + i * STRIDE < in.k) {
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) deviations += (value[i][j] - mean) * (value[i][j] - mean);
        }
      square = block_sum(deviations, partial.deviations) * per_value;
    }
    const float inverse = rsqrtf(square + in.eps);
    if (ONE_VECTOR) widen(value[0], output_halves);
#pragma unroll
    for (int i = 0; i < (ONE_VECTOR ? 1 : VECTORS); ++i) {
      const bool inside = scaled + i * STRIDE < in.k;
      float normal[WIDTH], w[WIDTH], b[WIDTH];
      widen(w, weight[i]);
      widen(b, bias[i]);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        const float normalized = PRODUCER == RMS_NORM ? value[i][j] * inverse
                                                      : (value[i][j] - mean) * inverse * w[j] + b[j];
        normal[j] = inside ? normalized : 0.0f;
      }
      uint2 halves = narrow(normal);
      if constexpr (PRODUCER == RMS_NORM) {
        halves.x = multiply_half2(halves.x, weight[i].x);
        halves.y = multiply_half2(halves.y, weight[i].y);
      }
      widen(value[i], halves);
    }
  } else {
    const half_bits* x = in.x + static_cast<long long>(token) * in.k * (PRODUCER == SILU_MUL ? 2 : 1) + first;
    const half_bits* x_ups = x + in.k;
    wait_for_previous_kernel();
    uint2 row[VECTORS] = {}, ups[VECTORS] = {};  // zeros past the end, of which the results are zeros
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (PRODUCER != ATTENTION && first + i * STRIDE < in.k) row[i] = load_pair(x + i * STRIDE);
      if (PRODUCER == SILU_MUL && first + i * STRIDE < in.k) ups[i] = load_pair(x_ups + i * STRIDE);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      widen(value[i], row[i]);
      if (PRODUCER == ATTENTION && first + i * STRIDE < in.k) attention_output(value[i], in, token, first + i * STRIDE);
      float up[WIDTH];
      widen(up, ups[i]);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        if (PRODUCER == SILU_MUL)
          value[i][j] = as_half(as_half(__fdividef(value[i][j], 1.0f + __expf(-value[i][j]))) * up[j]);
        if (PRODUCER == RELU) value[i][j] = fmaxf(value[i][j], 0.0f);
      }
    }
  }
}

#if __CUDA_ARCH__ >= 900
// Maximum over the blocks of a cluster, which have parts of a row.
struct ClusterMaximum {
  float4 of_blocks[MOST_BLOCKS];
  uint64_t mbarrier;

  // Executed by all threads of the cluster, before `over_blocks`.
  __device__ inline void begin() {
    if (threadIdx.x == 0) {
      mbarrier_init_for_cluster(shared_address(&mbarrier));
      mbarrier_arrive_expect_tx(shared_address(&mbarrier), gridDim.x * sizeof(float4));
    }
    __syncwarp();
    cluster_arrive();
  }

  __device__ inline float over_blocks(float largest) {
    cluster_wait();  // all blocks have initialized their mbarriers
    if (threadIdx.x < gridDim.x)
      store_async(map_shared_rank(shared_address(of_blocks + blockIdx.x), threadIdx.x),
                  make_float4(largest, 0.0f, 0.0f, 0.0f), map_shared_rank(shared_address(&mbarrier), threadIdx.x));
    mbarrier_wait_first_phase(shared_address(&mbarrier));
    return warp_maximum(of_blocks[threadIdx.x % 32 % gridDim.x].x);
  }
};
#endif

// stride: of rows of `packed`, in values; scale_stride: M_PAD. grid: (blocks of a row, M); with ROW_CODES, but of a norm,
// they are a cluster.
extern "C" __global__ void __launch_bounds__(THREADS)
DECODE_NODE(const half_bits* x, const half_bits* delta, half_bits* residual, const half_bits* weight,
            const half_bits* bias, const float* sums, const float2* weights, void* packed, float* scales,
            float eps, int k, int head_dim, int splits, int stride, int scale_stride, int in_mma_order,
            const uint32_t* row_of, const float* share, int top_k) {
  __shared__ __align__(16) Partial partial;
  let_next_kernel_start();
#if __CUDA_ARCH__ >= 900
  [[maybe_unused]] __shared__ ClusterMaximum cluster;
  const bool is_shared = PACKING == ROW_CODES && !IS_NORM && gridDim.x > 1;
  if (is_shared) cluster.begin();
#endif
  if constexpr (WHOLE_ROW) {
    if (threadIdx.x < WARPS) partial.sums[threadIdx.x] = partial.deviations[threadIdx.x] = partial.maxima[threadIdx.x] = 0.0f;
    __syncthreads();
  }
  const Inputs in{x, delta, residual, weight, bias, sums, weights, eps, k, head_dim, splits, row_of, share, top_k};
  const int token = blockIdx.y, part = static_cast<int>(blockIdx.x);
  const int first = static_cast<int>(threadIdx.x) * WIDTH + (IS_NORM ? 0 : part * VECTORS * STRIDE);
  float value[VECTORS][WIDTH];
  produce(value, in, token, first, partial);

  [[maybe_unused]] Divisor row_divisor = {};
  if constexpr (PACKING == ROW_CODES) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) largest = fmaxf(largest, largest_of(value[i]));
    largest = block_maximum(largest, partial.maxima);
#if __CUDA_ARCH__ >= 900
    if (is_shared) largest = cluster.over_blocks(largest);
#endif
    const float scale = scale_of<A_BITS>(largest);
    row_divisor = divisor_of(scale);
    if (threadIdx.x == 0 && part == 0) scales[token] = scale;
    if constexpr (SPLIT_ROW) {
#pragma unroll
      for (int i = 1; i < VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j)
          if (i == part) value[0][j] = value[i][j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < (SPLIT_ROW ? 1 : VECTORS); ++i) {
    const int at = first + (SPLIT_ROW ? part : i) * STRIDE, vector = at / WIDTH;
    const long long row = static_cast<long long>(token) * stride;
    if constexpr (PACKING == HALVES) {
      if (at < k) *reinterpret_cast<uint2*>(static_cast<half_bits*>(packed) + row + at) = narrow(value[i]);
    } else if constexpr (PACKING == ROW_CODES) {
      const int lane = threadIdx.x % 32, word = vector - lane + (in_mma_order ? mma_word(lane) : lane);
      if (at < stride)
        reinterpret_cast<uint32_t*>(static_cast<int8_t*>(packed) + row)[word] = code_word(value[i], row_divisor);
    } else {
      const int step = vector / 32;
      write_group(value[i], static_cast<int8_t*>(packed) + row,
                  scales + static_cast<long long>(step) * scale_stride + token, step, in_mma_order,
                  at < stride);
    }
  }
}
