"""Kernels of outside packages, called as their users call them: docs/kernels/peers.md."""
