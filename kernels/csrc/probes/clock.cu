// probes/clock.cu: idle gaps between samples, and the SM clock between two points of a stream.
//   pause_and_stamp   waits pause_us, then stamps[SM] = {cycles of that SM's clock, ns of %globaltimer}
#include "ptx/special_registers.cuh"

// longlong2 stamps[sms]: cycle counters of different SMs are unrelated. A sleeping warp issues no
// instructions: the GPU draws little more power than idle, and keeps its clock.
extern "C" __global__ void __launch_bounds__(32)
pause_and_stamp(longlong2* stamps, int sms, int pause_us) {
  if (threadIdx.x != 0) return;
  const long long end = global_ns() + 1000LL * pause_us;
  for (long long left = end - global_ns(); left > 0; left = end - global_ns())
    __nanosleep(left < 20'000 ? static_cast<unsigned>(left / 2 + 50) : 10'000u);
  const uint32_t sm = sm_number();
  if (sm < static_cast<uint32_t>(sms)) stamps[sm] = make_longlong2(clock64(), global_ns());
}
