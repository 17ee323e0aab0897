"""End-to-end decoding of a model under a scheme, on the kernels of the registry."""

SUITE = "decode"  # of the runs that decode or serve
