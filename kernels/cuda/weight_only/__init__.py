"""Kernels with FP16 activations on FP16 tensor cores (csrc/weight_only): w8a16, w4a16, fp6, fp5."""
