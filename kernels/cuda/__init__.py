"""Launchers of the CUDA kernels: each checks, chooses a configuration and launches."""
