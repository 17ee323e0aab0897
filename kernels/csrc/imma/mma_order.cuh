// imma/mma_order.cuh: the order in which warpgroup MMA reads 128 neighbouring k of a token from shared memory.
#pragma once

// Where the four k of word `natural` of a group's 32 lie then (imma/layout.cuh says which k a lane has).
__device__ inline int mma_word(int natural) {
  return natural % 8 / 2 * 8 + natural % 2 * 4 + natural / 8;
}
