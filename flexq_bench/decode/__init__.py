"""End-to-end decoding of a model under a scheme, on the kernels of the registry."""

SUITE = "decode"  # suite name of runs of `decode`
