// grouped/routing.cuh: which experts have tokens, and the share of the work of each thread block.
//
// An output tile is ROW_BLOCKS row blocks of an expert and up to TOKENS of its tokens. Output tiles are numbered by
// expert, rows and block of tokens; each is `steps` groups of k. STREAM_K: thread blocks take equal ranges of all
// steps, or of whole output tiles where the largest range is at most EXCHANGE_STEPS longer then. The block with the first
// steps of an output tile adds the partial sums of the others, which are integers: results don't depend on the division.
// Blocks are numbered backwards, so that a block waits only for blocks that were scheduled before it. Otherwise they take
// whole output tiles in turn, so that the tiles of one time share weights.
//
// The including source defines TOKENS, ROW_BLOCKS and STREAM_K first.
#pragma once
#include "grouped/layout.cuh"

constexpr int EXCHANGE_STEPS = 2;

// An expert with tokens. first_item: blocks of tokens of experts before it.
struct alignas(16) Touched {
  int expert, first_item, first_row, tokens;
};

// Instructions of kernels with this file are few on purpose: in a step each launch finds them outside the SM's caches.

// Sums over lanes up to this one.
__device__ inline void sum_inclusively(int& a, int& b, int& c, int lane) {
#pragma unroll 1
  for (int offset = 1; offset < 32; offset *= 2) {
    const int more[3] = {__shfl_up_sync(0xFFFFFFFFu, a, offset), __shfl_up_sync(0xFFFFFFFFu, b, offset),
                         __shfl_up_sync(0xFFFFFFFFu, c, offset)};
    if (lane >= offset) a += more[0], b += more[1], c += more[2];
  }
}

// a / b of 0 <= a < 2^31, 0 < b < 2^23, in half the time of the compiler's: a float's quotient, corrected twice.
__device__ inline int quotient(int a, int b) {
  const float inverse = __frcp_rn(static_cast<float>(b));
  int q = static_cast<int>(static_cast<float>(a) * inverse);
  q += static_cast<int>(static_cast<float>(a - q * b) * inverse);
  const int rest = a - q * b;
  return q + (rest >= b) - (rest < 0);
}

// List the experts with tokens, by one warp; then an entry without tokens, whose first_item is the number of items. Return
// their number; 0 if sizes are no valid ones, because they were not written yet. read: the sizes that were read.
// rows_apart: rows from one expert's tokens to the next one's; 0: no unused rows. rows: of all activations.
__device__ inline int list_touched(Touched* touched, int* read, const int* sizes, int experts, int rows_apart, int rows,
                                   int lane) {
  constexpr int BATCH = 4;  // adjacent experts of a lane
  const int most = rows_apart > 0 ? rows_apart : rows;
  int count = 0, items = 0, sum = 0;
  bool is_valid = true;
#pragma unroll 1
  for (int base = lane * BATCH; base - lane * BATCH < experts; base += 32 * BATCH) {
    int size[BATCH], with_tokens = 0, blocks = 0, tokens = 0;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) size[b] = base + b < experts ? load_fresh(sizes + base + b) : 0;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      if (base + b < experts) read[base + b] = size[b];
      is_valid = is_valid && size[b] >= 0 && size[b] <= most;
      size[b] = min(max(size[b], 0), most);
      with_tokens += size[b] > 0, blocks += (size[b] + TOKENS - 1) / TOKENS, tokens += size[b];
    }
    int count_here = with_tokens, items_here = blocks, sum_here = tokens;
    sum_inclusively(count_here, items_here, sum_here, lane);
    int at = count + count_here - with_tokens, item = items + items_here - blocks, row = sum + sum_here - tokens;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      if (size[b] > 0) touched[at++] = {base + b, item, rows_apart > 0 ? (base + b) * rows_apart : row, size[b]};
      item += (size[b] + TOKENS - 1) / TOKENS, row += size[b];
    }
    count += __shfl_sync(0xFFFFFFFFu, count_here, 31), items += __shfl_sync(0xFFFFFFFFu, items_here, 31);
    sum += __shfl_sync(0xFFFFFFFFu, sum_here, 31);
  }
  if (!__all_sync(0xFFFFFFFFu, is_valid) || sum > rows) count = items = 0;
  if (lane == 0) touched[count] = {experts, items, 0, 0};
  return count;
}

// Steps from .. to - 1 of an output tile.
struct Part {
  int from, to, end;                         // end: of the output tile, in steps of all
  int expert, row_block, first_row, tokens;  // row_block: the first; tokens: at most TOKENS
  bool is_shared;                            // weights are read again for more tokens
};

// Parts of a block's share, one after the other.
struct Parts {
  const Expert* sizes;
  const Touched* touched;
  int block, blocks, unit, share, longer;  // share: units of `unit` steps; the first `longer` blocks have one more
  int at, end, index;
  Touched of;
  int step, row, token_block;  // of the next part

  __device__ inline int begin_of(int b) const { return unit * (b * share + min(b, longer)); }
  __device__ inline int token_blocks() const { return (of.tokens + TOKENS - 1) / TOKENS; }

  // By whole warps. count: of experts with tokens. block_, blocks_: number of this thread block, and of all.
  __device__ inline Parts(const Expert& expert, const Touched* list, int count, int block_, int blocks_)
      : sizes(&expert), touched(list), block(block_), blocks(blocks_) {
    const int outputs = touched[count].first_item * sizes->rows_of_outputs, steps = STREAM_K ? sizes->steps : 1;
    const int whole = quotient(outputs, blocks), even = quotient(outputs * steps, blocks);
    const bool is_whole = (whole + (whole * blocks < outputs)) * steps <= even + EXCHANGE_STEPS;
    unit = is_whole ? steps : 1, share = is_whole ? whole : even;
    longer = (is_whole ? outputs : outputs * steps) - share * blocks;
    at = STREAM_K ? begin_of(block) : block, end = STREAM_K ? begin_of(block + 1) : outputs;
    const int output = quotient(at, steps), item = quotient(output, sizes->rows_of_outputs), lane = threadIdx.x % 32;
    int until = 0;  // entries with first_item <= item
    for (int base = 0; base < count; base += 32) {
      const bool is_before = base + lane < count && touched[base + lane].first_item <= item;
      until += __popc(__ballot_sync(0xFFFFFFFFu, is_before));
    }
    index = max(until - 1, 0), step = at - output * steps;
    find(output);
  }

  // Find the row and the block of tokens of an output tile of expert `index` or a later one.
  __device__ inline void find(int output) {
    while (output >= touched[index + 1].first_item * sizes->rows_of_outputs && at < end) ++index;
    of = touched[index];
    const int local = output - of.first_item * sizes->rows_of_outputs;
    row = quotient(local, max(token_blocks(), 1)), token_block = local - row * token_blocks();
  }

  __device__ inline bool next(Part& part) {
    if (at >= end) return false;
    const int token = token_block * TOKENS;
    part.expert = of.expert, part.row_block = row * ROW_BLOCKS, part.first_row = of.first_row + token;
    part.tokens = min(TOKENS, of.tokens - token), part.is_shared = of.tokens > TOKENS;
    if constexpr (STREAM_K) {
      part.from = step, part.to = min(sizes->steps, step + end - at);
      part.end = at - step + sizes->steps;
      at += part.to - step, step = 0;
      if (++token_block < token_blocks()) return true;
      token_block = 0;
      if (++row < sizes->rows_of_outputs) return true;
      row = 0, of = touched[++index];
    } else {
      part.from = 0, part.to = sizes->steps;
      at += blocks;
      find(at);
    }
    return true;
  }
};
