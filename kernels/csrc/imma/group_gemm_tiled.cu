// imma/group_gemm_tiled.cu: Y[M,N] = X[M,K] . W[N,K]^T on int8 tensor cores, 6- or 4-bit weights, many tokens.
// Operands are those of imma/group_gemm.cu, so one packed weight serves decode and prefill.
//
// A block tile is ROW_WARPS * ROW_TILES * 16 rows of W and TOKEN_WARPS * COL_TILES * 8 tokens. Weights,
// tokens and scales of one group of k are a stage of a cp.async pipeline of all warps. Weights are
// dequantized in registers, once for all tokens of a warp. The K_SPLIT blocks of a cluster take the
// groups round-robin; partial sums are reduced in a fixed order: results are deterministic.
//
// Blocks of the same rows are adjacent in the grid: weights are read from DRAM once, then from L2.
#if !defined(ROW_WARPS) || !defined(ROW_TILES) || !defined(TOKEN_WARPS) || !defined(COL_TILES) || \
    !defined(STAGES) || !defined(K_SPLIT)
#error "define ROW_WARPS, ROW_TILES, TOKEN_WARPS, COL_TILES, STAGES and K_SPLIT"
#endif
constexpr int THREADS = ROW_WARPS * TOKEN_WARPS * 32;
constexpr int TILES = ROW_WARPS * ROW_TILES;
constexpr int TOKENS = TOKEN_WARPS * COL_TILES * 8;
#include "imma/block_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

constexpr int CHAINS = 4;  // column tiles at once: independent MMAs hide each other's latency
static_assert(COL_TILES % CHAINS == 0, "COL_TILES must be a multiple of CHAINS");
static_assert(STAGES >= 2, "STAGES must be at least 2: one is multiplied while the others load");

// At least one block per SM: without this bound, the compiler spills to fit more.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flexq_imma_tiled(const unsigned char* w, const unsigned char* sw, const int8_t* x, const float* sx,
                 const half_bits* bias, half_bits* y, int m, int n, int k,
                 [[maybe_unused]] const half_bits* sn) {
  extern __shared__ __align__(SWIZZLE_BYTES) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_warp = warp % ROW_WARPS, token_warp = warp / ROW_WARPS;
  const int rank = static_cast<int>(blockIdx.x) % K_SPLIT;
  const uint32_t ring = shared_address(shared);
  const int groups = (k + GROUP - 1) / GROUP, steps = tiles_along(groups);
  const int first_tile = blockIdx.y * TILES;
  const int first_token = static_cast<int>(blockIdx.x) / K_SPLIT * TOKENS;
  const Copies copies(m, groups, (n + MMA_ROWS - 1) / MMA_ROWS, first_tile, first_token);

  let_next_kernel_start();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    const int step = rank + s * K_SPLIT;
    if (step < steps) copies.load_weights(ring + s * STAGE_BYTES, w, sw, step);
  }
  wait_for_previous_kernel();  // weights are constant, activations may be its output
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    const int step = rank + s * K_SPLIT;
    if (step < steps) copies.load_tokens(ring + s * STAGE_BYTES, x, sx, step);
    cp_async_commit();
  }

  Sum total[ROW_TILES][COL_TILES][4] = {};
  [[maybe_unused]] const int start[4] = {BIAS_BITS, BIAS_BITS, BIAS_BITS, BIAS_BITS};
  int slot = 0;
  for (int step = rank; step < steps; step += K_SPLIT) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // all copies are complete, and no warp still reads the slot that is written below
    const int ahead = step + (STAGES - 1) * K_SPLIT;
    const uint32_t ahead_stage = ring + (slot == 0 ? STAGES - 1 : slot - 1) * STAGE_BYTES;
    if (ahead < steps) {
      copies.load_weights(ahead_stage, w, sw, ahead);
      copies.load_tokens(ahead_stage, x, sx, ahead);
    }
    cp_async_commit();

    const uint32_t stage = ring + slot * STAGE_BYTES;
    [[maybe_unused]] const bool in_nibbles = INT4_MMA && step < groups - 1;
    uint32_t a[ROW_TILES][MMAS][4];
    [[maybe_unused]] float scale[ROW_TILES][2], bias_out[ROW_TILES][2];  // of rows lane/4 and lane/4 + 8
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const int tile = row_warp * ROW_TILES + r;
      const uint32_t scales =
          load_shared_word(stage + SCALES_AT + tile * SCALE_BYTES + lane / 4 * 4);
      const WeightTile weights(stage + TILES_AT + tile * TILE_BYTES, scales, lane, step == groups - 1);
#if INT4_MMA
      if (in_nibbles) {
#pragma unroll
        for (int q = 0; q < INT4_MMAS; ++q) weights.nibble_operands(a[r][q], q);
      } else
#endif
#pragma unroll
      for (int o = 0; o < OPERAND_WORDS; ++o) a[r][o / 4][o % 4] = weights.operand(o);
#if !DUAL_GRAINED
      scale[r][0] = weights.scale[0], scale[r][1] = weights.scale[1];
#endif
#if INT4_MMA
      if (in_nibbles) scale[r][0] *= 16.0f, scale[r][1] *= 16.0f;  // sums are of codes, not of 16 times the codes
#endif
      if constexpr (!DUAL_GRAINED)
        bias_out[r][0] = -BIAS * scale[r][0], bias_out[r][1] = -BIAS * scale[r][1];
    }
#pragma unroll
    for (int from = 0; from < COL_TILES; from += CHAINS) {
      TokenCodes codes[CHAINS];
      [[maybe_unused]] float2 token_scale[CHAINS];
      [[maybe_unused]] int sum[CHAINS][ROW_TILES][4];
#pragma unroll
      for (int j = 0; j < CHAINS; ++j) {
        const int first = (token_warp * COL_TILES + from + j) * MMA_TOKENS;
        const int token = first + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          codes[j].half[half] =
              load_shared(stage + code_chunk(token, lane % 4 * 2 + half));
        if constexpr (A_GROUPED)
          token_scale[j] = load_shared_pair(stage + TOKEN_SCALES_AT + (first + lane % 4 * 2) * 4);
      }
#if INT4_MMA
      if (in_nibbles) {
#pragma unroll
        for (int q = 0; q < INT4_MMAS; ++q) {
#pragma unroll
          for (int j = 0; j < CHAINS; ++j) {
            uint32_t b[2];
            codes[j].nibbles(b, q);
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
              if (q == 0)
                mma_s4_m16n8k64(sum[j][r], a[r][q], b, start);
              else
                mma_s4_m16n8k64(sum[j][r], a[r][q], b);
            }
          }
        }
      } else
#endif
#pragma unroll
      for (int i = 0; i < MMAS; ++i) {
#pragma unroll
        for (int j = 0; j < CHAINS; ++j) {
          uint32_t b[2];
          codes[j].operand(b, i);
#pragma unroll
          for (int r = 0; r < ROW_TILES; ++r) {
#if DUAL_GRAINED
            mma_s8_m16n8k32(total[r][from + j], a[r][i], b);
#else
            if (i == 0)
              mma_s8_m16n8k32(sum[j][r], a[r][i], b, start);
            else
              mma_s8_m16n8k32(sum[j][r], a[r][i], b);
#endif
          }
        }
      }
#if !DUAL_GRAINED
#pragma unroll
      for (int j = 0; j < CHAINS; ++j)
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float scaled =
                fmaf(__int_as_float(sum[j][r][i]), scale[r][i / 2], bias_out[r][i / 2]);
            float& t = total[r][from + j][i];
            if constexpr (A_GROUPED)
              t = fmaf(scaled, i % 2 == 0 ? token_scale[j].x : token_scale[j].y, t);
            else
              t += scaled;
          }
#endif
    }
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }

  // Through shared memory, [token][row], so that a token's outputs are written contiguously.
  cp_async_wait<0>();
  __syncthreads();
  float* out = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = (token_warp * COL_TILES + j) * MMA_TOKENS + lane % 4 * 2 + i % 2;
        const int row = (row_warp * ROW_TILES + r) * MMA_ROWS + lane / 4 + i / 2 * 8;
        out[token * OUT_STRIDE + row] = bits_of(total[r][j][i]);
      }
  write_out(out, bias, y, m, n, first_tile, first_token, rank, sx, sn);
}
