"""Kernels of third-party packages, called through their public API: docs/kernels/peers.md."""
