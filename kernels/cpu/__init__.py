"""Kernels in torch for machines without a GPU: they test the pipeline, not performance."""
