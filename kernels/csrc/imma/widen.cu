// imma/widen.cu: 4-bit weights of imma/layout.cuh as int8 rows, for a library's GEMM.
//   tiles [N/16, T], scales uint32 [N/16, T, 8]   as in imma/group_gemm.cu, DUAL_GRAINED
//   out   int8 [N, 128 * T], row-major            scale·(code + zero point); in_mma_order: the k of a group
//                                                 in the order of imma/mma_order.cuh
// One warp per tile; its rows go through shared memory, so that 128 contiguous bytes of a row are written.
#define W_BITS 4
#define DUAL_GRAINED 1
#include "imma/layout.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"

constexpr int WARPS = 8;                    // of a block, on consecutive tiles of the same rows
constexpr int ROW_STRIDE = GROUP / 4 + 4;   // words; + 4: avoids bank conflicts between rows
constexpr int ROW_CHUNKS = GROUP / 16;      // of 16 bytes

// grid: (T over WARPS, N/16), both rounded up.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
widen_weights(const unsigned char* tiles, const uint32_t* scales, uint4* out, int n, int steps,
              int in_mma_order) {
  __shared__ __align__(16) unsigned char packed[WARPS][TILE_BYTES];
  __shared__ __align__(16) uint32_t rows[WARPS][MMA_ROWS][ROW_STRIDE];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int step = blockIdx.x * WARPS + warp, row_tile = blockIdx.y;
  const bool inside = step < steps;
  const long long tile = static_cast<long long>(row_tile) * steps + (inside ? step : 0);
  const uint32_t shared = shared_address(packed[warp]);
#pragma unroll
  for (int i = 0; i < TILE_BYTES / 512; ++i)
    cp_async_16(shared + i * 512 + lane * 16, tiles + tile * TILE_BYTES + i * 512 + lane * 16);
  cp_async_commit();
  const uint32_t row_scales = scales[tile * (MMA_ROWS / 2) + lane / 4];
  cp_async_wait<0>();
  __syncwarp();
  const WeightTile weights(shared, row_scales, lane, false);
#pragma unroll
  for (int o = 0; o < OPERAND_WORDS; ++o) {
    const int word = LANE_K / 4 * (lane % 4) + 2 * (o / 4) + o % 4 / 2;
    rows[warp][lane / 4 + 8 * (o % 2)][in_mma_order ? mma_word(word) : word] = weights.operand(o);
  }
  __syncwarp();
  wait_for_previous_kernel();  // it may still read `out`
  if (!inside) return;
#pragma unroll
  for (int i = 0; i < MMA_ROWS * ROW_CHUNKS / 32; ++i) {
    const int row = (i * 32 + lane) / ROW_CHUNKS, chunk = lane % ROW_CHUNKS;
    const int feature = row_tile * MMA_ROWS + row;
    if (feature < n)
      out[(static_cast<long long>(feature) * steps + step) * ROW_CHUNKS + chunk] =
          *reinterpret_cast<const uint4*>(&rows[warp][row][chunk * 4]);
  }
}
