"""Run-time compilation (NVRTC) and launching of the sources in kernels/csrc."""
