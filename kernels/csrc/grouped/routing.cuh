// grouped/routing.cuh: which experts have tokens, and the share of the work of each thread block.
//
// An output tile is BLOCK_ROWS rows of an expert's weights and up to TOKENS of its tokens. Output tiles are numbered by
// expert, row block and block of tokens; each is `steps` groups of k. Thread blocks take equal ranges of all steps
// (stream-K). The block with the first steps of an output tile adds the partial sums of the others, which are integers:
// results don't depend on the division. Blocks are numbered backwards, so that a block waits only for blocks that
// were scheduled before it.
//
// The including source defines TOKENS first.
#pragma once
#include "grouped/layout.cuh"

// An expert with tokens. first_item: blocks of tokens of experts before it.
struct alignas(16) Touched {
  int expert, first_item, first_row, tokens;
};

// Sum over lanes up to this one.
__device__ inline int inclusive_sum(int value, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(0xFFFFFFFFu, value, offset);
    if (lane >= offset) value += below;
  }
  return value;
}

// List the experts with tokens, by one warp, and return their number; then an entry without tokens, whose first_item is the number of items.
// rows_apart: rows from one expert's tokens to the next one's; 0: no unused rows.
__device__ inline int list_touched(Touched* touched, const int* sizes, int experts, int rows_apart, int lane) {
  constexpr int BATCH = 4;  // loads at once
  int count = 0, items = 0, rows = 0;
  for (int base = 0; base < experts; base += 32 * BATCH) {
    int size[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int expert = base + b * 32 + lane;
      size[b] = expert < experts ? static_cast<int>(load_written(reinterpret_cast<const uint32_t*>(sizes) + expert)) : 0;
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int expert = base + b * 32 + lane, blocks = (size[b] + TOKENS - 1) / TOKENS;
      const uint32_t with_tokens = __ballot_sync(0xFFFFFFFFu, size[b] > 0);
      const int items_here = inclusive_sum(blocks, lane), rows_here = inclusive_sum(size[b], lane);
      if (size[b] > 0)
        touched[count + __popc(with_tokens & ((1u << lane) - 1))] = {
            expert, items + items_here - blocks, rows_apart > 0 ? expert * rows_apart : rows + rows_here - size[b],
            size[b]};
      count += __popc(with_tokens);
      items += __shfl_sync(0xFFFFFFFFu, items_here, 31), rows += __shfl_sync(0xFFFFFFFFu, rows_here, 31);
    }
  }
  if (lane == 0) touched[count] = {experts, items, rows, 0};
  return count;
}

// Steps from .. to - 1 of an output tile.
struct Part {
  int from, to, output;
  int expert, row_block, first_row, tokens;  // tokens: at most TOKENS
  bool is_shared;                            // weights are read again for more tokens
};

// Parts of a block's share, one after the other.
struct Parts {
  const Expert& sizes;
  const Touched* touched;
  int total, block, blocks, at, end, index;

  __device__ inline int begin_of(int b) const { return b * (total / blocks) + min(b, total % blocks); }

  // touched_count: of entries with tokens. block: number of this block, blocks: of all.
  __device__ inline Parts(const Expert& of, const Touched* list, int touched_count, int block_, int blocks_)
      : sizes(of), touched(list), block(block_), blocks(blocks_) {
    total = touched[touched_count].first_item * sizes.row_blocks * sizes.steps;
    at = begin_of(block), end = begin_of(block + 1);
    const int item = at / (sizes.row_blocks * sizes.steps);
    int low = 0, high = touched_count;  // the last entry with first_item <= item
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (touched[middle].first_item <= item) low = middle;
      else high = middle;
    }
    index = low;
  }

  __device__ inline bool next(Part& part) {
    if (at >= end) return false;
    part.output = at / sizes.steps;
    part.from = at - part.output * sizes.steps;
    part.to = min(sizes.steps, part.from + end - at);
    at += part.to - part.from;
    if (part.output >= touched[index + 1].first_item * sizes.row_blocks) ++index;
    const Touched of = touched[index];
    const int token_blocks = touched[index + 1].first_item - of.first_item;
    const int local = part.output - of.first_item * sizes.row_blocks;
    part.row_block = local / token_blocks;
    const int token = (local - part.row_block * token_blocks) * TOKENS;
    part.expert = of.expert, part.first_row = of.first_row + token;
    part.tokens = min(TOKENS, of.tokens - token), part.is_shared = token_blocks > 1;
    return true;
  }
};
