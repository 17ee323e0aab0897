// wgmma.cuh: warpgroup MMA of Hopper, its matrix descriptors, register reallocation, and stmatrix (PTX ISA,
// wgmma.mma_async, setmaxnreg, stmatrix).
#pragma once
#include "ptx/types.cuh"

#if __CUDA_ARCH__ == 900
// WGMMA is asynchronous: its registers may not be accessed before wgmma_wait returns.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Between writes to shared memory by threads or cp.async and their reads by tensor cores.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Matrix descriptor of an operand whose rows are 128 bytes along k, with the 128-byte swizzle: 16-byte
// chunk c of row r is at c ^ (r % 8), eight rows in 1024 bytes (PTX, "matrix descriptor").
__device__ inline uint64_t swizzled_descriptor(uint32_t shared) {
  constexpr uint64_t SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = 1024 >> 4, UNUSED = 1;
  return SWIZZLE_128 | EIGHT_ROWS << 32 | UNUSED << 16 | ((shared & 0x3FFFF) >> 4);
}

// Advance by `bytes`, a multiple of 16: within the 128 bytes of a row, or by multiples of eight rows.
__device__ inline uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor >> 32 << 32) | low;
}

// d[64,64] = a[64,32] . b[32,64], accumulated if `add`; int8. a is in registers, 16 rows in each of the four
// warps as in mma_s8_m16n8k32; b is in shared memory, K-major.
__device__ inline void wgmma_s8_m64n64k32(int (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, p;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]),
        "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
        "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]),
        "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]),
        "+r"(d[30]), "+r"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with 32 tokens: d[64,32], b[32,32].
__device__ inline void wgmma_s8_k32(int (&d)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, p;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]),
        "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
        "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with 48 tokens: d[64,48], b[32,48].
__device__ inline void wgmma_s8_k32(int (&d)[24], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k32.s32.s8.s8 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23}, "
      "{%24,%25,%26,%27}, %28, p;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]),
        "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
        "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]),
        "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with 96 tokens: d[64,96], b[32,96].
__device__ inline void wgmma_s8_k32(int (&d)[48], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k32.s32.s8.s8 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, "
      "{%48,%49,%50,%51}, %52, p;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]),
        "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
        "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
        "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
        "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]),
        "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]),
        "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
        "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]),
        "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]),
        "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]),
        "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with 128 tokens: d[64,128], b[32,128].
__device__ inline void wgmma_s8_k32(int (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, p;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]),
        "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
        "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
        "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
        "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]),
        "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]),
        "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
        "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]),
        "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]),
        "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]),
        "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
        "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]),
        "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]),
        "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]),
        "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

__device__ inline void wgmma_s8_k32(int (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  wgmma_s8_m64n64k32(d, a, b, add);
}

// The same with 256 tokens: d is low [64,128] and high [64,128] side by side.
__device__ inline void wgmma_s8_k32(int (&low)[64], int (&high)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
      "{%128,%129,%130,%131}, %132, p;\n}"
      : "+r"(low[0]), "+r"(low[1]), "+r"(low[2]), "+r"(low[3]),
        "+r"(low[4]), "+r"(low[5]), "+r"(low[6]), "+r"(low[7]),
        "+r"(low[8]), "+r"(low[9]), "+r"(low[10]), "+r"(low[11]),
        "+r"(low[12]), "+r"(low[13]), "+r"(low[14]), "+r"(low[15]),
        "+r"(low[16]), "+r"(low[17]), "+r"(low[18]), "+r"(low[19]),
        "+r"(low[20]), "+r"(low[21]), "+r"(low[22]), "+r"(low[23]),
        "+r"(low[24]), "+r"(low[25]), "+r"(low[26]), "+r"(low[27]),
        "+r"(low[28]), "+r"(low[29]), "+r"(low[30]), "+r"(low[31]),
        "+r"(low[32]), "+r"(low[33]), "+r"(low[34]), "+r"(low[35]),
        "+r"(low[36]), "+r"(low[37]), "+r"(low[38]), "+r"(low[39]),
        "+r"(low[40]), "+r"(low[41]), "+r"(low[42]), "+r"(low[43]),
        "+r"(low[44]), "+r"(low[45]), "+r"(low[46]), "+r"(low[47]),
        "+r"(low[48]), "+r"(low[49]), "+r"(low[50]), "+r"(low[51]),
        "+r"(low[52]), "+r"(low[53]), "+r"(low[54]), "+r"(low[55]),
        "+r"(low[56]), "+r"(low[57]), "+r"(low[58]), "+r"(low[59]),
        "+r"(low[60]), "+r"(low[61]), "+r"(low[62]), "+r"(low[63]),
        "+r"(high[0]), "+r"(high[1]), "+r"(high[2]), "+r"(high[3]),
        "+r"(high[4]), "+r"(high[5]), "+r"(high[6]), "+r"(high[7]),
        "+r"(high[8]), "+r"(high[9]), "+r"(high[10]), "+r"(high[11]),
        "+r"(high[12]), "+r"(high[13]), "+r"(high[14]), "+r"(high[15]),
        "+r"(high[16]), "+r"(high[17]), "+r"(high[18]), "+r"(high[19]),
        "+r"(high[20]), "+r"(high[21]), "+r"(high[22]), "+r"(high[23]),
        "+r"(high[24]), "+r"(high[25]), "+r"(high[26]), "+r"(high[27]),
        "+r"(high[28]), "+r"(high[29]), "+r"(high[30]), "+r"(high[31]),
        "+r"(high[32]), "+r"(high[33]), "+r"(high[34]), "+r"(high[35]),
        "+r"(high[36]), "+r"(high[37]), "+r"(high[38]), "+r"(high[39]),
        "+r"(high[40]), "+r"(high[41]), "+r"(high[42]), "+r"(high[43]),
        "+r"(high[44]), "+r"(high[45]), "+r"(high[46]), "+r"(high[47]),
        "+r"(high[48]), "+r"(high[49]), "+r"(high[50]), "+r"(high[51]),
        "+r"(high[52]), "+r"(high[53]), "+r"(high[54]), "+r"(high[55]),
        "+r"(high[56]), "+r"(high[57]), "+r"(high[58]), "+r"(high[59]),
        "+r"(high[60]), "+r"(high[61]), "+r"(high[62]), "+r"(high[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Register count of a warpgroup's threads. All four warps execute it; the kernel has to declare launch bounds.
template <int COUNT>
__device__ inline void setmaxnreg_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ inline void setmaxnreg_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#endif

#if __CUDA_ARCH__ >= 900
// Store four 8x8 matrices of halves, distributed over the warp as in an mma accumulator fragment, each column to
// 16 contiguous bytes. Lane l passes the address of column l % 8 of matrix l / 8.
__device__ inline void stmatrix_transposed(uint32_t shared, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
#endif
