// probes/spin.cu: a launch of known duration, to test that comparisons detect a change of known size.
//   spin   waits for CYCLES cycles of its SM's clock; cell[0] = cycles waited
#if !defined(CYCLES)
#error "define CYCLES, of the SM's clock"
#endif

extern "C" __global__ void __launch_bounds__(32) spin(long long* cell) {
  const long long start = clock64();
  long long waited = 0;
  while (waited < CYCLES) waited = clock64() - start;
  if (threadIdx.x == 0) cell[0] = waited;
}
