"""Static metrics of compiled kernels, and their comparison between two revisions; needs no GPU."""

SUITE = "static"  # name of the suite of runs with such numbers
