"""Static metrics of compiled kernels, and their comparison between two revisions; needs no GPU."""

SUITE = "static"  # of the runs that hold such numbers
