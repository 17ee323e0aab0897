"""GEMMs of cuBLAS and cuBLASLt, with their quantization and scaling kernels (csrc/cublas)."""
