"""Kernels: roofline, speed-up map, ablation, and stage linear against stage gemm."""
