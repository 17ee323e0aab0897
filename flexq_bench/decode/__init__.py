"""End-to-end decoding of a model under a scheme, on the kernels of the registry."""
