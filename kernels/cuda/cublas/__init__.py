"""GEMMs of cuBLAS and cuBLASLt, with the kernels around them (csrc/cublas)."""
