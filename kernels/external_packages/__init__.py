"""Kernels of external packages, called by their public API (docs/kernels/external-packages.md)."""
