"""Compare: two runs, two commits or two kernels, case by case."""
