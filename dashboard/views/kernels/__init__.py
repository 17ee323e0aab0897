"""Kernels: roofline, speed-up map, ablation, and stage linear relative to stage gemm."""
