// imma/mma_order.cuh: the order in which warpgroup MMA reads the 128 k of a group from shared memory.
#pragma once

// Position of word `natural`, four k, among the 32 words of a group. It follows from the k of each lane in
// imma/layout.cuh.
__device__ inline int mma_word(int natural) {
  return natural % 8 / 2 * 8 + natural % 2 * 4 + natural / 8;
}
