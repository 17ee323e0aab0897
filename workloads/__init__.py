"""What is measured: model shapes, suites and workloads. No torch, no CUDA."""
