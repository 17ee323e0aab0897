"""What the compiler makes of the kernels, as numbers: no GPU is needed to know them."""

SUITE = "static"  # of the runs that hold such numbers
