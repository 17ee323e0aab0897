// grouped/many_tokens.cu: Y[rows of e] = X[rows of e] . W[e]^T of each expert e by warpgroup MMA (int8), many tokens each.
// Operands are those of grouped/few_tokens.cu, so one packed weight serves both.
//
// Persistent blocks take output tiles of 128 rows and up to TOKENS tokens. A producer thread copies weights and codes of one
// group of k per stage. Two consumer warpgroups multiply 64 rows each: they widen the next group's weights in
// registers while the tensor cores multiply one group (imma/group_gemm_persistent.cu). The width of the MMA is the smallest
// of 64, 128 and 256 that has all tokens of the output tile.
#if !defined(TOKENS) || !defined(STAGES)
#error "define TOKENS and STAGES"
#endif
constexpr int ROW_BLOCKS = 2;  // a warpgroup each
constexpr bool STREAM_K = false;
#include "grouped/layout.cuh"
#include "grouped/routing.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

static_assert(TOKENS == 64 || TOKENS == 128 || TOKENS == 256, "TOKENS must be 64, 128 or 256");
constexpr int WARPS = ROW_BLOCKS * BLOCK_TILES, THREADS = WARPS * 32 + 128, LOADED_TOKENS = 64;
constexpr int CODES_AT = (ROW_BLOCKS * CHUNK_BYTES + 1023) / 1024 * 1024;  // in a stage, after the weights
constexpr int STAGE_BYTES = CODES_AT + TOKENS * GROUP;
constexpr int OUT_BYTES = 16 * MMA_ROWS * 2;  // 16 tokens of a warp's rows
constexpr int OUT_AT = STAGES * STAGE_BYTES, BARRIERS_AT = OUT_AT + WARPS * OUT_BYTES;
constexpr int STATE_AT = BARRIERS_AT + STAGES * 16, LIST_AT = STATE_AT + 16;
constexpr int MORE_REGISTERS = 232, FEWER_REGISTERS = 40;  // of consumers and of the producer's warpgroup

struct Stage {
  int slot = 0;
  uint32_t parity = 0;
  __device__ inline void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// What a consumer warp needs besides its part.
struct Consumer {
  const Expert& of;
  uint32_t ring, full, empty, out;
  const half_bits* sn;
  const float* sx;
  half_bits* y;
  int warp, lane;

  // racecheck knows the order only of lanes that arrive, and reports the others' reads; if every lane arrives, nothing.
  __device__ inline void release(int slot) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + slot * 8);
  }
};

// Sums of a lane: 64 rows of the warpgroup and WIDTH tokens.
template <int WIDTH>
struct Sums {
  static constexpr int PARTS = WIDTH / 128 > 0 ? WIDTH / 128 : 1;
  int values[PARTS][WIDTH / 2 / PARTS] = {};

  __device__ inline int get(int i) const { return values[i / (WIDTH / 2 / PARTS)][i % (WIDTH / 2 / PARTS)]; }
  __device__ inline void multiply(uint32_t (&a)[MMAS][4], uint64_t codes) {
#pragma unroll
    for (int o = 0; o < OPERAND_WORDS; ++o) asm volatile("" : "+r"(a[o / 4][o % 4]));  // computed before the WGMMAs
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < MMAS; ++i) {
      const uint64_t b = advance_descriptor(codes, i * MMA_K);
      if constexpr (PARTS == 2) wgmma_k32(values[0], values[1], a[i], b);
      else wgmma_k32(values[0], a[i], b, true);
    }
    wgmma_commit();
  }
  __device__ inline void wait() {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i)
      asm volatile("" : "+r"(values[i / (WIDTH / 2 / PARTS)][i % (WIDTH / 2 / PARTS)])::"memory");
  }
};

// Scales of a warp's outputs, loaded before the sums are computed: a lane has those of rows lane/4 and 8 later, and of
// every 32nd token.
template <int WIDTH>
struct Scales {
  half_bits of_features[2];
  float of_tokens[WIDTH / 32];

  __device__ inline Scales(const Part& part, int feature, const Consumer& c) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      of_features[i] = load_early(c.sn + static_cast<long long>(part.expert) * c.of.n +
                                  min(feature + c.lane / 4 + 8 * i, c.of.n - 1));
#pragma unroll
    for (int i = 0; i < WIDTH / 32; ++i)
      of_tokens[i] = load_written(c.sx + part.first_row + min(i * 32 + c.lane, part.tokens - 1));
  }
};

// Scale and write 16 rows of a warp, 16 tokens at a time through shared memory.
template <int WIDTH>
__device__ inline void write(const Sums<WIDTH>& sums, const Scales<WIDTH>& scales, const Part& part, int feature,
                             const Consumer& c) {
  const bool wide = c.of.n % 8 == 0 && reinterpret_cast<uint64_t>(c.y) % 16 == 0;
  const float feature_scale[2] = {half_to_float(scales.of_features[0]), half_to_float(scales.of_features[1])};
#pragma unroll
  for (int chunk = 0; chunk < WIDTH / 16; ++chunk) {
    if (chunk * 16 >= part.tokens) break;
    float token_scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      token_scale[i] = __shfl_sync(0xFFFFFFFFu, scales.of_tokens[chunk / 2],
                                   chunk % 2 * 16 + i / 2 * 8 + c.lane % 4 * 2 + i % 2);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows 8 * (i % 2), tokens 8 * (i / 2)
      uint32_t halves[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int sum = sums.get((chunk * 2 + i / 2) * 4 + i % 2 * 2 + e);
        halves[e] = output_bits(static_cast<float>(sum) * feature_scale[i % 2] * token_scale[i / 2 * 2 + e]);
      }
      words[i] = halves[0] | halves[1] << 16;
    }
    stmatrix_transposed(c.out + (c.lane / 16 * 8 + c.lane % 8) * 32 + c.lane / 8 % 2 * 16, words);
    __syncwarp();
    const int token = chunk * 16 + c.lane / 2, first = feature + c.lane % 2 * 8;
    const uint4 row = load_shared(c.out + c.lane * 16);
    if (token < part.tokens && first < c.of.n) {
      half_bits* to = c.y + static_cast<long long>(part.first_row + token) * c.of.n + first;
      if (wide) {
        *reinterpret_cast<uint4*>(to) = row;
      } else {
        const uint32_t word[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (first + i < c.of.n) to[i] = static_cast<half_bits>(word[i / 2] >> (i % 2 * 16));
      }
    }
    __syncwarp();
  }
}

template <int WIDTH>
__device__ inline void compute(const Part& part, Stage& stage, const Consumer& c) {
  const int warpgroup = c.warp / BLOCK_TILES, row_block = part.row_block + warpgroup;
  const int tiles = c.of.tiles_of(row_block), tile = c.warp % BLOCK_TILES;
  const int read = tile < tiles ? tile : 0;  // a warp past the last row tile multiplies the first one's, and writes nothing
  const LanePlace place(read, tiles, c.lane);
  const int feature = (row_block * BLOCK_TILES + tile) * MMA_ROWS;
  const Scales<WIDTH> scales(part, feature, c);
  Sums<WIDTH> sums;
  uint32_t weights[2][MMAS][4];  // one is multiplied while the other is widened
  int used = -1;                 // stage of the previous group
  const auto add_group = [&](uint32_t (&a)[MMAS][4], int step) {
    const uint32_t at = c.ring + stage.slot * STAGE_BYTES;
    mbarrier_wait(c.full + stage.slot * 8, stage.parity);
    PackedTile packed;
    packed.load(at + warpgroup * CHUNK_BYTES, place, read, tiles, c.of.mmas_of(step), c.lane);
    packed.operands(a);
    sums.multiply(a, swizzled_descriptor(at + CODES_AT));  // past K, codes are zero
    wgmma_wait<1>();  // the previous group is complete: its stage and weights may be overwritten
    if (used >= 0) c.release(used);
    used = stage.slot;
    stage.next();
  };
  int step = 0;
  for (; step + 1 < c.of.steps; step += 2) add_group(weights[0], step), add_group(weights[1], step + 1);
  if (step < c.of.steps) add_group(weights[0], step);
  sums.wait();
  c.release(used);
  if (tile < tiles) write(sums, scales, part, feature, c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
grouped_many(const __grid_constant__ TensorMap x, const unsigned char* w, const half_bits* sn, const float* sx,
             const int* sizes, half_bits* y, int experts, int n, int k, int rows, int rows_apart) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + BARRIERS_AT, empty = full + STAGES * 8;
  int* state = reinterpret_cast<int*>(shared + STATE_AT);  // number of experts with tokens
  Touched* touched = reinterpret_cast<Touched*>(shared + LIST_AT);
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  let_next_kernel_start();
  if (threadIdx.x == 32) {
    for (int s = 0; s < STAGES; ++s) mbarrier_init(full + s * 8, 1), mbarrier_init(empty + s * 8, WARPS);
    fence_mbarrier_init();
  }
  if (threadIdx.x == WARPS * 32) prefetch_tensor_map(x);
  wait_for_previous_kernel();
  if (warp == 0) {
    const int count =
        list_touched(touched, reinterpret_cast<int*>(touched + experts + 1), sizes, experts, rows_apart, rows, lane);
    if (lane == 0) state[0] = count;
  }
  __syncthreads();
  const Expert of(n, k);
  Parts parts(of, touched, state[0], blockIdx.x, gridDim.x);
  Part part;
  Stage stage;
  if (warp >= WARPS) {
    setmaxnreg_decrease<FEWER_REGISTERS>();
    if (threadIdx.x == WARPS * 32) {
      const uint64_t once = evict_first_policy(), again = evict_normal_policy();
      while (parts.next(part)) {
        const int loads = (part.tokens + LOADED_TOKENS - 1) / LOADED_TOKENS;
        const unsigned char* from[ROW_BLOCKS];
        int tiles[ROW_BLOCKS];
#pragma unroll
        for (int b = 0; b < ROW_BLOCKS; ++b)
          tiles[b] = of.tiles_of(part.row_block + b), from[b] = w + of.begin_of(part.expert, part.row_block + b);
        for (int step = 0; step < of.steps; ++step) {
          const uint32_t to = ring + stage.slot * STAGE_BYTES, barrier = full + stage.slot * 8;
          const int before = of.bytes_before(step), bytes = of.bytes_before(step + 1) - before;
          mbarrier_wait(empty + stage.slot * 8, stage.parity ^ 1);
          mbarrier_arrive_expect_tx(barrier, bytes * (tiles[0] + tiles[1]) + loads * LOADED_TOKENS * GROUP);
#pragma unroll
          for (int b = 0; b < ROW_BLOCKS; ++b)
            if (tiles[b] > 0)
              bulk_load(to + b * CHUNK_BYTES, from[b] + before * tiles[b], bytes * tiles[b], barrier,
                        part.is_shared ? again : once);
          for (int i = 0; i < loads; ++i)
            tma_load_2d(to + CODES_AT + i * LOADED_TOKENS * GROUP, x, step * GROUP, part.first_row + i * LOADED_TOKENS,
                        barrier);
          stage.next();
        }
      }
    }
  } else {
    setmaxnreg_increase<MORE_REGISTERS>();
    const Consumer consumer{of, ring, full, empty, ring + OUT_AT + warp * OUT_BYTES, sn, sx, y, warp, lane};
    while (parts.next(part)) {
      if (TOKENS > 128 && part.tokens > 128) compute<TOKENS>(part, stage, consumer);
      else if (TOKENS > 64 && part.tokens > 64) compute<(TOKENS < 128 ? TOKENS : 128)>(part, stage, consumer);
      else compute<64>(part, stage, consumer);
    }
  }
}
