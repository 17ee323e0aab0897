// probes/clock.cu: idle gaps between samples, and the SM clock between two points of a stream.
//   pause_and_stamp   waits pause_us, then stamps[SM] = {cycles of that SM's clock, ns of %globaltimer}
#include "ptx/special_registers.cuh"

// longlong2 stamps[sms], one per SM because their cycle counters are unrelated. A sleeping warp issues no
// instructions: the GPU draws little more power than idle, and keeps its clock.
extern "C" __global__ void __launch_bounds__(32)
pause_and_stamp(longlong2* stamps, int sms, int pause_us) {
  if (threadIdx.x != 0) return;
  const long long end = global_ns() + 1000LL * pause_us;
  for (long long remaining = end - global_ns(); remaining > 0; remaining = end - global_ns())
    __nanosleep(remaining < 20'000 ? static_cast<unsigned>(remaining / 2 + 50) : 10'000u);
  const uint32_t sm = sm_number();
  if (sm < static_cast<uint32_t>(sms)) stamps[sm] = make_longlong2(clock64(), global_ns());
}
