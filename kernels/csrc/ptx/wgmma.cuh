// wgmma.cuh: warpgroup MMA of Hopper, its matrix descriptors, register reallocation, and stmatrix (PTX ISA,
// wgmma.mma_async, setmaxnreg, stmatrix).
#pragma once
#include "ptx/types.cuh"

// WGMMA_FLOATS: the type of floats of 8 bits in operand a, "e4m3" or "e5m2"; those of b are E4M3, and sums are float.
// Otherwise operands are int8, and sums int.
#ifdef WGMMA_FLOATS
#define WGMMA_TYPES "f32." WGMMA_FLOATS ".e4m3"
#define WGMMA_SIGNS ", 1, 1"
#define WGMMA_SUM "+f"
using WgmmaSum = float;
#else
#define WGMMA_TYPES "s32.s8.s8"
#define WGMMA_SIGNS ""
#define WGMMA_SUM "+r"
using WgmmaSum = int;
#endif

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

// d[64,64] = a[64,32] . b[32,64], accumulated if `add`; 8 bits. a is in registers, 16 rows in each of the four
// warps as in mma_s8_m16n8k32; b is in shared memory, K-major.
__device__ inline void wgmma_m64n64k32(WgmmaSum (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32." WGMMA_TYPES " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, p" WGMMA_SIGNS ";\n}"
      : WGMMA_SUM(d[0]), WGMMA_SUM(d[1]), WGMMA_SUM(d[2]), WGMMA_SUM(d[3]), WGMMA_SUM(d[4]), WGMMA_SUM(d[5]),
        WGMMA_SUM(d[6]), WGMMA_SUM(d[7]), WGMMA_SUM(d[8]), WGMMA_SUM(d[9]), WGMMA_SUM(d[10]), WGMMA_SUM(d[11]),
        WGMMA_SUM(d[12]), WGMMA_SUM(d[13]), WGMMA_SUM(d[14]), WGMMA_SUM(d[15]), WGMMA_SUM(d[16]), WGMMA_SUM(d[17]),
        WGMMA_SUM(d[18]), WGMMA_SUM(d[19]), WGMMA_SUM(d[20]), WGMMA_SUM(d[21]), WGMMA_SUM(d[22]), WGMMA_SUM(d[23]),
        WGMMA_SUM(d[24]), WGMMA_SUM(d[25]), WGMMA_SUM(d[26]), WGMMA_SUM(d[27]), WGMMA_SUM(d[28]), WGMMA_SUM(d[29]),
        WGMMA_SUM(d[30]), WGMMA_SUM(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with 32 tokens: d[64,32], b[32,32].
__device__ inline void wgmma_k32(WgmmaSum (&d)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32." WGMMA_TYPES " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, p" WGMMA_SIGNS ";\n}"
      : WGMMA_SUM(d[0]), WGMMA_SUM(d[1]), WGMMA_SUM(d[2]), WGMMA_SUM(d[3]), WGMMA_SUM(d[4]), WGMMA_SUM(d[5]),
        WGMMA_SUM(d[6]), WGMMA_SUM(d[7]), WGMMA_SUM(d[8]), WGMMA_SUM(d[9]), WGMMA_SUM(d[10]), WGMMA_SUM(d[11]),
        WGMMA_SUM(d[12]), WGMMA_SUM(d[13]), WGMMA_SUM(d[14]), WGMMA_SUM(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with 48 tokens: d[64,48], b[32,48].
__device__ inline void wgmma_k32(WgmmaSum (&d)[24], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k32." WGMMA_TYPES " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23}, "
      "{%24,%25,%26,%27}, %28, p" WGMMA_SIGNS ";\n}"
      : WGMMA_SUM(d[0]), WGMMA_SUM(d[1]), WGMMA_SUM(d[2]), WGMMA_SUM(d[3]), WGMMA_SUM(d[4]), WGMMA_SUM(d[5]),
        WGMMA_SUM(d[6]), WGMMA_SUM(d[7]), WGMMA_SUM(d[8]), WGMMA_SUM(d[9]), WGMMA_SUM(d[10]), WGMMA_SUM(d[11]),
        WGMMA_SUM(d[12]), WGMMA_SUM(d[13]), WGMMA_SUM(d[14]), WGMMA_SUM(d[15]), WGMMA_SUM(d[16]), WGMMA_SUM(d[17]),
        WGMMA_SUM(d[18]), WGMMA_SUM(d[19]), WGMMA_SUM(d[20]), WGMMA_SUM(d[21]), WGMMA_SUM(d[22]), WGMMA_SUM(d[23])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with 96 tokens: d[64,96], b[32,96].
__device__ inline void wgmma_k32(WgmmaSum (&d)[48], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k32." WGMMA_TYPES " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, "
      "{%48,%49,%50,%51}, %52, p" WGMMA_SIGNS ";\n}"
      : WGMMA_SUM(d[0]), WGMMA_SUM(d[1]), WGMMA_SUM(d[2]), WGMMA_SUM(d[3]),
        WGMMA_SUM(d[4]), WGMMA_SUM(d[5]), WGMMA_SUM(d[6]), WGMMA_SUM(d[7]),
        WGMMA_SUM(d[8]), WGMMA_SUM(d[9]), WGMMA_SUM(d[10]), WGMMA_SUM(d[11]),
        WGMMA_SUM(d[12]), WGMMA_SUM(d[13]), WGMMA_SUM(d[14]), WGMMA_SUM(d[15]),
        WGMMA_SUM(d[16]), WGMMA_SUM(d[17]), WGMMA_SUM(d[18]), WGMMA_SUM(d[19]),
        WGMMA_SUM(d[20]), WGMMA_SUM(d[21]), WGMMA_SUM(d[22]), WGMMA_SUM(d[23]),
        WGMMA_SUM(d[24]), WGMMA_SUM(d[25]), WGMMA_SUM(d[26]), WGMMA_SUM(d[27]),
        WGMMA_SUM(d[28]), WGMMA_SUM(d[29]), WGMMA_SUM(d[30]), WGMMA_SUM(d[31]),
        WGMMA_SUM(d[32]), WGMMA_SUM(d[33]), WGMMA_SUM(d[34]), WGMMA_SUM(d[35]),
        WGMMA_SUM(d[36]), WGMMA_SUM(d[37]), WGMMA_SUM(d[38]), WGMMA_SUM(d[39]),
        WGMMA_SUM(d[40]), WGMMA_SUM(d[41]), WGMMA_SUM(d[42]), WGMMA_SUM(d[43]),
        WGMMA_SUM(d[44]), WGMMA_SUM(d[45]), WGMMA_SUM(d[46]), WGMMA_SUM(d[47])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with 128 tokens: d[64,128], b[32,128].
__device__ inline void wgmma_k32(WgmmaSum (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32." WGMMA_TYPES " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, p" WGMMA_SIGNS ";\n}"
      : WGMMA_SUM(d[0]), WGMMA_SUM(d[1]), WGMMA_SUM(d[2]), WGMMA_SUM(d[3]),
        WGMMA_SUM(d[4]), WGMMA_SUM(d[5]), WGMMA_SUM(d[6]), WGMMA_SUM(d[7]),
        WGMMA_SUM(d[8]), WGMMA_SUM(d[9]), WGMMA_SUM(d[10]), WGMMA_SUM(d[11]),
        WGMMA_SUM(d[12]), WGMMA_SUM(d[13]), WGMMA_SUM(d[14]), WGMMA_SUM(d[15]),
        WGMMA_SUM(d[16]), WGMMA_SUM(d[17]), WGMMA_SUM(d[18]), WGMMA_SUM(d[19]),
        WGMMA_SUM(d[20]), WGMMA_SUM(d[21]), WGMMA_SUM(d[22]), WGMMA_SUM(d[23]),
        WGMMA_SUM(d[24]), WGMMA_SUM(d[25]), WGMMA_SUM(d[26]), WGMMA_SUM(d[27]),
        WGMMA_SUM(d[28]), WGMMA_SUM(d[29]), WGMMA_SUM(d[30]), WGMMA_SUM(d[31]),
        WGMMA_SUM(d[32]), WGMMA_SUM(d[33]), WGMMA_SUM(d[34]), WGMMA_SUM(d[35]),
        WGMMA_SUM(d[36]), WGMMA_SUM(d[37]), WGMMA_SUM(d[38]), WGMMA_SUM(d[39]),
        WGMMA_SUM(d[40]), WGMMA_SUM(d[41]), WGMMA_SUM(d[42]), WGMMA_SUM(d[43]),
        WGMMA_SUM(d[44]), WGMMA_SUM(d[45]), WGMMA_SUM(d[46]), WGMMA_SUM(d[47]),
        WGMMA_SUM(d[48]), WGMMA_SUM(d[49]), WGMMA_SUM(d[50]), WGMMA_SUM(d[51]),
        WGMMA_SUM(d[52]), WGMMA_SUM(d[53]), WGMMA_SUM(d[54]), WGMMA_SUM(d[55]),
        WGMMA_SUM(d[56]), WGMMA_SUM(d[57]), WGMMA_SUM(d[58]), WGMMA_SUM(d[59]),
        WGMMA_SUM(d[60]), WGMMA_SUM(d[61]), WGMMA_SUM(d[62]), WGMMA_SUM(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

__device__ inline void wgmma_k32(WgmmaSum (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  wgmma_m64n64k32(d, a, b, add);
}

// The same with 256 tokens: d is low [64,128] and high [64,128] side by side.
__device__ inline void wgmma_k32(WgmmaSum (&low)[64], WgmmaSum (&high)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32." WGMMA_TYPES " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
      "{%128,%129,%130,%131}, %132, p" WGMMA_SIGNS ";\n}"
      : WGMMA_SUM(low[0]), WGMMA_SUM(low[1]), WGMMA_SUM(low[2]), WGMMA_SUM(low[3]),
        WGMMA_SUM(low[4]), WGMMA_SUM(low[5]), WGMMA_SUM(low[6]), WGMMA_SUM(low[7]),
        WGMMA_SUM(low[8]), WGMMA_SUM(low[9]), WGMMA_SUM(low[10]), WGMMA_SUM(low[11]),
        WGMMA_SUM(low[12]), WGMMA_SUM(low[13]), WGMMA_SUM(low[14]), WGMMA_SUM(low[15]),
        WGMMA_SUM(low[16]), WGMMA_SUM(low[17]), WGMMA_SUM(low[18]), WGMMA_SUM(low[19]),
        WGMMA_SUM(low[20]), WGMMA_SUM(low[21]), WGMMA_SUM(low[22]), WGMMA_SUM(low[23]),
        WGMMA_SUM(low[24]), WGMMA_SUM(low[25]), WGMMA_SUM(low[26]), WGMMA_SUM(low[27]),
        WGMMA_SUM(low[28]), WGMMA_SUM(low[29]), WGMMA_SUM(low[30]), WGMMA_SUM(low[31]),
        WGMMA_SUM(low[32]), WGMMA_SUM(low[33]), WGMMA_SUM(low[34]), WGMMA_SUM(low[35]),
        WGMMA_SUM(low[36]), WGMMA_SUM(low[37]), WGMMA_SUM(low[38]), WGMMA_SUM(low[39]),
        WGMMA_SUM(low[40]), WGMMA_SUM(low[41]), WGMMA_SUM(low[42]), WGMMA_SUM(low[43]),
        WGMMA_SUM(low[44]), WGMMA_SUM(low[45]), WGMMA_SUM(low[46]), WGMMA_SUM(low[47]),
        WGMMA_SUM(low[48]), WGMMA_SUM(low[49]), WGMMA_SUM(low[50]), WGMMA_SUM(low[51]),
        WGMMA_SUM(low[52]), WGMMA_SUM(low[53]), WGMMA_SUM(low[54]), WGMMA_SUM(low[55]),
        WGMMA_SUM(low[56]), WGMMA_SUM(low[57]), WGMMA_SUM(low[58]), WGMMA_SUM(low[59]),
        WGMMA_SUM(low[60]), WGMMA_SUM(low[61]), WGMMA_SUM(low[62]), WGMMA_SUM(low[63]),
        WGMMA_SUM(high[0]), WGMMA_SUM(high[1]), WGMMA_SUM(high[2]), WGMMA_SUM(high[3]),
        WGMMA_SUM(high[4]), WGMMA_SUM(high[5]), WGMMA_SUM(high[6]), WGMMA_SUM(high[7]),
        WGMMA_SUM(high[8]), WGMMA_SUM(high[9]), WGMMA_SUM(high[10]), WGMMA_SUM(high[11]),
        WGMMA_SUM(high[12]), WGMMA_SUM(high[13]), WGMMA_SUM(high[14]), WGMMA_SUM(high[15]),
        WGMMA_SUM(high[16]), WGMMA_SUM(high[17]), WGMMA_SUM(high[18]), WGMMA_SUM(high[19]),
        WGMMA_SUM(high[20]), WGMMA_SUM(high[21]), WGMMA_SUM(high[22]), WGMMA_SUM(high[23]),
        WGMMA_SUM(high[24]), WGMMA_SUM(high[25]), WGMMA_SUM(high[26]), WGMMA_SUM(high[27]),
        WGMMA_SUM(high[28]), WGMMA_SUM(high[29]), WGMMA_SUM(high[30]), WGMMA_SUM(high[31]),
        WGMMA_SUM(high[32]), WGMMA_SUM(high[33]), WGMMA_SUM(high[34]), WGMMA_SUM(high[35]),
        WGMMA_SUM(high[36]), WGMMA_SUM(high[37]), WGMMA_SUM(high[38]), WGMMA_SUM(high[39]),
        WGMMA_SUM(high[40]), WGMMA_SUM(high[41]), WGMMA_SUM(high[42]), WGMMA_SUM(high[43]),
        WGMMA_SUM(high[44]), WGMMA_SUM(high[45]), WGMMA_SUM(high[46]), WGMMA_SUM(high[47]),
        WGMMA_SUM(high[48]), WGMMA_SUM(high[49]), WGMMA_SUM(high[50]), WGMMA_SUM(high[51]),
        WGMMA_SUM(high[52]), WGMMA_SUM(high[53]), WGMMA_SUM(high[54]), WGMMA_SUM(high[55]),
        WGMMA_SUM(high[56]), WGMMA_SUM(high[57]), WGMMA_SUM(high[58]), WGMMA_SUM(high[59]),
        WGMMA_SUM(high[60]), WGMMA_SUM(high[61]), WGMMA_SUM(high[62]), WGMMA_SUM(high[63])
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
