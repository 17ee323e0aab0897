// probes/spin.cu: a launch of known duration, to test that comparisons detect a change of known size.
//   spin   waits until CYCLES cycles of its SM's clock are over; cell[0] = cycles that it waited
#if !defined(CYCLES)
#error "CYCLES: of the SM's clock, from the kernel's first instruction on"
#endif

extern "C" __global__ void __launch_bounds__(32) spin(long long* cell) {
  const long long start = clock64();
  long long waited = 0;
  while (waited < CYCLES) waited = clock64() - start;
  if (threadIdx.x == 0) cell[0] = waited;
}
