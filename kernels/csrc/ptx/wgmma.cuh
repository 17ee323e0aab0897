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

// Operands: as many sums from the `at`-th on.
#define WGMMA_SUMS_8(d, at)  \
  WGMMA_SUM(d[at]), WGMMA_SUM(d[at + 1]), WGMMA_SUM(d[at + 2]), WGMMA_SUM(d[at + 3]), WGMMA_SUM(d[at + 4]), \
      WGMMA_SUM(d[at + 5]), WGMMA_SUM(d[at + 6]), WGMMA_SUM(d[at + 7])
#define WGMMA_SUMS_16(d, at) WGMMA_SUMS_8(d, at), WGMMA_SUMS_8(d, at + 8)
#define WGMMA_SUMS_32(d, at) WGMMA_SUMS_16(d, at), WGMMA_SUMS_16(d, at + 16)
#define WGMMA_SUMS_64(d, at) WGMMA_SUMS_32(d, at), WGMMA_SUMS_32(d, at + 32)

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
__device__ inline void wgmma_k32(WgmmaSum (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32." WGMMA_TYPES " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, p" WGMMA_SIGNS ";\n}"
      : WGMMA_SUMS_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with 32 tokens: d[64,32], b[32,32].
__device__ inline void wgmma_k32(WgmmaSum (&d)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32." WGMMA_TYPES " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, p" WGMMA_SIGNS ";\n}"
      : WGMMA_SUMS_16(d, 0)
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
      : WGMMA_SUMS_16(d, 0), WGMMA_SUMS_8(d, 16)
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
      : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_16(d, 32)
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
      : WGMMA_SUMS_64(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
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
      : WGMMA_SUMS_64(low, 0), WGMMA_SUMS_64(high, 0)
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
