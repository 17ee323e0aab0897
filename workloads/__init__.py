"""Model shapes, suites and workloads to measure. No torch, no CUDA."""
