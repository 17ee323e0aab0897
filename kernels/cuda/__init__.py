"""Launchers of the CUDA kernels: each checks operands, chooses a configuration and launches."""
