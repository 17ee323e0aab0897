"""Schemes: how the numbers of a model are rounded. What kernels compute, in plain torch."""
